"""A latch that signal handlers may use too."""

from __future__ import annotations

import queue

__all__ = ["Latch"]


class Latch:
    """Is opened once; then whoever waits goes on.

    `threading.Event` holds a lock for a moment whenever it is used: a signal handler, or a finaliser that the garbage
    collector runs, which then waits for another thread that needs the same event would wait for ever. This holds none.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._passes: queue.SimpleQueue[None] = queue.SimpleQueue()

    @property
    def is_open(self) -> bool:
        return self._is_open

    def open(self) -> None:
        """Let everybody through."""
        self._is_open = True
        self._passes.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is open, at most ``timeout`` seconds; return whether it is."""
        if not self._is_open:
            try:
                self._passes.get(timeout=None if timeout is None else max(timeout, 0))
            except queue.Empty:
                pass
            finally:
                if self._is_open:
                    self._passes.put(None)  # for the next who waits, also after an interrupt
        return self._is_open

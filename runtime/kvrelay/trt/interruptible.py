"""Work of the library that Ctrl-C can end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Interruptible"]

T = TypeVar("T")


class Interruptible(Generic[T]):
    """Work on a thread of its own.

    A KeyboardInterrupt raised inside a callback of the library would end the process: it has no way through C++. Here
    it reaches the waiting thread, and the work finds :attr:`cancelled` set where the library asks whether to go on.
    """

    def __init__(self, work: Callable[[Interruptible[T]], T]) -> None:
        self.cancelled = False
        self._work = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._reason: BaseException | None = None  # why it was cancelled, if not by Ctrl-C

    def cancel(self, error: BaseException) -> None:
        """Have the work stop where the library asks, and raise ``error`` in its place."""
        self.cancelled = True
        self._reason = self._reason or error

    def result(self) -> T:
        """Do the work and return what it gives, or raise what it raises.

        Raises:
            KeyboardInterrupt: once the work has ended.
        """
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.2)  # the signal may be delivered to the other thread, which does not wake this one
        except KeyboardInterrupt:
            self.cancelled = True
            thread.join()
            raise
        if (error := self._reason or self._error) is not None:
            raise error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work(self))
        except BaseException as error:
            self._error = error

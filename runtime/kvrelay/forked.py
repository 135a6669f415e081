"""A process that was forked has no threads of its parent: what waits for one there would wait for ever."""

from __future__ import annotations

import os

from .errors import EngineError

__all__ = ["Home"]


class Home:
    """The process in which an engine runs."""

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and not one that was forked from it."""
        return os.getpid() == self._id

    def require(self) -> None:
        """Refuse to go on in another process.

        Raises:
            EngineError: this one was forked from it.
        """
        if not self.is_here:
            raise EngineError(
                f"this engine runs in process {self._id}; this is {os.getpid()}, forked from it: make an engine in the "
                'process that uses it, and start that one with the method "spawn"'
            )

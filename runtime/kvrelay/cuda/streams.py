"""Streams and events."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from .calls import CudaError, check, runtime

__all__ = ["Event", "Stream"]

_log = logging.getLogger(__name__)


class Stream:
    """A queue of work on the GPU that does not wait for the default stream.

    Raises:
        CudaError: it cannot be made.
    """

    def __init__(self) -> None:
        cuda = runtime()
        self.raw = check(cuda.cudaStreamCreateWithFlags(cuda.cudaStreamNonBlocking), "make a stream")
        self.handle = int(self.raw)
        weakref.finalize(self, _destroy, cuda.cudaStreamDestroy, self.raw, "a stream")

    def synchronize(self) -> None:
        """Wait until everything queued so far is done.

        Raises:
            CudaError: some of it failed.
        """
        check(runtime().cudaStreamSynchronize(self.raw), "finish the work on its stream")


class Event:
    """A mark in a stream that can be waited for.

    Raises:
        CudaError: it cannot be made.
    """

    def __init__(self) -> None:
        cuda = runtime()
        self.raw = check(cuda.cudaEventCreateWithFlags(cuda.cudaEventDisableTiming), "make an event")
        weakref.finalize(self, _destroy, cuda.cudaEventDestroy, self.raw, "an event")

    def record(self, stream: Stream) -> None:
        """Put the mark behind what is queued on ``stream``."""
        check(runtime().cudaEventRecord(self.raw, stream.raw), "mark a place in its stream")

    def synchronize(self) -> None:
        """Wait until the stream has come to the mark; at once if it was never set.

        Raises:
            CudaError: work before the mark failed.
        """
        check(runtime().cudaEventSynchronize(self.raw), "finish the work before a mark")


def _destroy(free: Any, handle: Any, what: str) -> None:
    """Free what no capture can be broken by."""
    try:
        check(free(handle), f"free {what}")
    except CudaError as error:
        _log.warning("%s", str(error))  # without the frames that the error holds

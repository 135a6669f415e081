"""The GPU of this process, its stream, and the order in which threads use it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from .calls import CudaError, check, runtime
from .streams import Stream

__all__ = ["Device"]

_log = logging.getLogger(__name__)


class Device:
    """The first GPU that CUDA shows to the process; ``CUDA_VISIBLE_DEVICES`` says which that is.

    One stream takes all work, so that engines may share scratch memory and a copy follows the pass that it needs.
    Threads queue work inside :meth:`exclusive`; what waits for work stays outside of it. Take it from
    :meth:`current`, which gives one object a process.

    Raises:
        BackendMissingError: CUDA's bindings are not installed.
        CudaError: there is no GPU, or no driver that CUDA accepts.
    """

    _one: ClassVar[Device | None] = None
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        cuda = runtime()
        try:
            count = check(cuda.cudaGetDeviceCount(), "count the GPUs of this box")
        except RuntimeError as error:  # older bindings raise where the driver's library is missing
            raise CudaError(f"CUDA has no driver on this box: {error}") from None
        if count < 1:
            raise CudaError("CUDA shows no GPU: look at CUDA_VISIBLE_DEVICES and at nvidia-smi")
        check(cuda.cudaSetDevice(0), "use GPU 0")
        properties = check(cuda.cudaGetDeviceProperties(0), "read what GPU 0 is")
        self.name = bytes(properties.name).split(b"\0")[0].decode()
        self.compute_capability = (int(properties.major), int(properties.minor))
        self.stream = Stream()
        self.capturing = False
        self._lock = threading.RLock()
        self._retired: deque[tuple[Callable[[Any], Any], Any, str]] = deque()

    @classmethod
    def current(cls) -> Device:
        """Return the process's device; the first call finds it."""
        with cls._making:
            if cls._one is None:
                cls._one = cls()
            return cls._one

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the GPU."""
        free, total = check(runtime().cudaMemGetInfo(), "read the free memory of the GPU")
        return int(free), int(total)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Queue work without another thread's in between: a capture takes whatever comes to the stream."""
        with self._lock:
            try:
                yield
            finally:
                self._free_retired()

    def retire(self, free: Callable[[Any], Any], handle: Any, what: str) -> None:
        """Free ``handle`` now or, while a thread queues work, afterwards: freeing would break a capture.

        Finalisers call this, from any thread and at any time, so a failure can only be logged.
        """
        self._retired.append((free, handle, what))
        if self._lock.acquire(blocking=False):
            try:
                self._free_retired()
            finally:
                self._lock.release()

    def _free_retired(self) -> None:
        if self.capturing:
            return
        while self._retired:
            free, handle, what = self._retired.popleft()
            try:
                check(free(handle), f"free {what}")
            except CudaError as error:
                _log.warning("%s", str(error))  # without the frames that the error holds

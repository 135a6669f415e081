"""A strict stand-in for CUDA's runtime bindings: work is done late, wrong use is noted, any call can be made to fail.

GPU memory is host memory behind addresses that the host cannot read. Work on a stream waits until something
synchronises, so that a missing wait shows. Calls return codes, as the real ones do.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

GPU = 1 << 48  # addresses from here on are the GPU's: no process has any there, its threads' heaps included
_POISON = 0xCB


class Code(IntEnum):
    """Return codes."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidResourceHandle = 400
    cudaErrorIllegalAddress = 700
    cudaErrorLaunchFailure = 719
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901


@dataclass(eq=False)
class Stream:
    """A queue of work that is not done yet."""

    handle: int
    queue: deque[Callable[[], None]] = field(default_factory=deque)
    captured: list[Callable[[], None]] | None = None
    capturing_thread: int = 0
    invalid: bool = False

    def __int__(self) -> int:
        return self.handle

    def put(self, work: Callable[[], None]) -> None:
        (self.queue if self.captured is None else self.captured).append(work)


@dataclass(eq=False)
class Handle:
    """An event, a graph or an executable graph."""

    kind: str
    work: list[Callable[[], None]] = field(default_factory=list)
    stream: Stream | None = None
    passed: bool = True

    def __int__(self) -> int:
        return id(self)


class Pitched:
    """cudaPitchedPtr."""

    ptr = pitch = xsize = ysize = 0


class Extent:
    """cudaExtent."""

    width = height = depth = 0


class Params:
    """cudaMemcpy3DParms."""

    srcPtr: Pitched
    dstPtr: Pitched
    extent: Extent
    kind: int = -1


class FakeCuda:
    """Use it in place of the module ``cuda.bindings.runtime``."""

    cudaStreamNonBlocking = 1
    cudaEventDisableTiming = 2
    cudaHostAllocDefault = 0
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cudaError_t = Code
    cudaPitchedPtr = Pitched
    cudaExtent = Extent
    cudaMemcpy3DParms = Params

    def __init__(self, total: int = 1 << 30) -> None:
        self.total = total
        self.violations: list[str] = []
        self.calls: list[str] = []
        self.failing: int | None = None  # number of the call that fails
        self.memory: dict[int, np.ndarray] = {}  # GPU allocations by address
        self.pinned: dict[int, np.ndarray] = {}
        self.handles: set[Any] = set()  # live streams, events and graphs
        self.lost: set[str] = set()  # frees that were made to fail
        self.copied = 0  # bytes by copies between any two places, when they were done
        self.lock = threading.RLock()
        self._next = GPU
        self._sticky = Code.cudaSuccess
        for name in [n for n in dir(self) if n.startswith("cuda") and callable(getattr(self, n))]:
            if not isinstance(getattr(self, name), type):
                setattr(self, name, self._counted(name, getattr(self, name)))

    def _counted(self, name: str, call: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        def counted(*arguments: Any) -> tuple[Any, ...]:
            with self.lock:
                self.calls.append(name)
                if self.failing == len(self.calls) - 1:
                    if "Free" in name or "Destroy" in name:
                        self.lost.add(name)
                    if name == "cudaStreamEndCapture":  # the capture is over all the same, and gives no graph
                        self.handles.discard(call(*arguments)[1])
                    return Code.cudaErrorLaunchFailure, *[None] * (len(_GIVES.get(name, "")))
                return call(*arguments)

        return counted

    def live(self) -> list[str]:
        """What was made and not freed."""
        kinds = [h.kind if isinstance(h, Handle) else "stream" for h in self.handles]
        return sorted([*kinds, *(["memory"] * len(self.memory)), *(["pinned"] * len(self.pinned))])

    # -- the device -------------------------------------------------------------------------------------------------

    def cudaGetDeviceCount(self) -> tuple[Any, ...]:
        return Code.cudaSuccess, 1

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:
        return (Code.cudaSuccess if device == 0 else Code.cudaErrorInvalidValue,)

    def cudaGetDeviceProperties(self, device: int) -> tuple[Any, ...]:
        return Code.cudaSuccess, SimpleNamespace(name=b"Fake GPU".ljust(256, b"\0"), major=8, minor=7)

    def cudaMemGetInfo(self) -> tuple[Any, ...]:
        return Code.cudaSuccess, self._free(), self.total

    def _free(self) -> int:
        return self.total - sum(m.nbytes for m in self.memory.values())

    # -- memory -----------------------------------------------------------------------------------------------------

    def view(self, address: int, size: int) -> np.ndarray | None:
        """Bytes behind any address, None if nothing lies there."""
        if address >= GPU:
            for start, memory in self.memory.items():
                if start <= address and address + size <= start + memory.nbytes:
                    return memory[address - start : address - start + size]
            return None
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)

    def _pinned_at(self, address: int) -> bool:
        return any(start <= address < start + memory.nbytes for start, memory in self.pinned.items())

    def _breaks_capture(self) -> bool:
        """Calls that wait for the GPU, or allocate, spoil a capture of the same thread."""
        spoilt = [s for s in self._streams() if s.captured is not None and s.capturing_thread == threading.get_ident()]
        for stream in spoilt:
            stream.invalid = True
        return bool(spoilt)

    def _streams(self) -> list[Stream]:
        return [h for h in self.handles if isinstance(h, Stream)]

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        if self._breaks_capture():
            return Code.cudaErrorStreamCaptureUnsupported, None
        if size <= 0:
            return Code.cudaErrorInvalidValue, None
        if size > self._free():
            return Code.cudaErrorMemoryAllocation, None
        address, self._next = self._next, self._next + -(-size // 256) * 256 + 4096
        raw = np.full(size + 64, _POISON, np.uint8)
        start = -raw.ctypes.data % 64
        self.memory[address] = raw[start : start + size]
        return Code.cudaSuccess, address

    def cudaFree(self, address: int) -> tuple[Any, ...]:
        if self._breaks_capture():
            return (Code.cudaErrorStreamCaptureUnsupported,)
        for stream in self._streams():
            self._drain(stream)
        return (Code.cudaSuccess if self.memory.pop(address, None) is not None else Code.cudaErrorInvalidValue,)

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[Any, ...]:
        if self._breaks_capture():
            return Code.cudaErrorStreamCaptureUnsupported, None
        memory = np.full(size, _POISON, np.uint8)
        self.pinned[memory.ctypes.data] = memory
        return Code.cudaSuccess, memory.ctypes.data

    def cudaFreeHost(self, address: int) -> tuple[Any, ...]:
        if self._breaks_capture():
            return (Code.cudaErrorStreamCaptureUnsupported,)
        if any(s.queue for s in self._streams()):
            self.violations.append("page-locked memory freed while work is queued")
        memory = self.pinned.pop(address, None)
        if memory is None:
            return (Code.cudaErrorInvalidValue,)
        memory[:] = _POISON
        return (Code.cudaSuccess,)

    # -- work -------------------------------------------------------------------------------------------------------

    def stream(self, handle: Any) -> Stream | None:
        """The stream behind a handle; the default stream is never right."""
        if int(handle) == 0:
            self.violations.append("the default stream was used")
        return next((s for s in self._streams() if s.handle == int(handle)), None)

    def fail_later(self, code: Code) -> None:
        """Let the next wait report ``code``, and all after it, as a fault of the GPU does."""
        self._sticky = code

    def _copy(self, destination: int, source: int, size: int) -> None:
        to, of = self.view(destination, size), self.view(source, size)
        if to is None or of is None:
            self.fail_later(Code.cudaErrorIllegalAddress)
        else:
            to[:] = of
            self.copied += size

    def _is_pageable(self, address: int) -> bool:
        return address < GPU and not self._pinned_at(address)

    def cudaMemcpyAsync(self, destination: int, source: int, size: int, kind: int, stream: Any) -> tuple[Any, ...]:
        on = self.stream(stream)
        if on is None or kind != 4:
            return (Code.cudaErrorInvalidValue,)
        if self._is_pageable(destination) or self._is_pageable(source):
            self.violations.append("a copy of memory that is not page-locked is not asynchronous")
        on.put(lambda: self._copy(destination, source, size))
        return (Code.cudaSuccess,)

    def cudaMemcpy3DAsync(self, parameters: Params, stream: Any) -> tuple[Any, ...]:
        on = self.stream(stream)
        to, of, extent = parameters.dstPtr, parameters.srcPtr, parameters.extent
        if on is None or parameters.kind != 4 or min(to.pitch, of.pitch) < extent.width:
            return (Code.cudaErrorInvalidValue,)
        if extent.height > min(to.ysize, of.ysize) and extent.depth > 1:
            return (Code.cudaErrorInvalidValue,)
        if self._is_pageable(to.ptr) or self._is_pageable(of.ptr):
            self.violations.append("a copy of memory that is not page-locked is not asynchronous")
        rows = _rows(to, extent), _rows(of, extent)

        def work() -> None:
            for destination, source in zip(*rows, strict=True):
                self._copy(destination, source, extent.width)

        on.put(work)
        return (Code.cudaSuccess,)

    def _fill(self, address: int, value: int, size: int) -> None:
        memory = self.view(address, size) if address >= GPU else None
        if memory is None:
            self.fail_later(Code.cudaErrorIllegalAddress)
        else:
            memory[:] = value

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: Any) -> tuple[Any, ...]:
        on = self.stream(stream)
        if on is None:
            return (Code.cudaErrorInvalidValue,)
        on.put(lambda: self._fill(address, value, size))
        return (Code.cudaSuccess,)

    def cudaMemset3DAsync(self, pointer: Pitched, value: int, extent: Extent, stream: Any) -> tuple[Any, ...]:
        on = self.stream(stream)
        if on is None or pointer.pitch < extent.width:
            return (Code.cudaErrorInvalidValue,)
        rows = _rows(pointer, extent)
        on.put(lambda: [self._fill(row, value, extent.width) for row in rows] and None)
        return (Code.cudaSuccess,)

    # -- streams and events -----------------------------------------------------------------------------------------

    def _drain(self, stream: Stream, until: Callable[[], bool] = lambda: False) -> None:
        while stream.queue and not until():
            stream.queue.popleft()()

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        if flags != self.cudaStreamNonBlocking:
            self.violations.append("a stream that waits for the default stream")
        stream = Stream(0x5000 + len(self.calls))
        self.handles.add(stream)
        return Code.cudaSuccess, stream

    def cudaStreamDestroy(self, stream: Stream) -> tuple[Any, ...]:
        self._drain(stream)
        return self._destroy(stream)

    def cudaStreamSynchronize(self, stream: Stream) -> tuple[Any, ...]:
        if stream not in self.handles:
            return (Code.cudaErrorInvalidResourceHandle,)
        if stream.captured is not None:
            stream.invalid = True
            return (Code.cudaErrorStreamCaptureUnsupported,)
        self._drain(stream)
        return (self._sticky,)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        event = Handle("event")
        self.handles.add(event)
        return Code.cudaSuccess, event

    def cudaEventDestroy(self, event: Handle) -> tuple[Any, ...]:
        return self._destroy(event)

    def cudaEventRecord(self, event: Handle, stream: Any) -> tuple[Any, ...]:
        on = self.stream(stream)
        if on is None or event not in self.handles:
            return (Code.cudaErrorInvalidResourceHandle,)
        event.passed, event.stream = False, on

        def passing() -> None:
            event.passed = True

        on.put(passing)
        return (Code.cudaSuccess,)

    def cudaEventSynchronize(self, event: Handle) -> tuple[Any, ...]:
        if event not in self.handles:
            return (Code.cudaErrorInvalidResourceHandle,)
        if event.stream is not None:
            self._drain(event.stream, lambda: event.passed)
        return (self._sticky,)

    # -- graphs -----------------------------------------------------------------------------------------------------

    def cudaStreamBeginCapture(self, stream: Stream, mode: int) -> tuple[Any, ...]:
        if stream.captured is not None or mode != 1:
            return (Code.cudaErrorInvalidValue,)
        stream.captured, stream.invalid, stream.capturing_thread = [], False, threading.get_ident()
        return (Code.cudaSuccess,)

    def cudaStreamEndCapture(self, stream: Stream) -> tuple[Any, ...]:
        work, stream.captured = stream.captured, None
        if work is None or stream.invalid or stream.capturing_thread != threading.get_ident():
            return Code.cudaErrorStreamCaptureInvalidated, None
        graph = Handle("graph", work)
        self.handles.add(graph)
        return Code.cudaSuccess, graph

    def cudaGraphInstantiate(self, graph: Handle, flags: int) -> tuple[Any, ...]:
        executable = Handle("executable", list(graph.work))
        self.handles.add(executable)
        return Code.cudaSuccess, executable

    def cudaGraphLaunch(self, executable: Handle, stream: Any) -> tuple[Any, ...]:
        on = self.stream(stream)
        if on is None or executable not in self.handles or on.captured is not None:
            return (Code.cudaErrorInvalidResourceHandle,)
        on.queue.extend(executable.work)
        return (Code.cudaSuccess,)

    def cudaGraphDestroy(self, graph: Handle) -> tuple[Any, ...]:
        return self._destroy(graph)

    def cudaGraphExecDestroy(self, executable: Handle) -> tuple[Any, ...]:
        return self._destroy(executable)

    def _destroy(self, handle: Any) -> tuple[Any, ...]:
        if handle not in self.handles:
            return (Code.cudaErrorInvalidResourceHandle,)
        self.handles.remove(handle)
        return (Code.cudaSuccess,)


# Calls that give values besides their code, one letter for each.
_GIVES = {
    "cudaGetDeviceCount": "n",
    "cudaGetDeviceProperties": "p",
    "cudaMemGetInfo": "ft",
    "cudaMalloc": "a",
    "cudaHostAlloc": "a",
    "cudaStreamCreateWithFlags": "s",
    "cudaEventCreateWithFlags": "e",
    "cudaStreamEndCapture": "g",
    "cudaGraphInstantiate": "x",
}


def _rows(pointer: Pitched, extent: Extent) -> list[int]:
    """Addresses of the rows of a block."""
    return [
        pointer.ptr + (z * pointer.ysize + y) * pointer.pitch for z in range(extent.depth) for y in range(extent.height)
    ]

"""Device memory, page-locked host memory, and copies between them on the device's stream."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .calls import CudaError, check, runtime
from .device import Device

__all__ = ["Block", "DeviceBuffer", "PinnedArray", "copy", "copy_block", "zero", "zero_block"]


class DeviceBuffer:
    """Device memory, zeroed, freed when nothing refers to it. Its address is a multiple of 256.

    Raises:
        CudaError: there is no room; says how much was asked for and how much is free.
    """

    def __init__(self, size: int) -> None:
        device = Device.current()
        cuda = runtime()
        self.size = size
        with device.exclusive():
            try:
                self.address = int(check(cuda.cudaMalloc(size), f"allocate {size / 2**20:.1f} MiB on the GPU"))
            except CudaError as error:
                free, total = device.memory()
                raise CudaError(f"{error}; {free / 2**20:.1f} of {total / 2**20:.1f} MiB are free") from None
            weakref.finalize(self, device.retire, cuda.cudaFree, self.address, f"{size} bytes of the GPU")
            zero(self.address, size)


class PinnedArray:
    """Page-locked host memory as a zeroed array, which the GPU reads and writes while the host goes on.

    It is freed when neither this object nor a view of ``array`` is left, after the work that may use it.

    Raises:
        CudaError: it cannot be allocated.
    """

    def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        device = Device.current()
        cuda = runtime()
        kind = np.dtype(dtype)
        size = max(int(np.prod(shape)) * kind.itemsize, 1)
        with device.exclusive():
            doing = f"lock {size / 2**20:.1f} MiB of host memory"
            self.address = int(check(cuda.cudaHostAlloc(size, cuda.cudaHostAllocDefault), doing))
        memory = (ctypes.c_char * size).from_address(self.address)
        ctypes.memset(self.address, 0, size)
        weakref.finalize(
            memory, device.retire, _free_pinned(cuda, device), self.address, f"{size} bytes of locked memory"
        )
        flat = np.frombuffer(memoryview(memory), np.uint8)  # keeps `memory` alive, and views keep it
        self.array: npt.NDArray[Any] = flat[: int(np.prod(shape)) * kind.itemsize].view(kind).reshape(tuple(shape))


def _free_pinned(cuda: Any, device: Device) -> Callable[[int], tuple[Any, ...]]:
    def free(address: int) -> tuple[Any, ...]:
        # Copies from and to it may still be queued; CUDA does not promise to wait for them.
        waited: tuple[Any, ...] = cuda.cudaStreamSynchronize(device.stream.raw)
        freed: tuple[Any, ...] = cuda.cudaFreeHost(address)
        return waited if int(waited[0]) else freed

    return free


def copy(destination: int, source: int, size: int, what: str) -> None:
    """Queue a copy of ``size`` bytes between any two addresses, of the host or of the GPU."""
    cuda = runtime()
    kind, stream = cuda.cudaMemcpyKind.cudaMemcpyDefault, Device.current().stream.raw
    check(cuda.cudaMemcpyAsync(destination, source, size, kind, stream), f"copy {what}")


def zero(address: int, size: int) -> None:
    """Queue the zeroing of ``size`` bytes of the GPU."""
    check(runtime().cudaMemsetAsync(address, 0, size, Device.current().stream.raw), f"zero {size} bytes")


@dataclass(frozen=True, slots=True)
class Block:
    """Where equally long rows of bytes lie: ``[slices, rows]`` of them, in memory of ``slice_rows`` rows a slice."""

    address: int
    pitch: int  # bytes from one row to the next
    slice_rows: int  # rows from one slice to the next


def copy_block(destination: Block, source: Block, width: int, rows: int, slices: int, what: str) -> None:
    """Queue a copy of ``[slices, rows]`` rows of ``width`` bytes as one call."""
    cuda = runtime()
    call = cuda.cudaMemcpy3DParms()
    call.dstPtr = _pitched(cuda, destination, width)
    call.srcPtr = _pitched(cuda, source, width)
    call.extent = _extent(cuda, width, rows, slices)
    call.kind = cuda.cudaMemcpyKind.cudaMemcpyDefault
    check(cuda.cudaMemcpy3DAsync(call, Device.current().stream.raw), f"copy {what}")


def zero_block(block: Block, width: int, rows: int, slices: int, what: str) -> None:
    """Queue the zeroing of ``[slices, rows]`` rows of ``width`` bytes of the GPU."""
    cuda = runtime()
    where, extent = _pitched(cuda, block, width), _extent(cuda, width, rows, slices)
    check(cuda.cudaMemset3DAsync(where, 0, extent, Device.current().stream.raw), f"zero {what}")


def _pitched(cuda: Any, block: Block, width: int) -> Any:
    pointer = cuda.cudaPitchedPtr()
    pointer.ptr, pointer.pitch, pointer.xsize, pointer.ysize = block.address, block.pitch, width, block.slice_rows
    return pointer


def _extent(cuda: Any, width: int, rows: int, slices: int) -> Any:
    extent = cuda.cudaExtent()
    extent.width, extent.height, extent.depth = width, rows, slices
    return extent

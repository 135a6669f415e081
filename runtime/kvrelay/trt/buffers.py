"""The memory of a pass: what is staged for the host, what passes share, and where each tensor lies."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ..cuda import Device, DeviceBuffer, PinnedArray, copy
from ..kv import KVCache

__all__ = ["ALIGNMENT", "LogitMemory", "Place", "Staged", "layout", "logit_memory", "padded_rows", "scratch"]

ALIGNMENT = 256  # bytes, of every address that TensorRT is given

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a block of memory."""

    offset: int
    shape: Shape
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def layout(tensors: Mapping[str, tuple[Shape, npt.DTypeLike]]) -> tuple[dict[str, Place], int]:
    """Lay tensors out one behind the other, each at an aligned offset; return their places and the bytes in all."""
    places: dict[str, Place] = {}
    end = 0
    for name, (shape, dtype) in tensors.items():
        places[name] = place = Place(end, shape, np.dtype(dtype))
        end += -(-place.size // ALIGNMENT) * ALIGNMENT
    return places, end


class Staged:
    """Small tensors in page-locked host memory and, in the same order, on the GPU: one copy moves them all."""

    def __init__(self, tensors: Mapping[str, tuple[Shape, npt.DTypeLike]], what: str) -> None:
        places, self._size = layout(tensors)
        self._what = what
        self._host = PinnedArray((self._size,), np.uint8)
        self._device = DeviceBuffer(self._size)
        self.arrays = {
            name: self._host.array[p.offset : p.offset + p.size].view(p.dtype).reshape(p.shape)
            for name, p in places.items()
        }
        self.addresses = {name: self._device.address + p.offset for name, p in places.items()}

    def to_device(self) -> None:
        """Queue the copy to the GPU."""
        copy(self._device.address, self._host.address, self._size, f"{self._what} to the GPU")

    def to_host(self) -> None:
        """Queue the copy to the host."""
        copy(self._host.address, self._device.address, self._size, f"{self._what} from the GPU")


class LogitMemory:
    """Whole rows of logits on the GPU and, once they were asked for, on the host."""

    def __init__(self, size: int) -> None:
        self.size = size  # floats
        self.device = DeviceBuffer(4 * size)
        self._host: PinnedArray | None = None

    def host(self) -> PinnedArray:
        """Return the host's side, made on first use: most requests never need a whole row."""
        if self._host is None:
            self._host = PinnedArray((self.size,), np.float32)
        return self._host


_making = threading.Lock()
_logits: WeakKeyDictionary[KVCache, list[LogitMemory]] = WeakKeyDictionary()
_scratch: WeakKeyDictionary[Device, dict[str, DeviceBuffer]] = WeakKeyDictionary()


def logit_memory(cache: KVCache, size: int) -> LogitMemory:
    """Return memory for ``size`` logits. Passes over one cache share it, since they run one after the other."""
    with _making:
        mine = _logits.setdefault(cache, [])
        found = next((memory for memory in mine if memory.size >= size), None)
        if found is None:
            mine.append(found := LogitMemory(size))
        return found


def scratch(use: str, size: int) -> DeviceBuffer:
    """Return at least ``size`` bytes that are junk before and after a pass.

    All passes share it: they are queued on one stream. Who got a smaller buffer before keeps that, since a captured
    graph has its address.
    """
    with _making:
        mine = _scratch.setdefault(Device.current(), {})
        if use not in mine or mine[use].size < size:
            mine[use] = DeviceBuffer(max(size, 1))
        return mine[use]


def padded_rows(rows: int, row_bytes: int) -> int:
    """Return the least number of rows, at least ``rows``, that ends at an aligned offset."""
    step = ALIGNMENT // int(np.gcd(ALIGNMENT, row_bytes))
    return -(-rows // step) * step

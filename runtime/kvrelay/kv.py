"""KV caches: allocated once at fixed capacity, bound by address, never moved.

A length per slot is the only truth about which entries are valid; entries beyond it are junk that a mask hides.
Buffers start at zero because a NaN behind a mask would leak into a sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from . import contract
from .errors import EngineError, MemoryBudgetError
from .manifest import ModelEntry

if TYPE_CHECKING:
    from .cuda import Block
    from .cuda.entries import DeviceEntries

__all__ = ["HandOver", "KVCache", "Memory", "aligned_zeros", "kv_bytes"]

Memory = Literal["host", "cuda"]

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")  # inside a container its own


def aligned_zeros(shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """Return zeros whose address is a multiple of 64 bytes, so that a buffer's place never changes its results."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape)) * kind.itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(kind).reshape(shape)


def kv_bytes(model: ModelEntry, layers: int, itemsize: int, entries: int) -> int:
    """Bytes that ``entries`` KV entries of ``layers`` layers take: key and value."""
    return 2 * layers * model.kv_heads * model.head_dim * itemsize * entries


class _HostEntries:
    """The entries of a cache in host memory: one array a tensor, ``[slots, Hkv, Lmax, D]``."""

    def __init__(self, names: Sequence[str], shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> None:
        self.tensors = {name: aligned_zeros(shape, dtype) for name in names}
        self._heads, self._dim, self._dtype = shape[1], shape[3], dtype

    def address(self, name: str, slot: int) -> int:
        return int(self.tensors[name][slot].ctypes.data)

    def read(self, names: Sequence[str], slot: int, start: int, end: int) -> npt.NDArray[Any]:
        found = np.empty((len(names), self._heads, end - start, self._dim), self._dtype)
        for part, name in zip(found, names, strict=True):
            part[:] = self.tensors[name][slot, :, start:end]
        return found

    def write(self, names: Sequence[str], slot: int, start: int, values: npt.NDArray[Any]) -> None:
        for name, part in zip(names, values, strict=True):
            self.tensors[name][slot, :, start : start + part.shape[1]] = part

    def clear(self, slot: int, start: int, end: int) -> None:
        for tensor in self.tensors.values():
            tensor[slot, :, start:end] = 0

    def swap(self, a: int, b: int, length: int) -> None:
        for tensor in self.tensors.values():
            kept = tensor[a, :, :length].copy()
            tensor[a, :, :length] = tensor[b, :, :length]
            tensor[b, :, :length] = kept


class KVCache:
    """The cache of ``slots`` requests: per layer a key and a value buffer ``[slots, Hkv, Lmax, D]``.

    Args:
        model: sizes.
        layers: layers of the model that have a buffer.
        dtype: of an element.
        slots: requests.
        memory: "host", or "cuda" for the GPU's memory.

    Raises:
        MemoryBudgetError: the buffers would not fit in the memory that the box, or its GPU, has left.
        CudaError: there is no GPU.
    """

    def __init__(
        self,
        model: ModelEntry,
        layers: Sequence[int],
        dtype: npt.DTypeLike = np.float32,
        slots: int = 1,
        memory: Memory = "host",
    ) -> None:
        self.model = model
        self.layers = tuple(layers)
        self.dtype = np.dtype(dtype)
        self.slots = slots
        self.memory = memory
        self.names = contract.past_names(self.layers)
        self.shape = (slots, model.kv_heads, model.capacity, model.head_dim)
        self.bytes = kv_bytes(model, len(self.layers), self.dtype.itemsize, model.capacity * slots)
        available = _available_bytes() if memory == "host" else _available_bytes_of_gpu()
        if available is not None and self.bytes > available:
            raise MemoryBudgetError(
                f"a KV cache of {slots} slot(s) x {model.capacity} entries needs {self.bytes / 2**20:.0f} MiB, "
                f"{available / 2**20:.0f} MiB are available; export with a smaller --context or free memory"
            )
        self._entries: _HostEntries | DeviceEntries
        if memory == "host":
            self._entries = _HostEntries(self.names, self.shape, self.dtype)
        else:
            from .cuda.entries import DeviceEntries

            self._entries = DeviceEntries(self.names, self.shape, self.dtype)

    @property
    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays themselves, by past name.

        Raises:
            EngineError: the cache is not in host memory; :meth:`read` and :meth:`write` copy.
        """
        if not isinstance(self._entries, _HostEntries):
            raise EngineError("a KV cache in GPU memory has no arrays on the host: read() copies entries")
        return self._entries.tensors

    def address(self, name: str, slot: int) -> int:
        """Address of the first byte of ``slot`` in the tensor ``name`` (a past name of the contract)."""
        return self._entries.address(name, slot)

    def read(self, slot: int, start: int, end: int, names: Sequence[str] | None = None) -> npt.NDArray[Any]:
        """Return a copy of the entries ``start .. end - 1`` of a slot: ``[tensors, Hkv, entries, D]``."""
        return self._entries.read(self.names if names is None else names, slot, start, end)

    def write(self, slot: int, start: int, values: npt.NDArray[Any], names: Sequence[str] | None = None) -> int:
        """Set the entries of a slot from ``start`` on to ``values`` ``[tensors, Hkv, entries, D]``; return the bytes.

        A GPU takes them after the passes that are queued, while the host goes on.
        """
        self._entries.write(self.names if names is None else names, slot, start, values)
        return int(values.size) * self.dtype.itemsize

    def copy_from(self, source: KVCache, slot: int, start: int, end: int) -> int:
        """Copy entries from another cache in GPU memory, of the same dtype, on the GPU itself; return the bytes."""
        mine, theirs = self._entries, source._entries
        assert not isinstance(mine, _HostEntries) and not isinstance(theirs, _HostEntries)
        mine.copy_from(theirs, self.names, slot, start, end)
        return kv_bytes(self.model, len(self.layers), self.dtype.itemsize, end - start)

    def append(self, slot: int, start: int, size: int, source: Block, names: Sequence[str]) -> int:
        """Copy ``size`` new entries on the GPU, where ``source`` says they lie, to a slot; return the bytes."""
        assert not isinstance(self._entries, _HostEntries)
        self._entries.append(names, slot, start, size, source)
        return len(names) * self.shape[1] * size * self.shape[3] * self.dtype.itemsize

    def swap(self, a: int, b: int, length: int) -> int:
        """Exchange the first ``length`` entries of two slots; return the bytes written."""
        self._entries.swap(a, b, length)
        return 2 * kv_bytes(self.model, len(self.layers), self.dtype.itemsize, length)

    def clear(self, slot: int, start: int = 0, end: int | None = None) -> None:
        """Zero the entries ``start .. end - 1`` of a slot: a NaN behind a mask would leak into a sum."""
        capacity = self.model.capacity
        self._entries.clear(slot, start, capacity if end is None else min(end, capacity))


class HandOver:
    """Copies new KV entries from one cache to another that cannot share its memory (another dtype or device).

    To a GPU they are copied while the host goes on; from a GPU the host waits for them.
    """

    def __init__(self, source: KVCache, destination: KVCache) -> None:
        self.source = source
        self.destination = destination
        self.lengths = [0] * source.slots
        self.bytes = 0  # written so far, on the host between two GPU caches of different dtypes too

    def restart(self, slot: int = 0) -> None:
        """Forget what was copied: a new request has the slot."""
        self.lengths[slot] = 0

    def advance(self, length: int, slot: int = 0) -> None:
        """Copy the entries that the destination lacks up to ``length``, all of them committed."""
        start = self.lengths[slot]
        if length <= start:
            return
        source, destination = self.source, self.destination
        names = destination.names
        same_memory = source.memory == destination.memory == "cuda"
        if same_memory and source.dtype == destination.dtype:
            self.bytes += destination.copy_from(source, slot, start, length)
        else:
            values = source.read(slot, start, length, names)
            self.bytes += destination.write(slot, start, values, names)
            if same_memory:  # no kernel of ours converts on the GPU
                self.bytes += values.nbytes
        self.lengths[slot] = length


def _available_bytes() -> int | None:
    """Return what is left of the box's memory or, if that is less, of a container's; None if neither is known."""
    known = [size for size in (_left_of_box(), _left_of_container()) if size is not None]
    return min(known, default=None)


def _left_of_box() -> int | None:
    with contextlib.suppress(OSError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _left_of_container() -> int | None:
    """Return the bytes up to the limit of this cgroup (version 2); cached files give way, so they count as free."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the limit is "max"
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        figures = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return max(limit - used + int(figures.get("inactive_file", 0)), 0)
    return None


def _available_bytes_of_gpu() -> int:
    from .cuda import Device

    return Device.current().memory()[0]

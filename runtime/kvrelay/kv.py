"""KV caches: allocated once at fixed capacity, bound by address, never moved.

A length per slot is the only truth about which entries are valid; entries beyond it are junk that a mask hides.
Buffers start at zero because a NaN behind a mask would leak into a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from . import contract
from .errors import MemoryBudgetError
from .manifest import ModelEntry

__all__ = ["HandOver", "KVCache", "aligned_zeros", "kv_bytes"]


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


class KVCache:
    """The cache of ``slots`` requests: per layer a key and a value buffer ``[slots, Hkv, Lmax, D]``.

    Raises:
        MemoryBudgetError: the buffers would not fit in the memory that the box has left.
    """

    def __init__(self, model: ModelEntry, layers: Sequence[int], dtype: npt.DTypeLike = np.float32, slots: int = 1):
        self.model = model
        self.layers = tuple(layers)
        self.dtype = np.dtype(dtype)
        self.slots = slots
        self.bytes = kv_bytes(model, len(self.layers), self.dtype.itemsize, model.capacity * slots)
        available = _available_bytes()
        if available is not None and self.bytes > available:
            raise MemoryBudgetError(
                f"a KV cache of {slots} slot(s) x {model.capacity} entries needs {self.bytes / 2**20:.0f} MiB, "
                f"{available / 2**20:.0f} MiB are available; export with a smaller --context or free memory"
            )
        shape = (slots, model.kv_heads, model.capacity, model.head_dim)
        self.tensors = {name: aligned_zeros(shape, self.dtype) for name in contract.past_names(self.layers)}

    def address(self, name: str, slot: int) -> int:
        """Address of the first byte of ``slot`` in the tensor ``name`` (a past name of the contract)."""
        return int(self.tensors[name][slot].ctypes.data)

    def swap(self, a: int, b: int, length: int) -> int:
        """Exchange the first ``length`` entries of two slots; return the bytes written."""
        for tensor in self.tensors.values():
            kept = tensor[a, :, :length].copy()
            tensor[a, :, :length] = tensor[b, :, :length]
            tensor[b, :, :length] = kept
        return 2 * kv_bytes(self.model, len(self.layers), self.dtype.itemsize, length)

    def clear(self, slot: int, start: int = 0, end: int | None = None) -> None:
        """Zero the entries ``start .. end - 1`` of a slot: a NaN behind a mask would leak into a sum."""
        for tensor in self.tensors.values():
            tensor[slot, :, start:end] = 0


class HandOver:
    """Copies new KV entries from one cache to another that cannot share its memory (another dtype or device)."""

    def __init__(self, source: KVCache, destination: KVCache) -> None:
        self.source = source
        self.destination = destination
        self.lengths = [0] * source.slots
        self.bytes = 0

    def restart(self, slot: int = 0) -> None:
        """Forget what was copied: a new request has the slot."""
        self.lengths[slot] = 0

    def advance(self, length: int, slot: int = 0) -> None:
        """Copy the entries that the destination lacks up to ``length``, all of them committed."""
        if length <= self.lengths[slot]:
            return
        span = slice(self.lengths[slot], length)
        for name, tensor in self.destination.tensors.items():
            part = self.source.tensors[name][slot, :, span]
            tensor[slot, :, span] = part
            self.bytes += part.size * tensor.itemsize
        self.lengths[slot] = length


def _available_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None

"""KV entries in GPU memory: one allocation, so that one call moves the entries of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .device import Device
from .memory import Block, DeviceBuffer, PinnedArray, copy_block, zero_block
from .streams import Event

__all__ = ["DeviceEntries"]

_CHUNK = 64  # entries that are staged at once


class DeviceEntries:
    """The entries of a :class:`kvrelay.kv.KVCache` on the GPU: ``[tensors, slots, Hkv, Lmax, D]``, zeroed.

    What is queued here follows the passes queued before and precedes those queued after. Use it from one thread at a
    time.

    Args:
        names: of the tensors.
        shape: of one of them: ``(slots, Hkv, Lmax, D)``.
        dtype: of an element.

    Raises:
        CudaError: there is no room.
    """

    def __init__(self, names: Sequence[str], shape: tuple[int, int, int, int], dtype: np.dtype[Any]) -> None:
        self._index = {name: i for i, name in enumerate(names)}
        self._slots, self._heads, self._capacity, self._dim = shape
        self._dtype = dtype
        self._entry = self._dim * dtype.itemsize  # bytes of an entry in one head
        self._slot_bytes = self._heads * self._capacity * self._entry
        self._buffer = DeviceBuffer(max(len(names) * self._slots * self._slot_bytes, 1))
        self._staging: PinnedArray | None = None
        self._staged: Event | None = None  # behind the last copy out of the staging memory
        self._spare: DeviceBuffer | None = None

    def address(self, name: str, slot: int) -> int:
        """Address of the first byte of ``slot`` in the tensor ``name``."""
        return self._buffer.address + (self._index[name] * self._slots + slot) * self._slot_bytes

    def block(self, first: int, slot: int, start: int) -> Block:
        """Where entry ``start`` of a slot lies in the tensors from number ``first`` on."""
        address = self._buffer.address + (first * self._slots + slot) * self._slot_bytes + start * self._entry
        return Block(address, self._capacity * self._entry, self._slots * self._heads)

    def read(self, names: Sequence[str], slot: int, start: int, end: int) -> npt.NDArray[Any]:
        """Copy entries ``start .. end - 1`` of a slot to the host: ``[names, Hkv, entries, D]``."""
        found = np.empty((len(names), self._heads, end - start, self._dim), self._dtype)
        staging = self._staging_memory()
        for at in range(start, end, _CHUNK):
            size = min(_CHUNK, end - at)
            with Device.current().exclusive():
                self._copy_runs(names, slot, at, size, outwards=True)
            Device.current().stream.synchronize()
            found[:, :, at - start : at - start + size] = self._view(staging, len(names), size)
        return found

    def write(self, names: Sequence[str], slot: int, start: int, values: npt.NDArray[Any]) -> None:
        """Queue the copy of ``values`` ``[names, Hkv, entries, D]`` to a slot from entry ``start`` on.

        ``values`` may have another dtype, and may change as soon as this returns.
        """
        staging = self._staging_memory()
        assert self._staged is not None
        for at in range(0, values.shape[2], _CHUNK):
            part = values[:, :, at : at + _CHUNK]
            self._staged.synchronize()
            self._view(staging, len(names), part.shape[2])[:] = part
            with Device.current().exclusive():
                self._copy_runs(names, slot, start + at, part.shape[2], outwards=False)
                self._staged.record(Device.current().stream)

    def clear(self, slot: int, start: int, end: int) -> None:
        """Queue the zeroing of entries ``start .. end - 1`` of a slot."""
        if end > start and self._index:
            with Device.current().exclusive():
                width = (end - start) * self._entry
                zero_block(self.block(0, slot, start), width, self._heads, len(self._index), "KV entries")

    def swap(self, a: int, b: int, length: int) -> None:
        """Queue the exchange of the first ``length`` entries of two slots."""
        if not self._index:
            return
        if self._spare is None:
            self._spare = DeviceBuffer(len(self._index) * self._heads * _CHUNK * self._entry)
        for at in range(0, length, _CHUNK):
            width = min(_CHUNK, length - at) * self._entry
            spare = Block(self._spare.address, width, self._heads)
            first, second = self.block(0, a, at), self.block(0, b, at)
            with Device.current().exclusive():
                for destination, source in ((spare, first), (first, second), (second, spare)):
                    copy_block(destination, source, width, self._heads, len(self._index), "KV entries of a slot")

    def copy_from(self, source: DeviceEntries, names: Sequence[str], slot: int, start: int, end: int) -> None:
        """Queue the copy of entries from another cache on the GPU, of the same dtype."""
        width = (end - start) * self._entry
        with Device.current().exclusive():
            for first, theirs, count in _runs([self._index[n] for n in names], [source._index[n] for n in names]):
                copy_block(
                    self.block(first, slot, start),
                    source.block(theirs, slot, start),
                    width,
                    self._heads,
                    count,
                    "KV entries",
                )

    def append(self, names: Sequence[str], slot: int, start: int, size: int, source: Block) -> None:
        """Queue the copy of ``size`` entries, one slice of ``source`` a name, to a slot from entry ``start`` on."""
        width = size * self._entry
        with Device.current().exclusive():
            for first, place, count in _runs([self._index[n] for n in names], list(range(len(names)))):
                address = source.address + place * source.slice_rows * source.pitch
                theirs = Block(address, source.pitch, source.slice_rows)
                copy_block(self.block(first, slot, start), theirs, width, self._heads, count, "new KV entries")

    def _copy_runs(self, names: Sequence[str], slot: int, start: int, size: int, *, outwards: bool) -> None:
        """Queue copies between the cache and the staging memory, one for each run of neighbouring tensors."""
        assert self._staging is not None
        width = size * self._entry
        for first, place, count in _runs([self._index[n] for n in names], list(range(len(names)))):
            inside = self.block(first, slot, start)
            outside = Block(self._staging.address + place * self._heads * width, width, self._heads)
            destination, source = (outside, inside) if outwards else (inside, outside)
            copy_block(destination, source, width, self._heads, count, "KV entries")

    def _staging_memory(self) -> PinnedArray:
        if self._staging is None or self._staged is None:
            self._staging = PinnedArray((len(self._index) * self._heads * _CHUNK * self._dim,), self._dtype)
            self._staged = Event()
        else:
            self._staged.synchronize()  # a read may follow a write that is still queued
        return self._staging

    def _view(self, staging: PinnedArray, tensors: int, size: int) -> npt.NDArray[Any]:
        shape = (tensors, self._heads, size, self._dim)
        return staging.array[: int(np.prod(shape))].reshape(shape)


def _runs(mine: Sequence[int], theirs: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cut two lists of places into runs that go up by one in both: first of mine, first of theirs, count."""
    runs: list[tuple[int, int, int]] = []
    for a, b in zip(mine, theirs, strict=True):
        if runs and (a, b) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((a, b, 1))
    return runs

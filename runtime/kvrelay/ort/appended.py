"""The dialect `decomposed`: engines that give new KV entries, which the backend writes to the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .. import contract
from ..kv import KVCache, aligned_zeros

__all__ = ["AppendedEntries"]


class AppendedEntries:
    """Where an engine that cannot update the cache leaves the entries of its pass, and where they go.

    Args:
        cache: the cache.
        layers: those of the engine.
        slot: the first slot.
        batch: rows of a pass.
        width: tokens of a row.
    """

    def __init__(self, cache: KVCache, layers: Sequence[int], slot: int, batch: int, width: int) -> None:
        shape = (batch, cache.model.kv_heads, width, cache.model.head_dim)
        self.new = {name: aligned_zeros(shape, cache.dtype) for name in contract.new_names(layers)}
        self._past = [cache.tensors[name][slot : slot + batch] for name in contract.past_names(layers)]
        self._width = width

    def write(self, write_index: npt.NDArray[np.int64]) -> int:
        """Write every row's entries at its index; return the bytes."""
        for past, new in zip(self._past, self.new.values(), strict=True):
            for row, start in enumerate(write_index):
                past[row, :, start : start + self._width] = new[row]
        return sum(new.nbytes for new in self.new.values())

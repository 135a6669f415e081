"""Bound passes of ONNX Runtime: one engine over one run of slots, everything at addresses that never change."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import contract
from ..errors import EngineError
from ..kv import KVCache, aligned_zeros
from ..manifest import EngineEntry
from .appended import AppendedEntries
from .threads import first_line

__all__ = ["HostPass", "OrtPass", "PassShape"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class PassShape:
    """Sizes of a pass, and where it lies in the cache."""

    batch: int
    width: int
    rows: int
    vocab: int
    slot: int

    def new_entries(self, cache: KVCache) -> tuple[int, int, int, int]:
        """Shape of the entries that one pass gives of one cache tensor: ``[B, Hkv, S, D]``."""
        return (self.batch, cache.model.kv_heads, self.width, cache.model.head_dim)

    def cached(self, cache: KVCache) -> tuple[int, int, int, int]:
        """Shape of the part of one cache tensor that a pass is bound to: ``[B, Hkv, Lmax, D]``."""
        return (self.batch, cache.model.kv_heads, cache.model.capacity, cache.model.head_dim)


class OrtPass:
    """One engine bound to one run of slots (see :class:`kvrelay.engine.BoundPass`).

    The arrays lie in host memory; subclasses bind them or what mirrors them on a device.
    """

    def __init__(
        self,
        session: Any,
        entry: EngineEntry,
        cache: KVCache,
        shape: PassShape,
        logits: npt.NDArray[np.float32],
        whole_numbers: Callable[[tuple[int, ...]], npt.NDArray[np.int64]],
    ) -> None:
        self._session = session
        self._cache = cache  # bound by address: keep it alive
        self._name = entry.name
        self._slot = shape.slot
        self._binding = session.io_binding()
        self.input_ids = whole_numbers((shape.batch, shape.width))
        self.write_index = whole_numbers((shape.batch,))
        self.logit_rows = whole_numbers((shape.batch, shape.rows))
        self.logits = logits[: shape.batch * shape.rows * shape.vocab].reshape(shape.batch, shape.rows, shape.vocab)
        self.seconds = 0.0
        self.runs = 0
        self.kv_bytes_copied = 0

    def inputs(self) -> dict[str, npt.NDArray[np.int64]]:
        """The host arrays that a caller fills, by name."""
        return {
            contract.INPUT_IDS: self.input_ids,
            contract.WRITE_INDEX: self.write_index,
            contract.LOGIT_ROWS: self.logit_rows,
        }

    def run(self) -> None:
        """Run the engine once over the bound memory.

        Raises:
            EngineError: ONNX Runtime reports a failure.
        """
        start = time.perf_counter()
        self._run()
        self.seconds += time.perf_counter() - start
        self.runs += 1

    def top(self) -> None:
        """Whole rows lie on the host: nothing shorter is needed."""

    def _run(self) -> None:
        raise NotImplementedError

    def _execute(self, options: Any | None = None) -> None:
        try:
            self._session.run_with_iobinding(self._binding, options)
        except Exception as error:  # onnxruntime raises classes of its own, without a common base
            raise EngineError(f"engine {self._name} failed: {first_line(error)}") from error


class HostPass(OrtPass):
    """A pass of the CPU provider: it reads and writes the caller's arrays and the cache themselves."""

    def __init__(
        self,
        session: Any,
        entry: EngineEntry,
        cache: KVCache,
        shape: PassShape,
        logits: npt.NDArray[np.float32] | None,
    ) -> None:
        if logits is None:
            logits = _aligned((shape.batch * shape.rows * shape.vocab,), np.float32)
        super().__init__(session, entry, cache, shape, logits, lambda size: _aligned(size, np.int64))
        for name, array in self.inputs().items():
            self._bind(self._binding.bind_input, name, array)
        self._bind(self._binding.bind_output, contract.LOGITS, self.logits)
        in_place = contract.updates_in_place(entry.dialect)
        names = zip(contract.past_names(entry.kv_layers), contract.present_names(entry.kv_layers), strict=True)
        for past, present in names:
            address, kind, cached = cache.address(past, shape.slot), cache.dtype.type, shape.cached(cache)
            self._binding.bind_input(past, "cpu", 0, kind, cached, address)
            if in_place:
                self._binding.bind_output(present, "cpu", 0, kind, cached, address)
        self._appended = None
        if not in_place:
            self._appended = AppendedEntries(cache, entry.kv_layers, shape.slot, shape.batch, shape.width)
            for name, new in self._appended.new.items():
                self._bind(self._binding.bind_output, name, new)

    @staticmethod
    def _bind(bind: Any, name: str, array: Array) -> None:
        bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def _run(self) -> None:
        self._execute()
        if self._appended is not None:
            self.kv_bytes_copied += self._appended.write(self.write_index)


def _aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    made: Array = aligned_zeros(shape, dtype)
    return made

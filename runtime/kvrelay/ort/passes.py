"""Bound passes of ONNX Runtime: one engine over one run of slots, everything at addresses that never change."""

from __future__ import annotations

import time
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


@dataclass(frozen=True, slots=True)
class PassShape:
    """Sizes of a pass, and where it lies in the cache."""

    batch: int
    width: int
    rows: int
    vocab: int
    slot: int

    @property
    def logits(self) -> tuple[int, int, int]:
        return (self.batch, self.rows, self.vocab)

    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs that change from pass to pass, all int64."""
        return {
            contract.INPUT_IDS: (self.batch, self.width),
            contract.WRITE_INDEX: (self.batch,),
            contract.LOGIT_ROWS: (self.batch, self.rows),
        }

    def cached(self, cache: KVCache) -> tuple[int, ...]:
        """Shape of the part of one cache tensor that a pass is bound to."""
        return (self.batch, *cache.shape[1:])


class OrtPass:
    """One engine bound to one run of slots (see :class:`kvrelay.engine.BoundPass`); subclasses bind the memory.

    Args:
        session: of the engine.
        entry: the engine.
        cache: the cache, kept: it is bound by address.
        inputs: the arrays that the caller fills, by name.
    """

    def __init__(
        self, session: Any, entry: EngineEntry, cache: KVCache, inputs: dict[str, npt.NDArray[np.int64]]
    ) -> None:
        self._session = session
        self._cache = cache
        self._name = entry.name
        self._binding = session.io_binding()
        self.input_ids = inputs[contract.INPUT_IDS]
        self.write_index = inputs[contract.WRITE_INDEX]
        self.logit_rows = inputs[contract.LOGIT_ROWS]
        self.seconds = 0.0
        self.runs = 0
        self.kv_bytes_copied = 0

    def top(self) -> None:
        """Nothing shorter than whole rows is at hand."""

    def run(self) -> None:
        """Run the engine once over the bound memory.

        Raises:
            EngineError: ONNX Runtime reports a failure.
        """
        start = time.perf_counter()
        self._run()
        self.seconds += time.perf_counter() - start
        self.runs += 1

    def _run(self) -> None:
        raise NotImplementedError

    def _bind_cache(self, entry: EngineEntry, shape: PassShape, device: str) -> None:
        """Bind past and, if the engine updates the cache, present at the cache's own addresses."""
        cache, kind, size = self._cache, self._cache.dtype.type, shape.cached(self._cache)
        names = zip(contract.past_names(entry.kv_layers), contract.present_names(entry.kv_layers), strict=True)
        for past, present in names:
            address = cache.address(past, shape.slot)
            self._binding.bind_input(past, device, 0, kind, size, address)
            if contract.updates_in_place(entry.dialect):
                self._binding.bind_output(present, device, 0, kind, size, address)

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
        inputs: dict[str, Any] = {name: aligned_zeros(size, np.int64) for name, size in shape.inputs().items()}
        super().__init__(session, entry, cache, inputs)
        memory: Any = aligned_zeros(shape.logits, np.float32) if logits is None else logits
        self.logits: npt.NDArray[np.float32] = memory.reshape(-1)[: int(np.prod(shape.logits))].reshape(shape.logits)
        for name, array in inputs.items():
            self._bind(self._binding.bind_input, name, array)
        self._bind(self._binding.bind_output, contract.LOGITS, self.logits)
        self._bind_cache(entry, shape, "cpu")
        self._appended = None
        if not contract.updates_in_place(entry.dialect):
            self._appended = AppendedEntries(cache, entry.kv_layers, shape.slot, shape.batch, shape.width)
            for name, new in self._appended.new.items():
                self._bind(self._binding.bind_output, name, new)

    @staticmethod
    def _bind(bind: Any, name: str, array: npt.NDArray[Any]) -> None:
        bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def _run(self) -> None:
        self._execute()
        if self._appended is not None:
            self.kv_bytes_copied += self._appended.write(self.write_index)

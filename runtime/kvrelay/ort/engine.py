"""Engines on ONNX Runtime: inputs, outputs and KV bound once, by address."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import contract
from ..errors import EngineError
from ..kv import KVCache, Memory, aligned_zeros
from ..manifest import EngineEntry
from .appended import AppendedEntries
from .library import onnxruntime
from .threads import first_line, load_session

__all__ = ["OrtEngine", "OrtPass"]


class OrtPass:
    """A binding of one engine to one run of slots (see :class:`kvrelay.engine.BoundPass`)."""

    def __init__(
        self,
        session: Any,
        binding: Any,
        arrays: dict[str, npt.NDArray[Any]],
        cache: KVCache,
        name: str,
        appended: AppendedEntries | None,
    ) -> None:
        self._session = session
        self._binding = binding
        self._cache = cache  # the addresses below are this cache's: keep it alive
        self._name = name
        self._appended = appended
        self.input_ids = arrays[contract.INPUT_IDS]
        self.write_index = arrays[contract.WRITE_INDEX]
        self.logit_rows = arrays[contract.LOGIT_ROWS]
        self.logits = arrays[contract.LOGITS]
        self.seconds = 0.0
        self.runs = 0
        self.kv_bytes_copied = 0

    def run(self) -> None:
        """Run the engine once over the bound memory."""
        start = time.perf_counter()
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime raises classes of its own, without a common base
            raise EngineError(f"engine {self._name} failed: {first_line(error)}") from error
        if self._appended is not None:
            self.kv_bytes_copied += self._appended.write(self.write_index)
        self.seconds += time.perf_counter() - start
        self.runs += 1

    def top(self) -> None:
        """Whole rows lie on the host: nothing shorter is needed."""


class OrtEngine:
    """A loaded engine (see :class:`kvrelay.engine.LoadedEngine`).

    Args:
        entry: its manifest entry.
        file: the ONNX file, or its prepared form.
        prepared: the file is already optimised.

    Raises:
        EngineError: ONNX Runtime refuses the file, or its shapes are not those of the manifest.
    """

    def __init__(self, entry: EngineEntry, file: Path, *, prepared: bool) -> None:
        ort = onnxruntime()
        options = ort.SessionOptions()
        if prepared:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = load_session(file, options)
        self.entry = entry
        self.memory: Memory = "host"
        self._vocab = self._check_contract()

    def _check_contract(self) -> int:
        entry = self.entry
        inputs = {i.name: i.shape for i in self._session.get_inputs()}
        outputs = {o.name: o.shape for o in self._session.get_outputs()}
        for kind, found, wanted in (
            ("inputs", inputs, contract.input_names(entry.kv_layers)),
            ("outputs", outputs, contract.output_names(entry.kv_layers, entry.dialect)),
        ):
            if set(found) != set(wanted):
                odd = sorted(set(found) ^ set(wanted))
                raise EngineError(f"engine {entry.name}: its {kind} differ from the manifest in {odd[:4]}")
        shapes = {contract.INPUT_IDS: (entry.batch, entry.sequence), contract.LOGIT_ROWS: (entry.batch, entry.rows)}
        for name, wanted_shape in shapes.items():
            for axis, size in enumerate(wanted_shape):
                actual = inputs[name][axis]
                if (size is None) == isinstance(actual, int) or (size is not None and actual != size):
                    raise EngineError(
                        f"engine {entry.name}: {name} axis {axis} is {actual}, the manifest says {size or 'dynamic'}"
                    )
        return int(outputs[contract.LOGITS][2])

    def _logits(self, shape: tuple[int, int, int], memory: npt.NDArray[np.float32] | None) -> npt.NDArray[Any]:
        size = int(np.prod(shape))
        if memory is None:
            return aligned_zeros(shape, np.float32)
        if memory.size < size:
            raise EngineError(f"engine {self.entry.name}: logits of {shape} do not fit into {memory.size} floats")
        return memory[:size].reshape(shape)

    def bind(
        self,
        cache: KVCache,
        width: int,
        rows: int,
        *,
        slot: int = 0,
        batch: int = 1,
        logits: npt.NDArray[np.float32] | None = None,
    ) -> OrtPass:
        """Bind ``batch`` neighbouring slots from ``slot`` on (see :class:`kvrelay.engine.LoadedEngine`)."""
        entry = self.entry
        fixed = (entry.batch, entry.sequence, entry.rows)
        wanted = (batch, width, rows)
        if any(size is not None and size != asked for size, asked in zip(fixed, wanted, strict=True)):
            raise EngineError(f"engine {entry.name} has the fixed shape {fixed}, asked for {wanted}")
        if cache.dtype.name != entry.kv_dtype or not set(entry.kv_layers) <= set(cache.layers):
            raise EngineError(
                f"engine {entry.name} wants a {entry.kv_dtype} cache of layers {entry.kv_layers}, "
                f"got {cache.dtype.name} and {list(cache.layers)}"
            )
        if not 0 <= slot <= cache.slots - batch:
            raise EngineError(f"slots {slot}..{slot + batch - 1} lie outside a cache of {cache.slots}")
        arrays: dict[str, npt.NDArray[Any]] = {
            contract.INPUT_IDS: aligned_zeros((batch, width), np.int64),
            contract.WRITE_INDEX: aligned_zeros((batch,), np.int64),
            contract.LOGIT_ROWS: aligned_zeros((batch, rows), np.int64),
            contract.LOGITS: self._logits((batch, rows, self._vocab), logits),
        }
        binding = self._session.io_binding()
        for name, array in arrays.items():
            bind = binding.bind_output if name == contract.LOGITS else binding.bind_input
            bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        shape = (batch, *next(iter(cache.tensors.values())).shape[1:]) if cache.tensors else ()
        in_place = contract.updates_in_place(entry.dialect)
        names = zip(contract.past_names(entry.kv_layers), contract.present_names(entry.kv_layers), strict=True)
        for past, present in names:
            address = cache.address(past, slot)
            binding.bind_input(past, "cpu", 0, cache.dtype.type, shape, address)
            if in_place:
                binding.bind_output(present, "cpu", 0, cache.dtype.type, shape, address)
        appended = None if in_place else AppendedEntries(cache, entry.kv_layers, slot, batch, width)
        for name, array in appended.new.items() if appended is not None else ():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        return OrtPass(self._session, binding, arrays, cache, entry.name, appended)

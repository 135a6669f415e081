"""Engines on ONNX Runtime: inputs, outputs and KV bound once, by address."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .. import contract
from ..errors import EngineError
from ..kv import KVCache, Memory
from ..manifest import EngineEntry
from .library import onnxruntime
from .passes import HostPass, PassShape
from .providers import check_assignment
from .threads import load_session

if TYPE_CHECKING:
    from .gpu import GpuPass, OrtGpu

__all__ = ["OrtEngine"]


class OrtEngine:
    """A loaded engine (see :class:`kvrelay.engine.LoadedEngine`).

    Args:
        entry: its manifest entry.
        file: the ONNX file, or its prepared form.
        prepared: the file is already optimised.
        gpu: the GPU that it runs on, None for the CPU.

    Raises:
        EngineError: ONNX Runtime refuses the file, its shapes are not those of the manifest, or it would not run on
            ``gpu``.
    """

    def __init__(self, entry: EngineEntry, file: Path, *, prepared: bool, gpu: OrtGpu | None = None) -> None:
        ort = onnxruntime()
        options = ort.SessionOptions()
        self.entry = entry
        self._gpu = gpu
        self.memory: Memory = "host" if gpu is None else "cuda"
        self.captured = False  # passes run as CUDA graphs
        if gpu is not None:
            self._session, self.captured = gpu.load(entry, file, options)
            check_assignment(self._session, gpu.providers, entry.name)
        else:
            if prepared:
                options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            self._session = load_session(file, options)
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

    def bind(
        self,
        cache: KVCache,
        width: int,
        rows: int,
        *,
        slot: int = 0,
        batch: int = 1,
        logits: npt.NDArray[np.float32] | None = None,
    ) -> HostPass | GpuPass:
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
        if cache.memory != self.memory:
            raise EngineError(f"engine {entry.name} runs on {self.memory} memory, its cache lies in {cache.memory}")
        if not 0 <= slot <= cache.slots - batch:
            raise EngineError(f"slots {slot}..{slot + batch - 1} lie outside a cache of {cache.slots}")
        size = batch * rows * self._vocab
        if logits is not None and logits.size < size:
            raise EngineError(f"engine {entry.name}: {size} logits do not fit into {logits.size} floats")
        shape = PassShape(batch, width, rows, self._vocab, slot)
        if self._gpu is None:
            return HostPass(self._session, entry, cache, shape, logits)
        return self._gpu.bind(self._session, entry, cache, shape)

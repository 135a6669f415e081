"""Engines without a bundle: trace a tiny model once, lower it as often as a test wants, run it on ONNX Runtime."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from kvrelay.kv import KVCache
from kvrelay.manifest import EngineEntry, FileEntry, ModelEntry
from kvrelay.ort import OrtEngine
from kvrelay_export.graph import fix_shape
from kvrelay_export.lower import lower
from kvrelay_export.program import Geometry, trace
from transformers import PreTrainedModel

__all__ = ["Program", "hf_logits", "model_entry", "random_ids", "step", "trace_program", "with_random_biases"]

_count = itertools.count()


def model_entry(model: PreTrainedModel, capacity: int) -> ModelEntry:
    """Sizes of ``model`` as a manifest has them."""
    geometry = Geometry.of(model, capacity)
    config = model.config
    return ModelEntry(
        name="tiny",
        family=config.model_type,
        layers=geometry.layers,
        hidden=config.hidden_size,
        heads=geometry.heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        vocab_size=config.vocab_size,
        padded_vocab_size=config.vocab_size,
        context=capacity - 64,
        capacity=capacity,
        rope={},
        source="tiny",
        source_sha256="0" * 64,
    )


@dataclass
class Program:
    """A traced tiny model."""

    model: PreTrainedModel
    entry: ModelEntry
    program: ir.Model
    folder: Path
    _engines: dict[Any, OrtEngine] = field(default_factory=dict)

    def graph(self, dialect: str = "ort", precision: str = "fp32", **options: Any) -> ir.Model:
        """Lower the program."""
        return lower(self.program, dialect, precision, **options)  # type: ignore[arg-type]

    def engine(
        self,
        dialect: str = "ort",
        precision: str = "fp32",
        *,
        skip: tuple[str, ...] = (),
        shape: tuple[int, int] | None = None,
        activations: str = "float32",
    ) -> OrtEngine:
        """Lower and load an engine; the same one for the same arguments."""
        key = (dialect, precision, skip, shape, activations)
        if key not in self._engines:
            graph = self.graph(dialect, precision, skip=skip, activations=activations)
            if shape is not None:
                graph = fix_shape(graph, *shape, shape[1])
            self._engines[key] = self.load(
                graph, precision, dialect=dialect, skip=skip, shape=shape, activations=activations
            )
        return self._engines[key]

    def save(self, graph: ir.Model) -> Path:
        path = self.folder / f"engine-{next(_count)}.onnx"
        ir.save(graph, path)
        return path

    def load(self, graph: ir.Model, precision: str = "fp32", **options: Any) -> OrtEngine:
        """Load a graph as an engine of this model."""
        path = self.save(graph)
        return OrtEngine(self.engine_entry(path, precision, **options), path, prepared=False)

    def engine_entry(
        self,
        path: Path,
        precision: str,
        *,
        dialect: str = "ort",
        skip: Sequence[str] = (),
        shape: tuple[int, int] | None = None,
        activations: str = "float32",
    ) -> EngineEntry:
        batch, width = shape or (None, None)
        dropped = {int(s.split(".")[1]) for s in skip if s.startswith("attention")}
        return EngineEntry(
            name=path.stem,
            role="decode" if shape is None else "verify",
            model="tiny",
            precision=precision,  # type: ignore[arg-type]
            dialect=dialect,  # type: ignore[arg-type]
            file=FileEntry(path=path.name, bytes=0, sha256="0" * 64),
            batch=batch,
            sequence=width,
            rows=width,
            activations=activations,  # type: ignore[arg-type]
            kv_dtype=activations,  # type: ignore[arg-type]
            kv_layers=[i for i in range(self.entry.layers) if i not in dropped],
        )

    def cache(self, engine: OrtEngine, slots: int = 1) -> KVCache:
        return KVCache(self.entry, engine.entry.kv_layers, engine.entry.kv_dtype, slots=slots)

    def logits(self, engine: OrtEngine, ids: np.ndarray) -> np.ndarray:
        """Feed ``ids`` ``[B, T]`` to an engine with dynamic axes in passes of odd widths: logits ``[B, T, V]``."""
        cache = self.cache(engine, len(ids))
        parts, start = [], 0
        for width in itertools.cycle((17, 1, 5)):
            part = ids[:, start : start + width]
            if not part.shape[1]:
                break
            parts.append(step(engine, cache, part, [start] * len(ids)))
            start += part.shape[1]
        return np.concatenate(parts, axis=1)


def trace_program(model: PreTrainedModel, folder: Path, capacity: int = 256) -> Program:
    """Trace ``model`` with dynamic axes."""
    return Program(model, model_entry(model, capacity), trace(model, Geometry.of(model, capacity), None), folder)


def step(engine: OrtEngine, cache: KVCache, ids: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """One pass over ``ids`` ``[B, S]`` behind ``lengths`` valid entries: logits ``[B, S, V]``."""
    batch, width = ids.shape
    bound = engine.bind(cache, width, width, batch=batch)
    bound.input_ids[:] = ids
    bound.write_index[:] = lengths
    bound.logit_rows[:] = np.arange(width)
    bound.run()
    return bound.logits.copy()


def hf_logits(model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    """Hugging Face's own fp32 logits, eager attention, no cache: ``[B, T, V]``."""
    with torch.no_grad():
        return model(torch.from_numpy(np.ascontiguousarray(ids)), use_cache=False).logits.float().numpy()


def random_ids(model: PreTrainedModel, batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, model.config.vocab_size, (batch, length))


def with_random_biases(model: Any) -> Any:
    """Give every bias and norm weight a value that matters: they start at zero and one."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model

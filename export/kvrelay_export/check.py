"""The numeric check that ends an export: every engine, in its own shape, against torch on real text.

An engine that rounds activations is compared loosely, which a graph that is wrong in one place could pass. Its graph
is therefore also run with float products over the very integers of its file, and then held to the limits of fp32.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from kvrelay.kv import KVCache
from kvrelay.manifest import Check, EngineEntry, ModelEntry
from kvrelay.ort import OrtEngine

from .dialect_ort import dequantize_ort
from .errors import CheckError
from .weights import WeightsFile

__all__ = ["CHECK_LENGTH", "LONGEST_PASS", "Limits", "check_engine", "compare_twins"]

CHECK_LENGTH = 160
# Widths of one and more, so that a dynamic engine is read at several shapes.
_WIDTHS = (17, 1, 1, 5, 1, 2, 8, 1)
LONGEST_PASS = max(_WIDTHS)


@dataclass(frozen=True, slots=True)
class Limits:
    """How far an engine may be from torch with the same weights."""

    top1: float  # least share of positions with the same most likely token
    max_logit_diff: float  # as a share of the largest logit


# fp32 differs by summation order alone. Block-quantised engines also round activations to int8 in blocks, and
# int8-dynamic rounds them with one scale for a whole tensor; a graph that lost or moved one layer stays far below.
LIMITS = {
    "fp32": Limits(0.99, 1e-3),
    "fp16": Limits(0.97, 2e-2),
    "int8": Limits(0.90, 0.15),
    "int4": Limits(0.90, 0.15),
    "int8-dynamic": Limits(0.70, 0.50),
}
# One scale for 64 tokens is the coarsest, and a prefill is read at 20 positions: the default model's agrees at 12.
_INT8_DYNAMIC_PREFILL = Limits(0.40, 0.50)


def _run(engine: OrtEngine, model: ModelEntry, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Feed ``ids`` ``[rows, T]`` in the engine's shape.

    Returns:
        logits ``[n, V]``, and ``[n, 2]`` with the (row, position) that each belongs to.
    """
    entry = engine.entry
    if entry.role == "prefill":
        return _run_prefill(engine, model, ids)
    batch = entry.batch or 2
    widths = (entry.sequence,) if entry.sequence else _WIDTHS
    cache = KVCache(model, entry.kv_layers, entry.kv_dtype, slots=batch)
    logits, where = [], []
    start, turn = 0, 0
    while start + (width := widths[turn % len(widths)]) <= ids.shape[1]:
        bound = engine.bind(cache, width, width, batch=batch)
        bound.input_ids[:] = ids[:batch, start : start + width]
        bound.write_index[:] = start
        bound.logit_rows[:] = np.arange(width)
        bound.run()
        logits.append(bound.logits.reshape(batch * width, -1).copy())
        where += [(row, start + i) for row in range(batch) for i in range(width)]
        start, turn = start + width, turn + 1
    return np.concatenate(logits), np.array(where)


def _run_prefill(engine: OrtEngine, model: ModelEntry, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    chunk = engine.entry.sequence or 1
    cache = KVCache(model, engine.entry.kv_layers, engine.entry.kv_dtype)
    bound = engine.bind(cache, chunk, 1)
    logits, where = [], []
    for row in range(ids.shape[0]):
        # Lengths that end inside a chunk: the pads behind the last token must not show.
        for length in (chunk // 3, chunk, chunk + 5, ids.shape[1] - 1, ids.shape[1]):
            length = max(1, min(length, ids.shape[1]))
            for start in range(0, length, chunk):
                part = ids[row, start : min(start + chunk, length)]
                bound.input_ids[:] = 0
                bound.input_ids[0, : len(part)] = part
                bound.write_index[:] = start
                bound.logit_rows[:] = len(part) - 1
                bound.run()
            logits.append(bound.logits[0, 0].copy())
            where.append((row, length - 1))
    return np.stack(logits), np.array(where)


def check_engine(
    entry: EngineEntry, file: Path, model: ModelEntry, ids: np.ndarray, same: np.ndarray, original: np.ndarray
) -> Check:
    """Compare an engine with torch.

    Args:
        entry: the engine.
        file: its ONNX file.
        model: sizes of its model.
        ids: int64 ``[rows, T]``.
        same: torch's logits ``[rows, T, V]`` with the engine's own (rounded) weights and skip list.
        original: torch's logits with the checkpoint's weights.

    Raises:
        CheckError: agreement or the largest difference is outside the limits; names engine and position.
    """
    logits, where = _run(OrtEngine(entry, file, prepared=False), model, ids)
    if not np.isfinite(logits).all() or not logits.any():
        raise CheckError(f"engine {entry.name}: its logits are not finite, or all zero")
    expected = same[where[:, 0], where[:, 1]]
    difference = np.abs(logits - expected).max(axis=1)
    agree = logits.argmax(1) == expected.argmax(1)
    first = original[where[:, 0], where[:, 1]].argmax(1)
    check = Check(
        tokens=len(where),
        top1=float(agree.mean()),
        max_logit_diff=float(difference.max()),
        agreement=float((logits.argmax(1) == first).mean()),
    )
    _require(f"engine {entry.name}", logits, where, same, _limits(entry, entry.precision))
    # Fixed engines are dynamic ones with their axes fixed: one look at a graph is enough, but where limits are so
    # loose that they hide a shift by one token.
    if entry.precision not in ("fp32", "fp16") and (entry.batch is None or entry.precision == "int8-dynamic"):
        with _float_twin(entry, file) as twin:
            exact, where = _run(twin, model, ids)
        _require(f"engine {entry.name}, run with float products,", exact, where, same, _limits(entry, "fp32"))
    return check


def _limits(entry: EngineEntry, precision: str) -> Limits:
    if precision == "int8-dynamic" and entry.role == "prefill":
        return _INT8_DYNAMIC_PREFILL
    return LIMITS["fp16" if precision == "fp32" and entry.kv_dtype == "float16" else precision]


def _require(subject: str, logits: np.ndarray, where: np.ndarray, same: np.ndarray, limits: Limits) -> None:
    expected = same[where[:, 0], where[:, 1]]
    difference = np.abs(logits - expected).max(axis=1)
    top1 = float((logits.argmax(1) == expected.argmax(1)).mean())
    allowed = limits.max_logit_diff * float(np.abs(expected).max())
    if top1 < limits.top1 or not difference.max() <= allowed:
        row, position = where[int(difference.argmax())]
        raise CheckError(
            f"{subject} is not the torch model: top-1 agreement {top1:.3f} (at least {limits.top1}), "
            f"largest logit difference {difference.max():.3g} (at most {allowed:.3g}), worst at text {row} "
            f"position {position}. Nothing was published"
        )


@contextlib.contextmanager
def _float_twin(entry: EngineEntry, file: Path) -> Iterator[OrtEngine]:
    if entry.dialect == "standard":
        # Unoptimised, its DequantizeLinear nodes run as they are written: in float.
        yield OrtEngine(entry, file, prepared=True)
        return
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".float-") as folder:
        graph = ir.load(file)
        dequantize_ort(graph)
        weights = WeightsFile(Path(folder) / "weights.bin")
        weights.save(graph, Path(folder) / "float.onnx")
        weights.close()
        yield OrtEngine(entry, Path(folder) / "float.onnx", prepared=False)


def compare_twins(entry: EngineEntry, traced: Path, fixed: Path, model: ModelEntry, ids: np.ndarray) -> None:
    """Require that an engine traced statically and the dynamic one with its axes fixed agree bit for bit.

    Raises:
        CheckError: they do not; names the first position.
    """
    a, where = _run(OrtEngine(entry, traced, prepared=False), model, ids)
    b, _ = _run(OrtEngine(entry, fixed, prepared=False), model, ids)
    if not np.array_equal(a, b):
        at = where[int(np.nonzero((a != b).any(axis=1))[0][0])]
        raise CheckError(
            f"engine {entry.name}: the statically traced graph and its fixed twin differ at text {at[0]} position "
            f"{at[1]} by {np.abs(a - b).max():.3g}"
        )

"""Find the shape classes of a bundle's engines on this box.

Matrix products of different shapes add in different orders, so the same context can give other bits at width 1 than
at width 8. Shapes that agree bit for bit form a class. `exact` needs its committing engines to lie in one, and needs
a row's result to depend neither on pads nor on where in a window a token sits. Both are tested here, not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import contract
from .engine import BoundPass, Engine
from .errors import EngineError
from .kv import KVCache
from .manifest import ModelEntry

__all__ = ["Shape", "find_class"]

_DEPTHS = (3, 40, 257, 700)


@dataclass(frozen=True, slots=True)
class Shape:
    """An engine at one width; for engines with dynamic axes the width is chosen by the caller."""

    engine: Engine
    width: int
    rows: int  # logit rows

    @property
    def name(self) -> str:
        return f"{self.engine.entry.name}@1x{self.width}"


@dataclass(slots=True)
class _Outcome:
    logits: npt.NDArray[np.float32]  # [R, V]
    keys: list[npt.NDArray[np.generic]]  # per cache tensor [Hkv, S, D]


class _Prober:
    """Runs shapes over one random context and compares what they compute."""

    def __init__(self, model: ModelEntry, shapes: Sequence[Shape], reference: Shape) -> None:
        self.reference = reference
        self.model = model
        self.cache = KVCache(model, reference.engine.entry.kv_layers, reference.engine.entry.kv_dtype)
        self.bound: dict[str, BoundPass] = {
            s.name: s.engine.bind(self.cache, s.width, s.rows) for s in (*shapes, reference)
        }
        random = np.random.default_rng(20260)
        widest = max(s.width for s in shapes)
        self.depths = [d for d in _DEPTHS if d + 3 * widest <= model.context] or [1]
        self.tokens = random.integers(0, model.vocab_size, max(self.depths) + 3 * widest)
        self.pads = random.integers(0, model.vocab_size, widest)
        self.filled = 0

    def fill(self, length: int) -> None:
        """Bring the cache to ``length`` entries by the reference shape."""
        while self.filled < length:
            at = min(self.filled, max(0, length - self.reference.width))
            self.run(self.reference, at)
            self.filled = at + self.reference.width

    def run(self, shape: Shape, at: int, real: int | None = None) -> _Outcome:
        """Run ``shape`` at entry ``at``; behind its first ``real`` tokens come pads."""
        bound = self.bound[shape.name]
        count = shape.width if real is None else real
        bound.input_ids[0, :count] = self.tokens[at : at + count]
        bound.input_ids[0, count:] = self.pads[: shape.width - count]
        bound.write_index[0] = at
        bound.logit_rows[0] = np.arange(shape.rows) if shape.rows > 1 else count - 1
        bound.run()
        names = contract.past_names(shape.engine.entry.kv_layers)
        keys = [self.cache.tensors[n][0, :, at : at + count].copy() for n in names]
        return _Outcome(bound.logits[0].copy(), keys)

    def difference(self, shape: Shape, at: int, real: int | None = None) -> str | None:
        """Compare ``shape`` at ``at`` with the reference over the same tokens; None if every bit agrees."""
        count = shape.width if real is None else real
        logits: list[npt.NDArray[np.float32]] = []
        keys: list[list[npt.NDArray[np.generic]]] = []
        for start in range(at, at + count, self.reference.width):
            expected = self.run(self.reference, start)
            logits.append(expected.logits)
            keys.append(expected.keys)
        rows = np.concatenate(logits)[:count]
        if not np.isfinite(rows).all() or not rows.any():
            raise EngineError(f"{self.reference.name} gives logits that are not finite or all zero")
        found = self.run(shape, at, real)
        wanted = rows if shape.rows > 1 else rows[-1:]
        got = found.logits[: len(wanted)]
        if not np.array_equal(got, wanted):
            return f"logits differ by up to {np.abs(got - wanted).max():.2g} at context {at}"
        for i, tensor in enumerate(found.keys):
            if not np.array_equal(tensor, np.concatenate([k[i] for k in keys], axis=1)[:, :count]):
                return f"KV entries differ at context {at}"
        return None


def find_class(model: ModelEntry, shapes: Sequence[Shape], reference: Shape) -> dict[str, str | None]:
    """Compare each shape with ``reference``, over context depths, places in the window and pads.

    Args:
        model: sizes.
        shapes: what to classify; ``reference`` may be among them.
        reference: a verify shape, the widest.

    Returns:
        For each shape's name None if it lies in the reference's class, else the first difference in words.

    Raises:
        EngineError: an engine gives values that are not numbers.
    """
    prober = _Prober(model, shapes, reference)
    outside: dict[str, str | None] = dict.fromkeys((s.name for s in shapes), None)
    for depth in prober.depths:
        prober.fill(depth)
        for shape in shapes:
            if outside[shape.name] is None:
                outside[shape.name] = _compare(prober, shape, depth)
                prober.filled = depth
    return outside


def _compare(prober: _Prober, shape: Shape, depth: int) -> str | None:
    # The same tokens at other places of the window: starts move, tokens do not.
    for at in (depth, depth + 1, depth + prober.reference.width // 2 + 1):
        prober.filled = depth
        prober.fill(at)
        if (found := prober.difference(shape, at)) is not None:
            return found
    for real in sorted({1, (shape.width + 1) // 2, shape.width - 1} - {0, shape.width}):
        prober.filled = depth
        if (found := prober.difference(shape, depth, real)) is not None:
            return f"{found} when {shape.width - real} of {shape.width} tokens are pads"
    return None

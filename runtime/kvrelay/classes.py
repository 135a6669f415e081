"""Find the shape classes of a bundle's engines on this box.

Matrix products of different shapes add in different orders, so the same context can give other bits at width 1 than
at width 8. Shapes that agree bit for bit form a class. `exact` needs its committing engines to lie in one, and needs
a row's result to depend neither on pads nor on where in a window a token sits. Both are tested here, not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


class _Prober:
    """Runs shapes over one random context and compares what they compute with what the reference computed."""

    def __init__(self, model: ModelEntry, shapes: Sequence[Shape], reference: Shape) -> None:
        self.reference = reference
        self.names = contract.past_names(reference.engine.entry.kv_layers)
        self.cache = KVCache(model, reference.engine.entry.kv_layers, reference.engine.entry.kv_dtype)
        self.bound: dict[str, BoundPass] = {
            s.name: s.engine.bind(self.cache, s.width, s.rows) for s in (*shapes, reference)
        }
        widest = max(s.width for s in shapes)
        # What is compared lies within this many entries behind a depth: a window at the farthest place tried.
        self.span = -(-(widest + reference.width) // reference.width) * reference.width
        self.depths = [d for d in _DEPTHS if d + self.span <= model.context] or [1]
        random = np.random.default_rng(20260)
        self.tokens = random.integers(0, model.vocab_size, max(self.depths) + self.span)
        self.pads = random.integers(0, model.vocab_size, widest)
        self.filled = 0

    def go_to(self, depth: int) -> None:
        """Bring the cache to ``depth`` entries, and compute the span behind it by the reference shape."""
        width = self.reference.width
        while self.filled < depth:
            at = min(self.filled, max(0, depth - width))
            self._run(self.reference, at, width)
            self.filled = at + width
        self.depth = depth
        rows = []
        for at in range(depth, depth + self.span, width):
            self._run(self.reference, at, width)
            rows.append(self.bound[self.reference.name].logits[0].copy())
        self.logits = np.concatenate(rows)  # [span, V]
        if not np.isfinite(self.logits).all() or not self.logits.any():
            raise EngineError(f"{self.reference.name} gives logits that are not finite or all zero")
        area = slice(depth, depth + self.span)
        self.entries = [self.cache.tensors[n][0, :, area].copy() for n in self.names]
        self.filled = depth

    def _run(self, shape: Shape, at: int, real: int) -> None:
        """Run ``shape`` at entry ``at``; behind its first ``real`` tokens come pads."""
        bound = self.bound[shape.name]
        bound.input_ids[0, :real] = self.tokens[at : at + real]
        bound.input_ids[0, real:] = self.pads[: shape.width - real]
        bound.write_index[0] = at
        bound.logit_rows[0] = np.arange(shape.rows) if shape.rows > 1 else real - 1
        bound.run()

    def difference(self, shape: Shape, offset: int, real: int) -> str | None:
        """Run ``shape`` ``offset`` entries behind the depth; None if every bit of its real tokens agrees."""
        area = slice(self.depth, self.depth + self.span)
        for name, kept in zip(self.names, self.entries, strict=True):
            self.cache.tensors[name][0, :, area] = kept
        at = self.depth + offset
        self._run(shape, at, real)
        wanted = self.logits[offset : offset + real]
        got = self.bound[shape.name].logits[0, :real]
        if shape.rows == 1:
            wanted = wanted[-1:]
        if not np.array_equal(got, wanted):
            return f"logits differ by up to {np.abs(got - wanted).max():.2g} at context {at}"
        for name, kept in zip(self.names, self.entries, strict=True):
            if not np.array_equal(self.cache.tensors[name][0, :, at : at + real], kept[:, offset : offset + real]):
                return f"KV entries differ at context {at}"
        return None


def find_class(model: ModelEntry, shapes: Sequence[Shape], reference: Shape) -> dict[str, str | None]:
    """Compare each shape with ``reference``, over context depths, places in the window and pads.

    Args:
        model: sizes.
        shapes: what to classify; ``reference`` may be among them, which tests it against itself at other places.
        reference: a verify shape, the widest.

    Returns:
        For each shape's name None if it lies in the reference's class, else the first difference in words.

    Raises:
        EngineError: an engine gives values that are not numbers.
    """
    prober = _Prober(model, shapes, reference)
    outside: dict[str, str | None] = dict.fromkeys((s.name for s in shapes), None)
    for depth in prober.depths:
        prober.go_to(depth)
        for shape in shapes:
            if outside[shape.name] is None:
                outside[shape.name] = _compare(prober, shape)
    return outside


def _compare(prober: _Prober, shape: Shape) -> str | None:
    # The same tokens at other places of a window: starts move, tokens do not.
    for offset in (0, 1, prober.reference.width // 2 + 1):
        if (found := prober.difference(shape, offset, shape.width)) is not None:
            return found
    for real in sorted({1, (shape.width + 1) // 2, shape.width - 1} - {0, shape.width}):
        if (found := prober.difference(shape, 0, real)) is not None:
            return f"{found} when {shape.width - real} of {shape.width} tokens are pads"
    return None

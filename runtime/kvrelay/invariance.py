"""The invariance check: which shapes of a bundle's engines agree bit for bit on this box.

Matrix products of different shapes add in different orders, so the same context can give other bits at width 1 than
at width 8, or beside other rows. Shapes that agree form a *shape class*. `exact` and deterministic requests need the
engines that commit to lie in one, whatever the row, the other rows, the pads and the place in the window. All of that
is tested on the device, not assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import contract
from .engine import BoundPass, LoadedEngine
from .errors import EngineError
from .kv import KVCache
from .manifest import ModelEntry

__all__ = ["Shape", "Verdict", "check_shapes", "shape_name"]

_DEPTHS = (3, 40, 257, 700)


def shape_name(engine: str, batch: int, width: int) -> str:
    """Name of an engine at one shape."""
    return f"{engine}@{batch}x{width}"


@dataclass(frozen=True, slots=True)
class Shape:
    """An engine at one shape; for engines with dynamic axes batch and width are the caller's choice."""

    engine: LoadedEngine
    batch: int
    width: int
    rows: int  # logit rows of a row

    @property
    def name(self) -> str:
        return shape_name(self.engine.entry.name, self.batch, self.width)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the check found about one shape, in words; None where every bit agreed."""

    outside: str | None  # first difference from the reference shape, over rows, neighbours, pads, places and depths
    unstable: str | None  # first difference from itself when rows, neighbours and pads change and the place does not


class _Prober:
    """Runs shapes over one random context and compares what they compute with what the reference computed."""

    def __init__(self, model: ModelEntry, shapes: Sequence[Shape], reference: Shape) -> None:
        self.reference = reference
        entry = reference.engine.entry
        self.names = contract.past_names(entry.kv_layers)
        slots = max(s.batch for s in shapes)
        self.cache = KVCache(model, entry.kv_layers, entry.kv_dtype, slots)
        most = max(s.batch * s.rows for s in (*shapes, reference))
        self._logits = np.zeros(most * model.padded_vocab_size, np.float32)
        self._reference = reference.engine.bind(self.cache, reference.width, reference.rows)
        widest = max(s.width for s in shapes)
        # What is compared lies within this many entries behind a depth: a window at the farthest place tried.
        self.span = -(-(widest + reference.width) // reference.width) * reference.width
        self.depths = [d for d in _DEPTHS if d + self.span <= model.context] or [1]
        self.random = np.random.default_rng(20260)
        self.vocab = model.vocab_size
        self.tokens = self.random.integers(0, model.vocab_size, max(self.depths) + self.span)
        self.filled = 0
        self._intact: set[int] = set()  # slots that hold the reference's context

    def bind(self, shape: Shape) -> BoundPass:
        return shape.engine.bind(self.cache, shape.width, shape.rows, batch=shape.batch, logits=self._logits)

    def go_to(self, depth: int) -> None:
        """Bring slot 0 to ``depth`` entries, and compute the span behind it by the reference shape."""
        width = self.reference.width
        if self.filled:
            self._restore(0)
        self._intact = {0}
        while self.filled < depth:
            at = min(self.filled, max(0, depth - width))
            self._run_reference(at)
            self.filled = at + width
        self.depth = depth
        rows = []
        for at in range(depth, depth + self.span, width):
            self._run_reference(at)
            rows.append(self._reference.logits[0].copy())
        self.logits = np.concatenate(rows)  # [span, V]
        if not np.isfinite(self.logits).all() or not self.logits.any():
            raise EngineError(f"{self.reference.name} gives logits that are not finite or all zero")
        # [Hkv, depth + span, D] by name
        self.entries = [self.cache.tensors[n][0, :, : depth + self.span].copy() for n in self.names]
        if not all(np.isfinite(e).all() and e.any() for e in self.entries):
            raise EngineError(f"{self.reference.name} gives KV entries that are not finite or all zero")
        self.filled = depth

    def _run_reference(self, at: int) -> None:
        self._reference.input_ids[0] = self.tokens[at : at + self.reference.width]
        self._reference.write_index[0] = at
        self._reference.logit_rows[0] = np.arange(self.reference.rows)
        self._reference.run()

    def _restore(self, slot: int) -> None:
        """Give a slot the context of the reference; where it has it already, only what passes wrote behind it."""
        start = self.depth if slot in self._intact else 0
        for name, kept in zip(self.names, self.entries, strict=True):
            self.cache.tensors[name][slot, :, start : kept.shape[1]] = kept[:, start:]
        self._intact.add(slot)

    def _disturb(self, slot: int) -> None:
        """Give a slot another context of the same size: the entries in another order."""
        if slot in self._intact:
            for name, kept in zip(self.names, self.entries, strict=True):
                self.cache.tensors[name][slot, :, : kept.shape[1]] = kept[:, ::-1]
        self._intact.discard(slot)

    def run(self, bound: BoundPass, shape: Shape, offsets: Sequence[int | None], real: int) -> None:
        """Run ``shape`` over restored slots.

        Args:
            bound: its bound pass.
            shape: the shape.
            offsets: for each row how far behind the depth its window begins; None for a row of another context, with
                tokens of its own and any length.
            real: tokens of each window; behind them come pads.
        """
        for row, offset in enumerate(offsets):
            if offset is None:
                self._disturb(row)
                bound.input_ids[row] = self.random.integers(0, self.vocab, shape.width)
                bound.write_index[row] = self.random.integers(0, self.depth + 1)
            else:
                self._restore(row)
                at = self.depth + offset
                bound.input_ids[row, :real] = self.tokens[at : at + real]
                bound.input_ids[row, real:] = self.random.integers(0, self.vocab, shape.width - real)
                bound.write_index[row] = at
            bound.logit_rows[row] = np.arange(shape.rows) if shape.rows > 1 else real - 1
        bound.run()

    def difference(self, bound: BoundPass, shape: Shape, offsets: Sequence[int | None], real: int) -> str | None:
        """Run ``shape`` and compare with the reference; None if every bit of its real tokens agrees."""
        self.run(bound, shape, offsets, real)
        for row, offset in enumerate(offsets):
            if offset is None:
                continue
            wanted = self.logits[offset : offset + real]
            found = self._compare(bound, shape, row, offset, real, wanted, self.entries)
            if found is not None:
                return found
        return None

    def _compare(
        self,
        bound: BoundPass,
        shape: Shape,
        row: int,
        offset: int,
        real: int,
        wanted: npt.NDArray[np.float32] | None,
        entries: Sequence[npt.NDArray[np.generic]],
    ) -> str | None:
        at = self.depth + offset
        where = f"in row {row} at context {at}" if shape.batch > 1 else f"at context {at}"
        if wanted is not None:
            got = bound.logits[row, :real]
            wanted = wanted[-1:] if shape.rows == 1 else wanted
            if not np.array_equal(got, wanted):
                return f"logits differ by up to {np.abs(got - wanted).max():.2g} {where}"
        for name, kept in zip(self.names, entries, strict=True):
            if not np.array_equal(self.cache.tensors[name][row, :, at : at + real], kept[:, at : at + real]):
                return f"KV entries differ {where}"
        return None

    def instability(self, bound: BoundPass, shape: Shape) -> str | None:
        """Compare ``shape`` with itself at one place of the window while rows, neighbours and pads change."""
        self.run(bound, shape, [0, *[None] * (shape.batch - 1)], shape.width)
        wanted = bound.logits[0].copy()
        entries = [self.cache.tensors[n][0, :, : self.depth + self.span].copy() for n in self.names]
        for what, offsets, real in _variations(shape):
            self.run(bound, shape, offsets, real)
            for row, offset in enumerate(offsets):
                if offset is None:
                    continue
                # A single row of logits moves with the pads: then only the entries can be compared.
                expected = wanted[:real] if shape.rows > 1 or real == shape.width else None
                found = self._compare(bound, shape, row, 0, real, expected, entries)
                if found is not None:
                    return f"{found} when {what} change"
        return None


def _variations(shape: Shape) -> Iterable[tuple[str, list[int | None], int]]:
    """Rows, neighbours and pads, with the window where it is."""
    yield "repeated runs", [0] * shape.batch, shape.width
    for real in _real_widths(shape):
        yield "the pads", [0] * shape.batch, real
    if shape.batch > 1:
        for row in sorted({0, shape.batch // 2, shape.batch - 1}):
            alone: list[int | None] = [None] * shape.batch
            alone[row] = 0
            yield "the row or its neighbours", alone, shape.width


def _real_widths(shape: Shape) -> list[int]:
    return sorted({1, (shape.width + 1) // 2, shape.width - 1} - {0, shape.width})


def _outside(prober: _Prober, bound: BoundPass, shape: Shape) -> str | None:
    """Compare with the reference: places, rows, neighbours, pads, and the same once more."""
    places = (0, 1, prober.reference.width // 2 + 1)
    for first in range(3):
        # The same tokens at other places of a window: starts move, tokens do not; every row at a place of its own.
        offsets: list[int | None] = [places[(first + row) % 3] for row in range(shape.batch)]
        if (found := prober.difference(bound, shape, offsets, shape.width)) is not None:
            return found
    for what, offsets, real in _variations(shape):
        if (found := prober.difference(bound, shape, offsets, real)) is not None:
            return f"{found} when {what} change"
    return None


def check_shapes(
    model: ModelEntry, shapes: Sequence[Shape], reference: Shape, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Verdict]:
    """Check each shape over row index, other rows, pads, place in the window, repetition and context depth.

    Args:
        model: sizes.
        shapes: what to check; ``reference`` may be among them.
        reference: a verify shape of one row, the widest.
        progress: told which context depth is at hand.

    Returns:
        A verdict for each shape's name.

    Raises:
        EngineError: the reference gives values that are not numbers, or nothing but zeros.
        MemoryBudgetError: there is no room for the largest batch's cache.
    """
    prober = _Prober(model, shapes, reference)
    outside: dict[str, str | None] = dict.fromkeys((s.name for s in shapes), None)
    unstable = outside.copy()
    for depth in prober.depths:
        progress(f"checking {len(shapes)} shapes at context {depth}")
        prober.go_to(depth)
        for shape in shapes:
            bound = prober.bind(shape)
            outside[shape.name] = outside[shape.name] or _outside(prober, bound, shape)
            if outside[shape.name] is not None:  # what always agrees with the reference agrees with itself
                unstable[shape.name] = unstable[shape.name] or prober.instability(bound, shape)
    return {name: Verdict(outside[name], unstable[name]) for name in outside}

"""Runs engines at one shape beside engines at another, over the same context, and compares every bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .engine import BoundPass
from .errors import EngineError
from .kv import KVCache
from .manifest import ModelEntry
from .shapes import Shape

__all__ = ["Prober"]

_DEPTHS = (3, 40, 257, 700)


class Prober:
    """Runs shapes over one random context and compares what they compute with what the reference computed.

    Args:
        model: sizes.
        shapes: what will be run.
        reference: what they are compared with; one of several rows is run in all of them.
        filler: a verify shape of one row that writes the context up to the depth, which any shape may have written;
            None for the reference.
    """

    def __init__(
        self, model: ModelEntry, shapes: Sequence[Shape], reference: Shape, filler: Shape | None = None
    ) -> None:
        self.reference = reference
        filler = filler or reference
        entry = reference.engine.entry
        every = (*shapes, reference, filler)
        slots = max(s.batch for s in every)
        self.cache = KVCache(model, entry.kv_layers, entry.kv_dtype, slots, reference.engine.memory)
        most = max(s.batch * s.rows for s in every)
        self._logits = np.zeros(most * model.padded_vocab_size, np.float32)
        self._reference = self.bind(reference)
        self._filler = self.bind(filler)
        widest = max(s.width for s in shapes)
        # What is compared lies within this many entries behind a depth: a window at the farthest place tried.
        self.span = -(-(widest + reference.width) // reference.width) * reference.width
        self.depths = [d for d in _DEPTHS if d + self.span <= model.context] or [1]
        self.random = np.random.default_rng(20260)
        self.vocab = model.vocab_size
        most_tokens = max(max(self.depths) + self.span, filler.width)
        self.tokens = self.random.integers(0, model.vocab_size, most_tokens)
        self.filled = 0
        self._intact: set[int] = set()  # slots that hold the reference's context

    def bind(self, shape: Shape) -> BoundPass:
        """Bind ``shape`` to the first slots."""
        return shape.engine.bind(self.cache, shape.width, shape.rows, batch=shape.batch, logits=self._logits)

    def go_to(self, depth: int) -> None:
        """Bring the reference's slots to ``depth`` entries, and compute the span behind it by the reference shape.

        Raises:
            EngineError: the reference gives values that are not numbers, or nothing but zeros.
        """
        width = self._filler.input_ids.shape[1]
        if self.filled:
            self._restore(0)
        while self.filled < depth:
            at = min(self.filled, max(0, depth - width))
            self._feed(self._filler, at, range(self._filler.logit_rows.shape[1]))
            self.filled = at + width
        self._intact = set(range(self.reference.batch))
        context = self.cache.read(0, 0, depth)
        for slot in range(1, self.reference.batch):
            self.cache.write(slot, 0, context)
        self.depth = depth
        self.logits = np.concatenate(  # [span, V]
            [self._logits_of_reference(at) for at in range(depth, depth + self.span, self.reference.width)]
        )
        if not np.isfinite(self.logits).all() or not self.logits.any():
            raise EngineError(f"{self.reference.name} gives logits that are not finite or all zero")
        self.entries = self.cache.read(0, 0, depth + self.span)  # [tensors, Hkv, depth + span, D]
        if not all(np.isfinite(e).all() and e.any() for e in self.entries):
            raise EngineError(f"{self.reference.name} gives KV entries that are not finite or all zero")
        self.filled = depth

    def _logits_of_reference(self, at: int) -> npt.NDArray[np.float32]:
        """Return its logits ``[S, V]`` of the window at entry ``at``, by as many runs as its rows need for them."""
        width, rows = self.reference.width, self.reference.rows
        found = []
        for first in range(0, width, rows):
            self._feed(self._reference, at, [min(first + row, width - 1) for row in range(rows)])
            found.append(self._reference.logits[0, : width - first].copy())
        return np.concatenate(found)

    def _feed(self, bound: BoundPass, at: int, logit_rows: Sequence[int]) -> None:
        bound.input_ids[:] = self.tokens[at : at + bound.input_ids.shape[1]]
        bound.write_index[:] = at
        bound.logit_rows[:] = logit_rows
        bound.run()

    def _restore(self, slot: int) -> None:
        """Give a slot the context of the reference; where it has it already, only what passes wrote behind it."""
        start = self.depth if slot in self._intact else 0
        self.cache.write(slot, start, self.entries[:, :, start:])
        self._intact.add(slot)

    def _disturb(self, slot: int) -> None:
        """Give a slot another context of the same size: the entries in another order."""
        if slot in self._intact:
            self.cache.write(slot, 0, self.entries[:, :, ::-1])
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
            found = self.compare(bound, shape, row, offset, real, wanted, self.entries)
            if found is not None:
                return found
        return None

    def compare(
        self,
        bound: BoundPass,
        shape: Shape,
        row: int,
        offset: int,
        real: int,
        wanted: npt.NDArray[np.float32] | None,
        entries: npt.NDArray[Any],
    ) -> str | None:
        """Compare one row of the last run with logits ``[S, V]``, if they are given, and with a slot's KV entries.

        Returns:
            The first difference in words, None if every bit agrees.
        """
        at = self.depth + offset
        where = f"in row {row} at context {at}" if shape.batch > 1 else f"at context {at}"
        if wanted is not None:
            got = bound.logits[row, : min(real, shape.rows)]
            wanted = wanted[-1:] if shape.rows == 1 else wanted[: shape.rows]
            if not _same_bits(got, wanted):
                return f"logits differ by up to {np.abs(got - wanted).max():.2g} {where}"
        if not _same_bits(self.cache.read(row, at, at + real), entries[:, :, at : at + real]):
            return f"KV entries differ {where}"
        return None


def _same_bits(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> bool:
    """Compare as whole numbers: 0.0 equals -0.0, which is another word."""
    word = f"u{a.itemsize}"
    return np.array_equal(a.view(word), b.view(word))

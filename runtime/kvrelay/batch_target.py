"""The target's engines over many slots: which shapes may commit, what they cost, and one run of several rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .box import Box
from .engine import BoundPass
from .errors import EngineError, ExactnessError, ParameterError
from .invariance import windows_refusal
from .kv import KVCache
from .logits import LogitRow, rows_of
from .manifest import EngineEntry
from .shapes import Shape, target_shapes
from .target import Target

if TYPE_CHECKING:
    from .faults import Injector

__all__ = ["BatchTarget", "Feed"]

# A window pass is compute-bound well before this many positions: wider ones cannot pay.
_MOST_POSITIONS = 32
_DRAFT_WIDTHS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Feed:
    """What one row of a pass is fed: tokens, behind which come pads, from KV entry ``start`` on."""

    tokens: Sequence[int]
    start: int


class BatchTarget:
    """Runs the target over neighbouring slots. Not thread-safe; rows of logits are those of the last run.

    Args:
        box: the bundle on this box.
        precision: of the target.
        cache: the slots.
        max_batch: most rows of a pass.
        window: most tokens of a replayed window.
        group: most windows of one replay.
        drafting: window passes over the whole batch are needed.
        injector: fails runs on purpose, when testing.

    Raises:
        ParameterError: the bundle has no verify engine of ``group`` windows of ``window`` tokens.
    """

    def __init__(
        self,
        box: Box,
        precision: str,
        cache: KVCache,
        *,
        max_batch: int,
        window: int,
        group: int,
        drafting: bool,
        injector: Injector,
    ) -> None:
        self.cache = cache
        self.group = group
        self.window = window
        self._box = box
        self._precision = precision
        self._injector = injector
        self._bound: dict[tuple[str, int], BoundPass] = {}
        self._targets: dict[int, Target] = {}
        bundle = box.bundle
        verify = bundle.engines(role="verify", precision=precision)
        sizes = {(e.batch, e.sequence) for e in verify}
        if (group, window) not in sizes:
            has = ", ".join(f"{g}x{n}" for g, n in sorted(sizes))
            raise ParameterError(f"group={group}, window={window}: this bundle has verify engines {has}")
        decode = bundle.engine("decode", precision)
        every = target_shapes(box, precision, max_batch)
        self._prefill = every.prefill
        self._verify = [s for s in every.verify if s.batch <= group and s.width <= window]
        self._shapes = replace(every, verify=self._verify)
        batches = range(1, max_batch + 1)
        self._wide = {
            b: [box.shape(decode, b, w, w) for w in _DRAFT_WIDTHS if b * w <= max(_MOST_POSITIONS, 2 * b)]
            for b in batches
            if drafting
        }
        wide = [s for shapes in self._wide.values() for s in shapes]
        self.main = next(s for s in self._verify if (s.batch, s.width) == (group, window))
        # First what may commit everywhere; the rest only where that leaves a gap or makes it likely.
        steps = [s for b in batches for s in every.steps[b]]
        self.verdicts = box.verdicts(precision, [*self._verify, self._prefill, *steps, every.plain[1]])
        more = [every.plain[b] for b in batches if self.in_class(every.plain[1])]
        doubled = [every.doubled[b] for b in batches if not any(self.in_class(s) for s in every.steps[b])]
        self.verdicts |= box.verdicts(precision, [*more, *doubled, *wide])
        self._sizes = sorted({b for b in batches if b & (b - 1) == 0} | {max_batch})
        # Costs between measured batch sizes are drawn from their neighbours: of a kind in use, all are measured.
        dynamic = [*every.plain.values(), *steps, *(every.doubled.values() if doubled else ()), *wide]
        self._ms = box.batch_ms(precision, [s for s in dynamic if s.batch in self._sizes] + self._verify)
        most = max(s.batch * s.rows for s in (*dynamic, *self._verify))
        self._memory = np.zeros(most * bundle.target.padded_vocab_size, np.float32)

    @property
    def kv_bytes_copied(self) -> int:
        """KV bytes that the backend wrote for the target's engines so far."""
        return sum(p.kv_bytes_copied for p in self._bound.values())

    # -- what may commit ----------------------------------------------------------------------------------------

    def in_class(self, shape: Shape) -> bool:
        """Whether ``shape`` lies in the verifier's shape class."""
        verdict = self.verdicts.get(shape.name)  # what was not checked commits nothing
        return verdict is not None and verdict.outside is None

    @property
    def aligned(self) -> bool:
        """Windows must begin at absolute multiples of the window: not all that commits lies in one class here."""
        return not (self.in_class(self.main) and self.in_class(self._prefill))

    @property
    def windows(self) -> str:
        """How windows lie: "sliding", or "aligned to N in GxN": in that shape alone."""
        return f"aligned to {self.window} in {self.group}x{self.window}" if self.aligned else "sliding"

    @property
    def reuses_prefixes(self) -> bool:
        """A prompt's beginning that another request left behind has the bits that it would get again."""
        return not self.aligned

    def require_determinism(self) -> None:
        """Refuse deterministic requests where a row's result depends on other rows or on pads.

        Raises:
            ExactnessError: says what differed.
        """
        refusal = windows_refusal(self.verdicts, (self.main, self._prefill))
        if refusal is not None:
            raise ExactnessError(
                f"deterministic=True cannot be kept on this box: {refusal}; send the request without it, or export "
                "another precision"
            )

    def require_class_steps(self, max_batch: int) -> None:
        """Refuse to decode inside the class where a batch size has no shape in it.

        Raises:
            ExactnessError: says for which batch, and what differed.
        """
        if self.aligned:
            why = windows_refusal(self.verdicts, (self.main, self._prefill))
            why = why or f"{self._why_aligned()}, so windows are aligned and replayed"
            raise ExactnessError(f"in_class=True cannot be kept on this box: {why}; leave in_class out")
        for batch in range(1, max_batch + 1):
            if self.class_step(batch) is None:
                shapes = [s for s in self._shapes.single_steps(batch) if s.name in self.verdicts]
                why = "; ".join(f"{s.name}: {self.verdicts[s.name].outside}" for s in shapes)
                raise ExactnessError(
                    f"in_class=True cannot be kept on this box: no step of {batch} row(s) lies in the verifier's "
                    f"shape class ({why}); leave in_class out"
                )

    def committing_engines(self) -> list[EngineEntry]:
        """Return the engines that may commit deterministic requests, with whatever draft, window and batch."""
        return [e for e in self._box.bundle.engines(precision=self._precision) if e.role != "draft"]

    def describe(self) -> str:
        """Say how deterministic requests are committed."""
        if self.aligned:
            aligned = f"windows aligned to multiples of {self.window}"
            return f"replayed in {self.main.name}, {aligned}, because {self._why_aligned()}"
        names = sorted({step.name for b in self._shapes.plain if (step := self.class_step(b)) is not None})
        return f"committed in one shape class: {', '.join(names) or 'no step'}, or replayed in {self.main.name}"

    def _why_aligned(self) -> str:
        outside = [s for s in (self.main, self._prefill) if not self.in_class(s)]
        found = "; ".join(f"{s.name}: {self.verdicts[s.name].outside}" for s in outside)
        return f"outside the verifier's shape class lies {found}"

    def replay_shapes(self) -> list[Shape]:
        """Verify shapes that may commit deterministic requests: one class, or where windows are aligned one shape."""
        return [self.main] if self.aligned else [s for s in self._verify if self.in_class(s)]

    def class_step(self, batch: int) -> Shape | None:
        """Return the cheapest shape of one new token a row inside the class, None if there is none."""
        if self.aligned:
            return None
        choices = [s for s in self._shapes.single_steps(batch) if self.in_class(s)]
        return min(choices, key=self.ms, default=None)

    def plain_step(self, batch: int) -> Shape:
        """Return the shape of one new token a row in the decode engine."""
        return self._shapes.plain[batch]

    def wide_steps(self, batch: int, *, in_class: bool) -> list[Shape]:
        """Return the shapes that verify drafts of all rows at once."""
        return [s for s in self._wide.get(batch, []) if not in_class or self.in_class(s)]

    # -- costs --------------------------------------------------------------------------------------------------

    def ms(self, shape: Shape) -> float:
        """Stored milliseconds of one run; between measured batch sizes on a straight line."""
        return self._between(self._ms, shape)

    def _between(self, measured: Mapping[str, float], shape: Shape) -> float:
        def at(batch: int) -> float | None:
            return measured.get(Shape(shape.engine, batch, shape.width, shape.rows).name)

        if shape.name in measured:
            return measured[shape.name]
        below = max(b for b in self._sizes if b < shape.batch)
        above = min(b for b in self._sizes if b > shape.batch)
        low, high = at(below), at(above)
        if low is None or high is None:  # the larger batch is over the limit of positions
            return (low or 0.0) / below * shape.batch
        return low + (high - low) * (shape.batch - below) / (above - below)

    def step_costs(self, entry: EngineEntry, box: Box) -> Callable[[int], float]:
        """Return the stored milliseconds of a draft's step on ``box`` by batch size, measured on first use."""
        measured = box.batch_ms(self._precision, [box.shape(entry, b) for b in self._sizes])
        return lambda batch: self._between(measured, box.shape(entry, batch))

    # -- running ------------------------------------------------------------------------------------------------

    def target(self, slot: int) -> Target:
        """Return the engines that process a prompt in ``slot``, bound to it."""
        if slot not in self._targets:
            singles = [s for s in self.replay_shapes() if s.batch == 1] if not self.aligned else []
            verify = {s.width: self._bind(s, slot) for s in singles}
            prefill = self._bind(self._prefill, slot)
            self._targets[slot] = Target(self.cache, verify, prefill, prefill, mixed_prefill=bool(verify))
        return self._targets[slot]

    def run(self, shape: Shape, slot: int, feeds: Sequence[Feed]) -> list[list[LogitRow]]:
        """Run ``shape`` over the slots from ``slot`` on.

        Returns:
            rows of logits ``[B][R]``; where R is 1, those of each row's last token.

        Raises:
            EngineError: the run failed; entries behind each row's start are then zeroed.
            MemoryError: there was no memory for pads.
        """
        bound = self._bind(shape, slot)
        if any(len(feed.tokens) < shape.width for feed in feeds) and shape.engine.entry.role == "verify":
            self._injector.before_pads()
        for row, feed in enumerate(feeds):
            real = len(feed.tokens)
            if feed.start + shape.width > self.cache.model.capacity:
                raise EngineError(f"a pass of {shape.width} at {feed.start} leaves {self.cache.model.capacity} entries")
            bound.input_ids[row, :real] = feed.tokens
            bound.input_ids[row, real:] = feed.tokens[-1]  # pads, beyond the length
            bound.write_index[row] = feed.start
            bound.logit_rows[row] = np.arange(shape.rows) if shape.rows > 1 else real - 1
        try:
            self._injector.before_run(shape.engine.entry.name)
            bound.run()
        except EngineError:
            for row, feed in enumerate(feeds):
                # One more: the step engine's attention writes a pad behind its token.
                self.cache.clear(slot + row, feed.start, feed.start + shape.width + 1)
            raise
        return rows_of(bound)

    def _bind(self, shape: Shape, slot: int) -> BoundPass:
        key = (shape.name, slot)
        if key not in self._bound:
            self._bound[key] = shape.engine.bind(
                self.cache, shape.width, shape.rows, slot=slot, batch=shape.batch, logits=self._memory
            )
        return self._bound[key]

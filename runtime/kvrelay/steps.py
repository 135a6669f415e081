"""Steps: one pass of the dynamic batch, with or without drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from .batch_drafting import Drafting
from .batch_target import BatchTarget, Feed
from .commits import Commits
from .errors import EngineError
from .logits import LogitRow
from .replays import Replays
from .shapes import Shape
from .slots import Row
from .stats import EngineStats

__all__ = ["Step", "Steps"]


@dataclass(frozen=True, slots=True)
class Step:
    """One pass over the active rows."""

    shape: Shape
    commits: bool  # for deterministic rows: the shape lies in the verifier's class
    drafted: list[list[int]]  # for each row


class Steps:
    """Decodes all active rows in one pass.

    Args:
        target: the target's engines.
        drafting: drafts for speed.
        commits: where rows advance.
        replays: says which rows wait for their replay.
        stats: of the batch.
        in_class: deterministic rows decode inside the class (True), are replayed (False), or what costs less (None).
    """

    def __init__(
        self,
        target: BatchTarget,
        drafting: Drafting,
        commits: Commits,
        replays: Replays,
        stats: EngineStats,
        *,
        in_class: bool | None,
    ) -> None:
        self.in_class = in_class
        self._target = target
        self._drafting = drafting
        self._commits = commits
        self._replays = replays
        self._stats = stats

    def decode_in_class(self, rows: Sequence[Row]) -> bool:
        """Whether deterministic rows commit from the batch's own pass, and need no replay."""
        count = sum(r.deterministic for r in rows)
        target = self._target
        step = target.class_step(len(rows)) if rows else None
        if not count or step is None or self.in_class is False:
            return False
        if self.in_class:
            return True
        # For all rows the dearer step, or for the deterministic ones a share of replays.
        dearer = target.ms(step) - target.ms(target.plain_step(len(rows)))
        return dearer <= min(target.ms(s) * -(-count // s.batch) / s.width for s in target.replay_shapes())

    def plan(self, rows: list[Row], commits: bool) -> Step:
        """Choose the pass and its drafts."""
        target = self._target
        plain = target.class_step(len(rows)) if commits else target.plain_step(len(rows))
        assert plain is not None
        # Deterministic rows take part with their next token alone where this pass does not commit them.
        wide = target.wide_steps(len(rows), in_class=commits)
        silent = [r.deterministic and not commits for r in rows]
        try:
            drafted = self._drafting.propose(rows, plain, wide, target.ms, silent)
        except (EngineError, MemoryError):
            # A draft can be done without: it changes nothing but the speed. Its failures are counted.
            self._stats.draft_failures += 1
            drafted = [[] for _ in rows]
        width = 1 + max(map(len, drafted))
        shape = plain if width == 1 else next(s for s in wide if s.width >= width)
        return Step(shape, commits, drafted)

    def run(self, step: Step, rows: Sequence[Row]) -> None:
        """Run one pass over neighbouring rows; if it fails, each row alone, so that only its cause is lost."""
        feeds = [Feed([r.next_token, *d], r.fed) for r, d in zip(rows, step.drafted, strict=True)]
        started = time.perf_counter()
        try:
            logits = self._target.run(step.shape, rows[0].slot, feeds)
        except (EngineError, MemoryError) as error:
            if len(rows) == 1:
                self._commits.fail(rows[0], error)
                return
            for row, drafted in zip(rows, step.drafted, strict=True):
                if (alone := self._alone(step, row, drafted)) is not None:
                    self.run(alone, [row])
                else:
                    self._replays.replay([row])
            return
        seconds = time.perf_counter() - started
        self._stats.steps += 1
        self._stats.step_rows += len(rows)
        self._stats.step_seconds += seconds
        canonical = not self._target.aligned and self._target.in_class(step.shape)
        for index, (row, drafted) in enumerate(zip(rows, step.drafted, strict=True)):
            if row.deterministic and not step.commits:
                row.request.stats.draft_seconds += seconds
                self._extend(row, logits[index][0])
            else:
                row.request.stats.verify_seconds += seconds
                self._commit_step(row, drafted, logits[index], canonical=canonical)

    def _alone(self, step: Step, row: Row, drafted: list[int]) -> Step | None:
        """Return the step for one row of a pass that failed; None if only a replay can commit the row."""
        target = self._target
        wide = [s for s in target.wide_steps(1, in_class=step.commits) if s.width > len(drafted)]
        if drafted and wide:
            return Step(wide[0], step.commits, [drafted])
        plain = target.class_step(1) if step.commits else None
        if step.commits and row.deterministic and plain is None:  # larger batches have a shape in the class
            return None
        return Step(plain or target.plain_step(1), step.commits, [[]])

    def _commit_step(self, row: Row, drafted: list[int], logits: Sequence[LogitRow], *, canonical: bool) -> None:
        length = len(row.request.tokens)
        counted = self._commits.commit(row, drafted, logits, canonical=canonical, replayed=False)
        if counted is not None and row.active:
            self._drafting.learn(row, drafted, *counted, row.request.tokens[length:])

    def _extend(self, row: Row, logits: LogitRow) -> None:
        """Take a candidate of a deterministic row from the fast path."""
        request = row.request
        if self._replays.is_due(row):
            return  # it rode along as a pad
        try:
            token = request.sampler.choose(logits, len(request.tokens) + len(row.candidates))
        except EngineError as error:
            self._commits.fail(row, error)
            return
        request.sampler.observe(token)
        request.stats.draft_runs += 1
        row.candidates.append(token)

"""Drafts for a whole batch: every row proposes, one pass verifies, and rows may accept different numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .batch_drafters import BatchDrafter, Proposal
from .policy import MARGIN, Acceptance, Kind, expected_tokens
from .shapes import Shape
from .slots import Row

__all__ = ["Drafting"]


class Drafting:
    """Chooses, for each pass of the batch, whether to draft, with what and how far, from stored costs.

    Args:
        drafters: the drafts that may be used.
        prior: acceptance of a draft's proposals of a grade before anything was seen.
    """

    def __init__(self, drafters: Sequence[BatchDrafter], prior: Callable[[str, int], float]) -> None:
        self._drafters = list(drafters)
        self._prior = prior
        self._acceptance: dict[Row, Acceptance] = {}
        # Of the pass at hand: what each lookup proposed, used or not, and the kind that was used.
        self._looked_up: dict[Row, list[Proposal]] = {}
        self._used: dict[Row, Kind] = {}

    def begin(self, row: Row) -> None:
        """Start on a row whose prompt was processed."""
        self._acceptance[row] = Acceptance(self._prior)
        for drafter in self._drafters:
            drafter.begin(row)

    def end(self, row: Row) -> None:
        """Forget a row."""
        self._acceptance.pop(row, None)
        self._looked_up.pop(row, None)
        self._used.pop(row, None)
        for drafter in self._drafters:
            drafter.end(row)

    def propose(
        self,
        rows: Sequence[Row],
        plain: Shape,
        wide: Sequence[Shape],
        ms: Callable[[Shape], float],
        silent: Sequence[bool],
    ) -> list[list[int]]:
        """Draft for one pass.

        Args:
            rows: the active rows.
            plain: the pass without drafts.
            wide: the passes that verify drafts.
            ms: stored cost of a pass.
            silent: rows that take no candidates.

        Returns:
            For each row its candidates, none where drafting does not pay.

        Raises:
            EngineError: a draft engine failed or gave values that are not numbers.
        """
        self._looked_up.clear()
        best: BatchDrafter | None = None
        best_kinds: list[Kind] = []
        best_counts: list[int] = []
        best_rate = len(rows) / ms(plain) * MARGIN
        for drafter in self._drafters if wide else ():
            widest = max(s.width for s in wide)
            limits = [
                0 if quiet else min(row.request.remaining, widest) - 1 for row, quiet in zip(rows, silent, strict=True)
            ]
            found = [drafter.look(row, most) for row, most in zip(rows, limits, strict=True)]
            for row, proposal in zip(rows, found, strict=True):
                if proposal.known:
                    self._looked_up.setdefault(row, []).append(proposal)
            for shape in wide:
                counts = [max(min(proposal.most, shape.width - 1), 0) for proposal in found]
                if not any(counts):
                    continue
                drafting = 0.0 if any(p.known for p in found) else max(counts) * drafter.ms(len(rows))
                tokens = sum(
                    # A row without candidates has no kind either: a lookup that never matched has no grade.
                    expected_tokens(self._acceptance[row].of(proposal.kind), count) if count else 1.0
                    for row, proposal, count in zip(rows, found, counts, strict=True)
                )
                rate = tokens / (drafting + ms(shape))
                if rate > best_rate:
                    best, best_counts, best_rate = drafter, counts, rate
                    best_kinds = [proposal.kind for proposal in found]
        if best is None:
            return [[] for _ in rows]
        self._used = dict(zip(rows, best_kinds, strict=True))
        return best.draft(rows, best_counts)

    def learn(self, row: Row, drafted: Sequence[int], evaluated: int, matched: int, committed: Sequence[int]) -> None:
        """Take in what a pass committed for a row."""
        acceptance = self._acceptance[row]
        for proposal in self._looked_up.get(row, []):
            acceptance.add_proposal(proposal.kind, proposal.known, committed)
        if not drafted:
            acceptance.fade()
        elif (kind := self._used[row]) not in [proposal.kind for proposal in self._looked_up.get(row, [])]:
            acceptance.add(kind, evaluated, matched)

    def rolled_back(self, row: Row) -> None:
        """Learn that a row's length is final again: what was drafted behind it is junk."""
        for drafter in self._drafters:
            drafter.rolled_back(row)

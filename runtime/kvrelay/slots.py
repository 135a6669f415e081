"""Where requests lie in a cache of several slots.

One pass runs over neighbouring slots, so active rows are kept together from slot 0 on, deterministic ones first: that
fills their verify groups. A row moves when another leaves or joins, never from step to step; the bytes are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .request import Request, common_prefix

__all__ = ["Kept", "Row", "Slots"]


@dataclass(slots=True, eq=False)
class Row:
    """A request in the batch."""

    request: Request
    deterministic: bool
    handle: Any  # kvrelay.handle.Handle, told of text and of the end
    submitted: float = field(default_factory=time.perf_counter)
    slot: int = -1
    active: bool = False  # its prompt is processed
    candidates: list[int] = field(default_factory=list)  # decoded on the fast path, not yet verified
    canonical: int = 0  # leading KV entries that only passes of the verifier's shape class wrote
    first_token: float = 0.0  # when the first token was committed

    @property
    def fed(self) -> int:
        """KV entries before the token that is fed next."""
        return self.request.kv_length + len(self.candidates)

    @property
    def next_token(self) -> int:
        return self.candidates[-1] if self.candidates else self.request.tokens[-1]


@dataclass(slots=True)
class Kept:
    """What a former request left in a free slot."""

    tokens: list[int] = field(default_factory=list)
    canonical: int = 0

    def reusable(self, prompt: list[int], *, canonical: bool) -> int:
        """Entries that a prompt can use; its last token is always processed again, for its logits."""
        same = common_prefix(self.tokens, prompt[:-1])
        return min(same, self.canonical) if canonical else same


class Slots:
    """The rows of a batch by slot.

    Args:
        count: number of slots.
        most: rows at once; a verify group may need more slots than that, for its dummies.
        swap: exchanges the first entries of two slots in every cache: ``swap(a, b, length)`` returns bytes written.
    """

    def __init__(self, count: int, most: int, swap: Callable[[int, int, int], int]) -> None:
        self._most = most
        self._swap = swap
        self._rows: list[Row | None] = [None] * count
        self.kept = [Kept() for _ in range(count)]
        self.bytes_moved = 0

    @property
    def active(self) -> list[Row]:
        """Rows whose prompt is processed, by slot; after :meth:`arrange` they lie in slots 0, 1, ..."""
        return [r for r in self._rows if r is not None and r.active]

    @property
    def occupied(self) -> list[Row]:
        """Rows that have a slot."""
        return [r for r in self._rows if r is not None]

    @property
    def prefilling(self) -> Row | None:
        """The row whose prompt is being processed: one at a time."""
        return next((r for r in self._rows if r is not None and not r.active), None)

    @property
    def free(self) -> list[int]:
        """Slots that a request may take now."""
        empty = [i for i, r in enumerate(self._rows) if r is None]
        return empty if len(self._rows) - len(empty) < self._most else []

    def length(self, slot: int) -> int:
        """Valid entries of a slot, candidates' included: what a pass must not write over."""
        row = self._rows[slot]
        return row.fed if row is not None else len(self.kept[slot].tokens)

    def take(self, row: Row, *, reuse: bool, canonical: bool) -> None:
        """Give ``row`` the free slot that holds the longest beginning of its prompt.

        Of equals the one that keeps the fewest tokens, whose loss costs least; then the lowest.

        Args:
            row: the row; its request's ``kv_length`` becomes what the slot already holds of the prompt.
            reuse: entries of former requests may be used.
            canonical: only those that passes of the verifier's shape class wrote.
        """
        prompt = row.request.tokens
        found = {i: self.kept[i].reusable(prompt, canonical=canonical) if reuse else 0 for i in self.free}
        slot = max(found, key=lambda i: (found[i], -len(self.kept[i].tokens), -i))
        self._rows[slot], row.slot = row, slot
        request = row.request
        request.kv_length = request.stats.reused_tokens = found[slot]
        row.canonical = min(found[slot], self.kept[slot].canonical)
        self.kept[slot] = Kept()

    def leave(self, row: Row, *, keep: bool) -> None:
        """Free the slot of ``row``; ``keep`` what it holds for a later prompt."""
        self._rows[row.slot] = None
        if keep:
            tokens = row.request.tokens[: row.request.kv_length]
            self.kept[row.slot] = Kept(tokens, min(row.canonical, len(tokens)))

    def arrange(self) -> None:
        """Bring active rows together from slot 0 on, deterministic ones first."""
        active = self.active
        wanted = sum(r.deterministic for r in active)
        for row in reversed(active):
            if row.slot < len(active):
                continue
            # Out of the run: into the hole that suits its kind.
            holes = [i for i in range(len(active)) if not self._is_active(i)]
            self._exchange(row.slot, holes[0] if row.deterministic else holes[-1])
        wrong = [r for r in self.active if r.deterministic and r.slot >= wanted]
        for slot in range(wanted):
            row_there = self._rows[slot]
            if row_there is not None and not row_there.deterministic:
                self._exchange(slot, wrong.pop().slot)

    def _is_active(self, slot: int) -> bool:
        row = self._rows[slot]
        return row is not None and row.active

    def _exchange(self, a: int, b: int) -> None:
        self.bytes_moved += self._swap(a, b, max(self.length(a), self.length(b)))
        self._rows[a], self._rows[b] = self._rows[b], self._rows[a]
        self.kept[a], self.kept[b] = self.kept[b], self.kept[a]
        for slot in (a, b):
            row = self._rows[slot]
            if row is not None:
                row.slot = slot

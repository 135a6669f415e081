"""Replays: windows of candidates, verified in a fixed shape, group by group."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .batch_target import BatchTarget, Feed
from .commits import Commits
from .errors import EngineError
from .faults import Injector
from .logits import LogitRow
from .slots import Row, Slots
from .stats import EngineStats

__all__ = ["Replays"]


class Replays:
    """Verifies what deterministic rows decoded on the fast path.

    Args:
        target: the target's engines.
        slots: the slots.
        commits: where rows advance.
        injector: faults to inject.
        stats: of the batch.
    """

    def __init__(
        self, target: BatchTarget, slots: Slots, commits: Commits, injector: Injector, stats: EngineStats
    ) -> None:
        self._target = target
        self._slots = slots
        self._commits = commits
        self._injector = injector
        self._stats = stats

    def is_due(self, row: Row) -> bool:
        """Whether a row's window is to be replayed: it is full, or the row may have finished."""
        request = row.request
        room = self._target.window - 1
        if self._target.aligned:
            room -= (len(request.tokens) - 1) % self._target.window
        most = min(room, request.remaining - 1)
        return len(row.candidates) >= most or (bool(row.candidates) and row.candidates[-1] in request.eos_ids)

    def replay_due(self, rows: Sequence[Row]) -> None:
        """Replay the groups in which a window is due; rows with fewer candidates fill them."""
        waiting = [r for r in rows if r.deterministic and r.active]
        if any(self.is_due(r) for r in waiting):
            due = [r for r in waiting if self.is_due(r)]
            groups = {r.slot // self._target.group for r in due}
            self.replay([r for r in waiting if r.slot // self._target.group in groups and (r.candidates or r in due)])

    def replay(self, rows: Sequence[Row]) -> None:
        """Verify the candidates of deterministic rows, group by group, in a fixed shape."""
        group = self._target.group
        for first in sorted({r.slot // group for r in rows}):
            self._replay_group([r for r in rows if r.slot // group == first])

    def _replay_group(self, rows: list[Row]) -> None:
        target = self._target
        windows = {id(r): self._window(r) for r in rows}
        widest = max(len(tokens) for tokens, _ in windows.values())
        span = rows[-1].slot - rows[0].slot + 1
        fitting = [s for s in target.replay_shapes() if s.width >= widest]
        together = min((s for s in fitting if s.batch >= span), key=target.ms, default=None)
        alone = min(fitting, key=lambda s: (s.batch, target.ms(s)))  # never a group for one row, if there is a choice
        # Rows may lie too far apart for one pass of the fixed shape, or its dummies may cost more than they save.
        if len(rows) > 1 and (together is None or target.ms(together) > len(rows) * target.ms(alone)):
            for row in rows:
                self._replay_group([row])
            return
        shape = together if together is not None and len(rows) > 1 else alone
        first = min(rows[0].slot, target.cache.slots - shape.batch)
        feeds = []
        for slot in range(first, first + shape.batch):
            mine = next((r for r in rows if r.slot == slot), None)
            # The slots of others take part with pads beyond their length.
            feeds.append(Feed(*windows[id(mine)]) if mine is not None else Feed([0], self._slots.length(slot)))
        started = time.perf_counter()
        try:
            logits = target.run(shape, first, feeds)
        except (EngineError, MemoryError) as error:
            if len(rows) == 1:
                self._commits.fail(rows[0], error)
                return
            for row in rows:
                self._replay_group([row])
            return
        seconds = time.perf_counter() - started
        self._stats.replays += 1
        self._stats.replay_seconds += seconds
        self._stats.group_places += shape.batch
        self._stats.windows += len(rows)
        for row in rows:
            tokens, start = windows[id(row)]
            row.request.stats.verify_seconds += seconds
            self._commit_window(row, tokens, start, logits[row.slot - first])

    def _window(self, row: Row) -> tuple[list[int], int]:
        """Return the tokens of a row's window and where it begins, a candidate spoiled if that is to be tested."""
        request = row.request
        candidates = self._injector.spoil(row.candidates)
        start = request.kv_length
        if self._target.aligned:
            start -= start % self._target.window
        return [*request.tokens[start:], *candidates], start

    def _commit_window(self, row: Row, tokens: Sequence[int], start: int, logits: Sequence[LogitRow]) -> None:
        request = row.request
        for candidate in row.candidates:
            request.sampler.forget(candidate)
        row.candidates.clear()
        known = len(request.tokens) - start  # committed tokens in the window, the last of which is fed again anyway
        self._commits.commit(row, list(tokens[known:]), logits[known - 1 :], canonical=True, replayed=True)

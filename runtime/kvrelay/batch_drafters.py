"""What proposes tokens for a whole batch: an engine, or a lookup in each row's own text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .drafters import NgramDrafter
from .engine import BoundPass, LoadedEngine
from .errors import EngineError
from .faults import Injector
from .kv import HandOver, KVCache
from .logits import LogitRow
from .policy import Kind
from .slots import Row

__all__ = ["BatchDrafter", "BatchEngineDrafter", "BatchLookup", "Proposal"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one row would draft."""

    kind: Kind
    most: int  # candidates that it can have
    known: list[int]  # those that a lookup has already


_CATCH_UP = (64, 16, 4, 2, 1)  # widths in which a draft model is fed what it lacks


class BatchDrafter(Protocol):
    """Proposes candidates for rows that lie in neighbouring slots from slot 0 on."""

    name: str

    def begin(self, row: Row) -> None:
        """Start on a row whose prompt was processed."""
        ...

    def end(self, row: Row) -> None:
        """Forget a row."""
        ...

    def look(self, row: Row, most: int) -> Proposal:
        """Say what the row would draft, without running anything."""
        ...

    def ms(self, batch: int) -> float:
        """Stored milliseconds for one candidate of every row."""
        ...

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[list[int]]:
        """Draft up to ``counts`` candidates for each row."""
        ...

    def rolled_back(self, row: Row) -> None:
        """Learn that a pass was committed: entries behind the row's length are junk."""
        ...

    def swap(self, a: int, b: int, length: int) -> int:
        """Exchange what is kept for two slots; return the bytes written."""
        ...


class BatchLookup:
    """Prompt lookup for every row (see :class:`kvrelay.drafters.NgramDrafter`)."""

    name = "ngram"

    def __init__(self) -> None:
        self._lookups: dict[Row, NgramDrafter] = {}

    def begin(self, row: Row) -> None:
        """Start an index of the row's text."""
        self._lookups[row] = NgramDrafter()

    def end(self, row: Row) -> None:
        """Drop the row's index."""
        self._lookups.pop(row, None)

    def look(self, row: Row, most: int) -> Proposal:
        """Look up what followed the row's last tokens."""
        lookup = self._lookups[row]
        known = lookup.propose(row.request, most) if most > 0 else []
        return Proposal((self.name, lookup.grade), len(known), known)

    def ms(self, batch: int) -> float:
        """A lookup costs nothing."""
        return 0.0

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[list[int]]:
        """Return what was looked up."""
        return [self.look(row, count).known for row, count in zip(rows, counts, strict=True)]

    def rolled_back(self, row: Row) -> None:
        """Nothing to keep: the text itself is the state."""

    def swap(self, a: int, b: int, length: int) -> int:
        """Nothing lies in a slot."""
        return 0


class BatchEngineDrafter:
    """Drafts with an engine, one token of every row in a pass.

    Its cache is the target's own (shared), one of another dtype (handed over) or, for another model, its own: there
    entries follow what was fed, so a row's first step feeds its last two tokens, the former of which a full match had
    left unfed.

    Args:
        name: the draft's name.
        engine: the draft engine.
        cache: the cache it reads and writes.
        ms: stored milliseconds of a step by batch size.
        injector: fails runs on purpose, when testing.
        own_model: the engine is another model's.
        hand_over: copies verified entries to ``cache``.
    """

    def __init__(
        self,
        name: str,
        engine: LoadedEngine,
        cache: KVCache,
        ms: Callable[[int], float],
        injector: Injector,
        *,
        own_model: bool = False,
        hand_over: HandOver | None = None,
    ) -> None:
        self.name = name
        self.ms = ms
        self._engine = engine
        self._cache = cache
        self._injector = injector
        self._own_model = own_model
        self._hand_over = hand_over
        self._passes: dict[tuple[int, int, int], BoundPass] = {}
        self._memory = np.zeros(cache.slots * cache.model.padded_vocab_size, np.float32)
        self._fed: dict[Row, int] = {}  # valid entries of an own cache

    def begin(self, row: Row) -> None:
        """Forget the former row's entries."""
        self._fed[row] = 0
        if self._hand_over is not None:
            self._hand_over.restart(row.slot)

    def end(self, row: Row) -> None:
        """Forget the row."""
        self._fed.pop(row, None)

    def look(self, row: Row, most: int) -> Proposal:
        """Say that it would draft as much as asked for."""
        return Proposal((self.name, 0), most, [])

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[list[int]]:
        """Draft up to ``counts`` candidates for each row, fewer after one that would end it."""
        runs, spent, written = self._used()
        drafted: list[list[int]] = [[] for _ in rows]
        try:
            for row, count in zip(rows, counts, strict=True):
                self._bring_up(row, count)
            for turn in range(max(counts)):
                self._draft_one(rows, counts, drafted, turn)
        except EngineError:
            for row in rows:
                # What the failed pass wrote is unknown; a pair begins one entry earlier.
                self._fed[row] = min(self._fed[row], max(row.fed - 1, 0))
                self._cache.clear(row.slot, self._fed[row] if self._own_model else row.fed)
            raise
        finally:
            for row, mine in zip(rows, drafted, strict=True):
                for token in mine:
                    row.request.sampler.forget(token)
        after = self._used()
        for row, count, mine in zip(rows, counts, drafted, strict=True):
            if count:  # other rows rode along: what was fed for them is not what they will commit
                self._fed[row] = row.fed + len(mine)  # the last candidate was never fed
            row.request.stats.draft_runs += after[0] - runs
            row.request.stats.draft_seconds += after[1] - spent
            row.request.stats.kv_bytes_copied += (after[2] - written) // len(rows)
        return drafted

    def _bring_up(self, row: Row, count: int) -> None:
        """Give a row's cache the committed entries that it lacks."""
        if self._hand_over is not None:
            copied = self._hand_over.bytes
            self._hand_over.advance(row.request.kv_length, row.slot)
            row.request.stats.kv_bytes_copied += self._hand_over.bytes - copied
        if self._own_model and count:
            self._catch_up(row)

    def _draft_one(self, rows: Sequence[Row], counts: Sequence[int], drafted: list[list[int]], turn: int) -> None:
        """Add a candidate to each row that wants one more and has not drafted its end."""
        bound = self._step(rows, drafted, pair=self._own_model and turn == 0)
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            mine, request = drafted[index], row.request
            if len(mine) == turn < count and not (mine and mine[-1] in request.eos_ids):
                token = request.sampler.choose(LogitRow(bound, index, 0), row.fed + 1 + turn)
                request.sampler.observe(token)
                mine.append(token)

    def rolled_back(self, row: Row) -> None:
        """Keep the entries of committed tokens; what was fed behind them is junk."""
        self._fed[row] = min(self._fed[row], row.request.kv_length)

    def swap(self, a: int, b: int, length: int) -> int:
        """Exchange two slots of a cache that is not the target's."""
        if self._hand_over is not None:
            lengths = self._hand_over.lengths
            lengths[a], lengths[b] = lengths[b], lengths[a]
        return self._cache.swap(a, b, length) if self._own_model or self._hand_over is not None else 0

    def _step(self, rows: Sequence[Row], drafted: Sequence[list[int]], *, pair: bool) -> BoundPass:
        bound = self._pass(0, len(rows), 2 if pair else 1)
        for index, (row, mine) in enumerate(zip(rows, drafted, strict=True)):
            token, start = (mine[-1] if mine else row.next_token), row.fed + len(mine)
            bound.logit_rows[index] = 0
            if pair:
                # The former of two is fed once more: its entry is there already, unless a full match left it out.
                tokens = row.request.tokens
                bound.input_ids[index] = [tokens[-2], tokens[-1]] if len(tokens) > 1 else [token, token]
                bound.logit_rows[index] = int(len(tokens) > 1)
                start = max(start - 1, 0)
            else:
                bound.input_ids[index] = token
            bound.write_index[index] = start
        self._injector.before_run(self._engine.entry.name)
        bound.run()
        return bound

    def _catch_up(self, row: Row) -> None:
        """Feed the tokens before the last two that the engine's own cache lacks."""
        tokens = row.request.tokens
        while (start := self._fed[row]) < len(tokens) - 2:
            missing = len(tokens) - 2 - start
            width = next(w for w in _CATCH_UP if w <= missing)
            bound = self._pass(row.slot, 1, width)
            bound.input_ids[0] = tokens[start : start + width]
            bound.write_index[0] = start
            bound.logit_rows[0] = 0
            bound.run()
            self._fed[row] = start + width

    def _pass(self, slot: int, batch: int, width: int) -> BoundPass:
        key = (slot, batch, width)
        if key not in self._passes:
            self._passes[key] = self._engine.bind(self._cache, width, 1, slot=slot, batch=batch, logits=self._memory)
        return self._passes[key]

    def _used(self) -> tuple[int, float, int]:
        """Return the runs and seconds of all passes so far, and the KV bytes that the backend wrote for them."""
        passes = self._passes.values()
        return sum(p.runs for p in passes), sum(p.seconds for p in passes), sum(p.kv_bytes_copied for p in passes)

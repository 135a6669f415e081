"""Commit what a pass decided for a row, hand out its text, and end it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .batch_drafting import Drafting
from .compare import compare
from .errors import EngineError, KvrelayError
from .kv import KVCache
from .logits import LogitRow
from .slots import Row, Slots
from .stats import EngineStats

__all__ = ["Commits"]


class Commits:
    """The one place where rows of a batch advance and end.

    Args:
        cache: the target's.
        slots: the slots.
        drafting: forgets rows that end.
        stats: of the batch.
    """

    def __init__(self, cache: KVCache, slots: Slots, drafting: Drafting, stats: EngineStats) -> None:
        self.open: dict[Row, None] = {}  # rows whose handles were not told of an end, wherever a fault left them
        self._cache = cache
        self._slots = slots
        self._drafting = drafting
        self._stats = stats

    def commit(
        self, row: Row, drafted: list[int], logits: Sequence[LogitRow], *, canonical: bool, replayed: bool
    ) -> tuple[int, int] | None:
        """Compare, commit, roll back by moving the length, and hand out the text.

        Returns:
            candidates compared and matched, None if the request failed.
        """
        request = row.request
        length = request.kv_length
        stats = request.stats
        emitted = stats.emitted
        try:
            matched, evaluated, text = compare(request, drafted, logits)
        except EngineError as error:
            self.fail(row, error)
            return None
        request.kv_length = len(request.tokens) - 1
        if canonical and row.canonical >= length:
            row.canonical = request.kv_length
        self._stats.emitted += stats.emitted - emitted
        if replayed:
            self._stats.rollbacks += evaluated > matched
            self._stats.recomputed += len(drafted) - matched
        else:
            self._stats.drafted += len(drafted)
            self._stats.accepted += matched
        self._drafting.rolled_back(row)
        self.give(row, text)
        return evaluated, matched

    def give(self, row: Row, text: str) -> None:
        """Hand out text that was committed, and end the row if that was the last."""
        now = time.perf_counter()
        row.request.stats.decode_seconds = now - row.first_token
        if row.request.finish_reason is not None:
            self.finish(row, text)
        elif text:
            row.handle._push(text)

    def finish(self, row: Row, text: str = "") -> None:
        """End a row whose request has a reason for it."""
        self._release(row, keep=True)
        if row.request.finish_reason == "cancelled":
            self._stats.cancelled += 1
        else:
            self._stats.finished += 1
        text += row.request.stream.finish()
        self.open.pop(row)
        row.handle._end(text, None)  # last: whoever waited finds nothing left of the request

    def fail(self, row: Row, error: Exception) -> None:
        """End a request with an error; what its slot holds is unknown and is cleared."""
        if row.slot >= 0:
            model = self._cache.model
            self._cache.clear(row.slot, 0, row.fed + model.capacity - model.context)  # no pass wrote farther
        self._release(row, keep=False)
        self._stats.failed += 1
        wrapped = error if isinstance(error, KvrelayError) else EngineError(f"no memory for a pass: {error}")
        self.open.pop(row)
        row.handle._end("", wrapped)

    def _release(self, row: Row, *, keep: bool) -> None:
        row.candidates.clear()
        if row.slot >= 0:
            self._drafting.end(row)
            self._slots.leave(row, keep=keep)
        row.active = False

"""The target's engines bound to one slot: prefill, plain step, verify."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .engine import BoundPass
from .errors import EngineError
from .kv import KVCache
from .logits import LogitRow, rows_of

__all__ = ["Target"]


class Target:
    """Runs the target over one slot of its cache. Rows of logits are those of the last run.

    Args:
        cache: the slot's cache.
        verify: bound verify passes by window size.
        prefill: the bound prefill pass.
        plain: the pass that commits one token without a draft: the narrowest verify pass when exact, the decode
            engine at width 1 otherwise.
        mixed_prefill: verify passes give the same bits as prefill, so they may process short ends of a prompt.
    """

    def __init__(
        self,
        cache: KVCache,
        verify: dict[int, BoundPass],
        prefill: BoundPass,
        plain: BoundPass,
        *,
        mixed_prefill: bool,
    ) -> None:
        self.cache = cache
        self._verify = dict(sorted(verify.items()))
        self._prefill = prefill
        self._plain = plain
        self._mixed_prefill = mixed_prefill
        self._passes = {id(p): p for p in (*verify.values(), prefill, plain)}.values()

    @property
    def windows(self) -> list[int]:
        """Window sizes, ascending."""
        return list(self._verify)

    @property
    def seconds(self) -> float:
        """Time spent inside the target's engines so far."""
        return sum(p.seconds for p in self._passes)

    @property
    def kv_bytes_copied(self) -> int:
        """KV bytes that the backend wrote for the target's engines so far."""
        return sum(p.kv_bytes_copied for p in self._passes)

    def prefill(self, tokens: Sequence[int], start: int) -> LogitRow:
        """Process ``tokens[start:]`` and return the logits that follow the last."""
        while True:
            start, last = self.prefill_chunk(tokens, start)
            if last is not None:
                return last

    def prefill_chunk(self, tokens: Sequence[int], start: int) -> tuple[int, LogitRow | None]:
        """Process one chunk of ``tokens[start:]``; return its end and, at the last token, the logits that follow."""
        chunk = self._prefill.input_ids.shape[1]
        left = len(tokens) - start
        bound = self._prefill
        if self._mixed_prefill and left <= chunk // 2:
            bound = next((p for n, p in self._verify.items() if n >= left), self._verify[self.windows[-1]])
        part = tokens[start : start + bound.input_ids.shape[1]]
        row = len(part) - 1
        self._run(bound, part, start, last_row=row)
        end = start + len(part)
        return end, LogitRow(bound, 0, min(row, bound.logit_rows.shape[1] - 1)) if end == len(tokens) else None

    def step(self, token: int, length: int) -> list[LogitRow]:
        """Commit nothing but ``token``'s KV at ``length``; return the one row of logits that follows it."""
        self._run(self._plain, [token], length, last_row=0)
        return rows_of(self._plain)[0][:1]

    def replay(self, window: Sequence[int], length: int, width: int) -> list[LogitRow]:
        """Replay ``window`` at ``length`` through the verify pass of ``width``; return a row for each token."""
        bound = self._verify[width]
        self._run(bound, window, length, last_row=0)
        return rows_of(bound)[0][: len(window)]

    def _run(self, bound: BoundPass, part: Sequence[int], length: int, *, last_row: int) -> None:
        width, rows = bound.input_ids.shape[1], bound.logit_rows.shape[1]
        if length + width > self.cache.model.capacity:
            raise EngineError(f"a pass of {width} at {length} leaves the capacity {self.cache.model.capacity}")
        bound.input_ids[0, : len(part)] = part
        bound.input_ids[0, len(part) :] = part[-1]  # pads, beyond the length
        bound.write_index[0] = length
        bound.logit_rows[0] = last_row if rows == 1 else np.arange(rows)
        bound.run()

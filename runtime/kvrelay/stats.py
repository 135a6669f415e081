"""Counters and times of one request, and the identities that hold between them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineStats", "Stats"]


@dataclass(slots=True)
class Stats:
    """What a request did. In a batch, times are those of the passes that the request took part in.

    Always: ``proposed >= evaluated >= accepted`` and ``emitted == first + accepted + corrections + bonus``. Rows
    behind the token that ends a request are never looked at, so nothing emitted is taken back.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0  # prompt tokens whose KV a former request had left in the slot
    first: int = 0  # tokens that prefill committed
    proposed: int = 0  # tokens drafted
    evaluated: int = 0  # drafted tokens that were compared
    accepted: int = 0  # drafted tokens that matched
    corrections: int = 0  # tokens of the verifier at a mismatch
    bonus: int = 0  # tokens of the verifier after a full match, plain passes included
    windows: int = 0  # passes that verified a draft
    plain_passes: int = 0  # passes without a draft
    rollbacks: int = 0  # windows with a mismatch
    draft_runs: int = 0  # runs of a draft engine
    draft_seconds: float = 0.0  # inside draft engines
    verify_seconds: float = 0.0  # inside the target's engines, prefill excluded
    ttft: float = 0.0  # seconds from the call to the first token
    decode_seconds: float = 0.0  # seconds from the first token to the last
    kv_bytes: int = 0  # KV bytes the request's slot holds
    kv_bytes_copied: int = 0  # KV bytes moved between caches that cannot share memory, or written by the backend
    plain_ms: float = 0.0  # stored cost of a plain step on this box
    stored_verify_ms: float = 0.0  # stored costs of the target passes made, summed
    policy: str = ""  # what the choice of drafts came to

    @property
    def emitted(self) -> int:
        return self.first + self.accepted + self.corrections + self.bonus

    @property
    def acceptance(self) -> float | None:
        """Accepted over evaluated; None without a draft."""
        return self.accepted / self.evaluated if self.evaluated else None

    @property
    def recomputed(self) -> int:
        """Drafted tokens that were dropped."""
        return self.proposed - self.accepted

    @property
    def passes(self) -> int:
        return self.windows + self.plain_passes

    @property
    def tokens_per_verify(self) -> float | None:
        """Tokens committed by each pass of the target after prefill."""
        return (self.emitted - self.first) / self.passes if self.passes else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first, by the time they took."""
        return (self.emitted - self.first) / self.decode_seconds if self.decode_seconds and self.passes else None

    @property
    def time_per_token(self) -> float | None:
        """Seconds a token after the first."""
        rate = self.tokens_per_second
        return 1 / rate if rate else None

    @property
    def host_share(self) -> float | None:
        """Share of decoding time spent outside engines."""
        if not self.decode_seconds:
            return None
        return max(0.0, 1 - (self.draft_seconds + self.verify_seconds) / self.decode_seconds)

    @property
    def speedup(self) -> float | None:
        """Decoding speed over that of plain steps.

        Plain steps are reckoned at their stored cost, slowed by as much as this request's own target passes were
        slower than their stored costs: a busy machine slows both.
        """
        if not self.passes or not self.stored_verify_ms or not self.decode_seconds:
            return None
        slowed = self.verify_seconds / self.stored_verify_ms
        return (self.emitted - self.first) * self.plain_ms * slowed / self.decode_seconds


@dataclass(slots=True)
class EngineStats:
    """What a batch did since it was made."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    emitted: int = 0  # tokens committed after each request's first
    reused_tokens: int = 0  # prompt tokens whose KV a former request had left in the slot
    steps: int = 0  # passes of the whole batch
    step_rows: int = 0  # active rows of those passes, summed
    replays: int = 0  # passes of a verify engine over a group of windows
    windows: int = 0  # windows replayed
    group_places: int = 0  # places that those passes had for windows
    rollbacks: int = 0  # of those, with a mismatch
    recomputed: int = 0  # their candidates that were dropped
    drafted: int = 0  # tokens drafted for speed
    accepted: int = 0  # of those, the ones that matched
    draft_failures: int = 0  # passes that went without a draft because its engine failed
    kv_bytes_moved: int = 0  # KV bytes written when rows moved to another slot
    kv_bytes_copied: int = 0  # KV bytes that the backend wrote for the target's engines (dialect `decomposed`)
    seconds: float = 0.0  # in the loop while there was work
    prefill_seconds: float = 0.0
    step_seconds: float = 0.0
    replay_seconds: float = 0.0

    @property
    def group_fill(self) -> float | None:
        """Share of a group's places that held a window; None without a replay."""
        return self.windows / self.group_places if self.group_places else None

    @property
    def verify_share(self) -> float | None:
        """Share of the time in engines that replays took."""
        total = self.prefill_seconds + self.step_seconds + self.replay_seconds
        return self.replay_seconds / total if total else None

    @property
    def recomputed_share(self) -> float | None:
        """Candidates dropped over tokens committed."""
        return self.recomputed / self.emitted if self.emitted else None

    @property
    def batch_fill(self) -> float | None:
        """Active rows of an average pass."""
        return self.step_rows / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens committed after each request's first, by the time the loop worked."""
        return self.emitted / self.seconds if self.seconds else None

"""One request: its tokens, its length in the cache, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .logits import LogitRow
from .sampling import Sampler
from .scores import log_probability, top_log_probability
from .stats import Stats
from .text import TextStream

__all__ = ["Request", "common_prefix"]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens ``a`` and ``b`` begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(slots=True)
class Request:
    """State of a generation. Tokens in ``tokens`` are committed: they never change."""

    tokens: list[int]  # prompt and output
    limit: int  # most tokens in `tokens`: prompt plus max_new_tokens, or the context
    sampler: Sampler
    stream: TextStream
    eos_ids: frozenset[int]
    prompt_tokens: int = field(init=False)
    kv_length: int = 0  # valid entries in the target's cache
    scores: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stats: Stats = field(default_factory=Stats)
    cancelled: bool = False  # set by any thread, and by signal handlers
    _scratch: np.ndarray | None = field(init=False, default=None)  # made when it is needed: many requests only wait

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self.stats.prompt_tokens = self.prompt_tokens

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.limit - len(self.tokens)

    def decide(self, logits: LogitRow) -> int:
        """Return the next token by the target's ``logits`` and commit it with its score."""
        token = self.sampler.choose(logits, len(self.tokens))
        score = self._score(logits, token)
        self.tokens.append(token)
        self.scores.append(score)
        self.sampler.observe(token)
        return token

    def _score(self, logits: LogitRow, token: int) -> float:
        """Return the log-probability of ``token``; a device that sums up its rows decides it with and without them."""
        vocab = self.sampler.vocab_size
        if (top := logits.top) is not None:
            return top_log_probability(logits, top, token, vocab)
        if self._scratch is None:
            self._scratch = np.empty(vocab, np.float32)
        return log_probability(logits.whole[:vocab], token, self._scratch)

    def advance_text(self) -> str:
        """Take the last committed token into the text, end the request if it is the last, return the new text."""
        token = self.tokens[-1]
        if token in self.eos_ids:
            self.finish_reason = "stop"
            return ""
        piece = self.stream.push(token)
        if self.stream.stopped:
            self.finish_reason = "stop"
        elif self.remaining <= 0:
            self.finish_reason = "length"
        return piece

"""Position-keyed sampling: a token is a pure function of its logits, the seed and its position.

With temperature 0 the most likely token is taken, the lowest id on a tie. Otherwise the Gumbel-max trick draws from
the softmax: ``argmax(logit / temperature + g)`` with ``g = -log(-log(u))``, and u from a counter-based hash of
(seed, position, token id), so that draft and verifier see the same noise and no state is carried between windows.
Filters come first, in the order penalties, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import EngineError, ParameterError
from .noise import gumbel, noise_bits

if TYPE_CHECKING:
    from .logits import LogitRow, TopRow

__all__ = ["Sampler", "SamplingParams"]

Row = npt.NDArray[np.float32]

# With u in [0.5, 2**32 - 0.5] / 2**32 the noise is bounded; tokens far enough below the leader cannot win.
_NEAR = 6.0  # within this many nats of the leader, noise is always computed
_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Every field has a value that turns it off."""

    temperature: float = 0.0  # 0: the most likely token
    top_k: int = 0  # keep the k most likely tokens; 0, or at least the vocabulary: off
    top_p: float = 1.0  # keep the most likely tokens that together reach this probability; 1: off
    min_p: float = 0.0  # drop tokens less likely than this share of the most likely one; 0: off
    repetition_penalty: float = 1.0  # divide positive, multiply negative logits of tokens seen so far (CTRL); 1: off
    frequency_penalty: float = 0.0  # subtract for every time a token was generated; 0: off
    presence_penalty: float = 0.0  # subtract once if a token was generated; 0: off

    def __post_init__(self) -> None:
        """Check every range.

        Raises:
            ParameterError: names the parameter, its value and the range.
        """

        def check(name: str, holds: bool, allowed: str) -> None:
            if not holds:
                raise ParameterError(f"{name}={getattr(self, name)!r}: {allowed}")

        for name in self.__slots__:
            value: Any = getattr(self, name)
            check(name, _is_finite(value), "a finite number is needed")
            # One type for equal values: numpy computes in another precision beside its own scalars.
            object.__setattr__(self, name, int(value) if value == int(value) and name == "top_k" else float(value))
        check("temperature", self.temperature >= 0, "0 (greedy) or more")
        check("top_k", isinstance(self.top_k, int) and self.top_k >= 0, "a whole number, 0 (off) or more")
        check("top_p", 0 < self.top_p <= 1, "over 0, up to 1 (off); for the most likely token use temperature=0")
        check("min_p", 0 <= self.min_p <= 1, "0 (off) to 1")
        check("repetition_penalty", 1e-3 <= self.repetition_penalty <= 1e3, "0.001 to 1000; 1 is off")
        check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2 to 2; 0 is off")
        check("presence_penalty", -2 <= self.presence_penalty <= 2, "-2 to 2; 0 is off")

    @property
    def filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


def _is_finite(value: object) -> bool:
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


class Sampler:
    """Chooses the tokens of one request, for its draft and its verifier alike.

    Args:
        params: the request's parameters.
        seed: 0 to 2**64 - 1.
        vocab_size: ids the tokenizer knows; columns beyond it are padding and never chosen.
        prompt: the prompt's ids, seen by the repetition penalty.
    """

    def __init__(self, params: SamplingParams, seed: int, vocab_size: int, prompt: list[int]) -> None:
        self.params = params
        self.seed = seed
        self.vocab_size = vocab_size
        self._ids = _all_ids(vocab_size)
        self._penalised = params.penalised
        # Tokens that can be chosen, if so many of the most likely ones decide alone; 0 where they do not.
        self._most = 0 if self._penalised else 1 if params.temperature == 0 else params.top_k
        if self._penalised:
            self._prompt = np.zeros(vocab_size, bool)
            self._prompt[prompt] = True
            self._generated = np.zeros(vocab_size, np.int32)

    def observe(self, token: int) -> None:
        """Count a token that now precedes the next position."""
        if self._penalised:
            self._generated[token] += 1

    def forget(self, token: int) -> None:
        """Undo :meth:`observe` for a token that was only a candidate."""
        if self._penalised:
            self._generated[token] -= 1

    def pick(self, logits: Row, position: int) -> int:
        """Return the token at ``position`` of the sequence.

        Args:
            logits: float32 ``[V]``, the padded tail included.

        Raises:
            EngineError: the logits are not numbers.
        """
        row = logits[: self.vocab_size]
        if self._penalised:
            row = self._penalise(row)
        leader = int(row.argmax())
        top = float(row[leader])
        if not math.isfinite(top):
            raise EngineError(f"the logits at position {position} are not finite (largest: {top})")
        if self.params.temperature == 0:
            return leader
        if not self.params.filtered:
            return self._pick_any(row, top, position)
        return self._draw(self._scaled(row, top), self._ids, position)

    def choose(self, logits: LogitRow, position: int) -> int:
        """Return the token at ``position``, from the row's largest logits alone where they decide it.

        Raises:
            EngineError: the logits are not numbers.
        """
        if self._most > 0 and (top := logits.top) is not None and len(top.values) > self._most:
            token = self._pick_top(top, position)
            if token is not None:
                return token
        return self.pick(logits.whole, position)

    def _pick_top(self, top: TopRow, position: int) -> int | None:
        """Return what :meth:`pick` would choose from the whole row, None if the largest logits cannot tell.

        Values above the least one are all here, with every tie of theirs; of the least one, ties may be missing.
        """
        least = top.values.min()
        # A NaN or infinity anywhere in the row reaches its sum, and nothing else here need show it.
        if not math.isfinite(top.log_sum) or not math.isfinite(least):
            return None
        known = np.flatnonzero(top.ids < self.vocab_size)
        known = known[np.argsort(top.ids[known])]  # ascending ids: the lower one wins a tie
        ids, row = top.ids[known].astype(np.uint32), top.values[known]
        leader = row.max(initial=least)
        if leader == least:
            return None
        if self.params.temperature == 0:
            return int(ids[row.argmax()])
        scaled = self._scaled(np.append(row, least), float(leader))
        if np.count_nonzero(scaled > scaled[-1]) < self._most:
            return None
        return self._draw(scaled[:-1], ids, position)

    def _scaled(self, row: Row, top: float) -> npt.NDArray[np.float64]:
        with np.errstate(over="ignore"):  # a tiny temperature leaves the leader alone
            return (row.astype(np.float64) - top) / self.params.temperature

    def _draw(self, scaled: npt.NDArray[np.float64], ids: npt.NDArray[np.uint32], position: int) -> int:
        """Filter, then Gumbel-max; ``ids`` are those of ``scaled``, ascending."""
        kept = self._filter(scaled)
        noise = gumbel(self.seed, position, ids[kept])
        return int(ids[kept[int((scaled[kept] + noise).argmax())]])

    def _penalise(self, row: Row) -> Row:
        p = self.params
        row = row.copy()
        if p.repetition_penalty != 1.0:
            seen = np.flatnonzero(self._prompt | (self._generated > 0))
            values = row[seen]
            row[seen] = np.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        generated = np.flatnonzero(self._generated)
        row[generated] -= p.frequency_penalty * self._generated[generated] + p.presence_penalty
        return row

    def _filter(self, scaled: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return the ids that the filters keep, in ascending order."""
        p = self.params
        kept: npt.NDArray[np.int64] | None = None
        if 0 < p.top_k < len(scaled):
            kept = _most_likely(scaled, int(p.top_k))
        if p.top_p < 1:
            kept = _nucleus(scaled, kept, p.top_p)
        if p.min_p > 0:
            enough = scaled >= math.log(p.min_p)
            kept = np.flatnonzero(enough) if kept is None else kept[enough[kept]]
        return np.arange(len(scaled)) if kept is None else kept  # top_k over the vocabulary keeps all

    def _pick_any(self, row: Row, top: float, position: int) -> int:
        """Gumbel-max over the whole vocabulary, with noise only for tokens that can still win."""
        # Logits lie on float32's grid: what is under the rounded limit is under the true one, or on it.
        limit = np.float32(max(top - _NEAR * self.params.temperature, _LOWEST))
        near = np.flatnonzero(row >= limit)
        winner, score = self._best(row, top, position, near)
        # A token below needs noise above score + _NEAR, that is u > exp(-exp(-(score + _NEAR))): few have that.
        threshold = math.exp(-math.exp(-(score + _NEAR))) * 2.0**32 - 2.0
        bits = noise_bits(self.seed, position, self._ids)
        far = np.flatnonzero(bits > np.uint32(min(max(threshold, 0.0), 2.0**32 - 1)))
        if len(far):
            other, other_score = self._best(row, top, position, far)
            if other_score > score or (other_score == score and other < winner):
                return other
        return winner

    def _best(self, row: Row, top: float, position: int, ids: npt.NDArray[np.int64]) -> tuple[int, float]:
        """Return the winner among ``ids``, ascending, and its score."""
        with np.errstate(over="ignore"):  # a tiny temperature leaves the leader alone
            scaled = (row[ids].astype(np.float64) - top) / self.params.temperature
        scores = scaled + gumbel(self.seed, position, ids.astype(np.uint32))
        best = int(scores.argmax())
        return int(ids[best]), float(scores[best])


@lru_cache(maxsize=4)
def _all_ids(vocab_size: int) -> npt.NDArray[np.uint32]:
    return np.arange(vocab_size, dtype=np.uint32)


def _most_likely(scaled: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Ids of the ``count`` largest values, ascending; the lower ids win a tie at the edge."""
    edge = np.partition(scaled, len(scaled) - count)[len(scaled) - count]
    above = np.flatnonzero(scaled > edge)
    ties = np.flatnonzero(scaled == edge)[: count - len(above)]
    return np.sort(np.concatenate([above, ties]))


def _nucleus(scaled: npt.NDArray[np.float64], kept: npt.NDArray[np.int64] | None, mass: float) -> npt.NDArray[np.int64]:
    """Ids of the smallest set of most likely tokens whose probabilities reach ``mass``."""
    ids = np.arange(len(scaled)) if kept is None else kept
    values = scaled if kept is None else scaled[kept]
    with np.errstate(over="ignore"):  # a tiny temperature leaves the leader alone
        total = float(np.exp(values.astype(np.float32)).sum(dtype=np.float64))
    # Tokens near the leader are nearly always enough: the tail of a vocabulary weighs next to nothing.
    for limit in (-10.0, -math.inf):
        near = np.flatnonzero(values >= limit)
        order = near[np.argsort(-values[near], kind="stable")]
        reached = np.cumsum(np.exp(values[order])) >= mass * total
        if reached.any():
            return ids[np.sort(order[: int(reached.argmax()) + 1])]
    return ids

"""Scores: the log-probability of a chosen token, before any filter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .errors import EngineError
from .logits import LogitRow, TopRow

__all__ = ["log_probability", "top_log_probability"]

Row = npt.NDArray[np.float32]


def log_probability(logits: Row, token: int, scratch: Row) -> float:
    """Return the float32 log-probability of ``token`` before any filter.

    Args:
        logits: float32 ``[V]`` without the padded tail.
        scratch: float32 ``[V]``; computing there makes the result independent of where ``logits`` lies.

    Raises:
        EngineError: the logits are not numbers.
    """
    top = logits.max()
    np.subtract(logits, top, out=scratch)
    np.exp(scratch, out=scratch)
    return _finite(np.float32(logits[token] - top - np.log(scratch.sum())), token)


def top_log_probability(logits: LogitRow, top: TopRow, token: int, vocab_size: int) -> float:
    """Return the float32 log-probability of ``token`` before any filter, by the device's sum over the row.

    Raises:
        EngineError: the logits are not numbers.
    """
    known = top.values[top.ids < vocab_size]
    largest = known.max() if len(known) else logits.whole[:vocab_size].max()
    places = np.flatnonzero(top.ids == token)
    value = top.values[places[0]] if len(places) else logits.whole[token]
    return _finite(np.float32(value - largest - top.log_sum), token)


def _finite(score: np.float32, token: int) -> float:
    if not np.isfinite(score):
        raise EngineError(f"the log-probability of token {token} is {score}: the logits are not finite")
    return float(score)

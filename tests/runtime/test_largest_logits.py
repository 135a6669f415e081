"""Tokens and scores from a row's largest logits are those of the whole row, ties included."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvrelay.errors import EngineError
from kvrelay.logits import LogitRow, Top, rows_of
from kvrelay.request import Request
from kvrelay.sampling import Sampler, SamplingParams
from kvrelay.text import TextStream

VOCAB = 48
PADDED = 56  # the padded ids shout
COUNT = 8


@dataclass
class Device:
    """A pass whose logits lie elsewhere: it tells how often whole rows were fetched."""

    rows: np.ndarray  # [B, R, V]
    found: Top | None
    fetched: int = field(default=0)
    logit_rows: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.logit_rows = np.zeros(self.rows.shape[:2], np.int64)

    @property
    def logits(self) -> np.ndarray:
        self.fetched += 1
        return self.rows

    def top(self) -> Top | None:
        return self.found


def device_of(row: np.ndarray, order: np.random.Generator, *, padded: bool = False) -> Device:
    """What a GPU would find: which of equal values it takes, and in which order it lists them, is its own choice."""
    known = row if padded else row[:VOCAB]
    shuffled = order.permutation(len(known))
    ids = shuffled[np.argsort(-known[shuffled], kind="stable")][:COUNT]
    ids = order.permutation(ids)
    real = row[:VOCAB]
    with np.errstate(invalid="ignore"):
        log_sum = np.log(np.exp(real - real.max()).sum())
    top = Top(row[ids][None, None], ids[None, None].astype(np.int32), np.array([[log_sum]], np.float32))
    return Device(np.broadcast_to(row, (1, 1, len(row))), top)


def host_of(row: np.ndarray) -> Device:
    return Device(row[None, None], None)


# Equal values in groups, so that ties are everywhere: at the top, at the edge of top-k and of what the GPU found.
tied = st.tuples(st.integers(1, 9), st.permutations(range(PADDED))).map(lambda x: [i // x[0] / 2 for i in x[1]])
free = st.lists(st.floats(-30, 30, width=32), min_size=PADDED, max_size=PADDED)
sampled = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-6, 0.3, 1.0, 3.0]),
        "top_k": st.integers(1, COUNT + 2),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5]),
    }
)
greedy = st.just({"temperature": 0.0})


@settings(max_examples=200)
@given(tied | free, sampled | greedy, st.integers(0, 2**32 - 1), st.booleans())
def test_a_token_is_that_of_the_whole_row(values: list[float], options: Any, seed: int, padded: bool) -> None:
    row = np.array(values, np.float32)
    row[VOCAB:] += 4
    sampler = Sampler(SamplingParams(**options), seed, VOCAB, [])
    bound = device_of(row, np.random.default_rng(seed), padded=padded)
    assert sampler.choose(LogitRow(bound, 0, 0), seed % 1000) == sampler.pick(row, seed % 1000)  # type: ignore[arg-type]


@given(free, st.integers(0, 2**32 - 1))
def test_without_ties_whole_rows_stay_where_they_are(values: list[float], seed: int) -> None:
    row = np.array(values, np.float32) + np.arange(PADDED, dtype=np.float32) * 100
    row[VOCAB:] = 0
    for options in ({}, {"temperature": 1.0, "top_k": COUNT - 1}):
        bound = device_of(row, np.random.default_rng(seed))
        Sampler(SamplingParams(**options), seed, VOCAB, []).choose(LogitRow(bound, 0, 0), 5)  # type: ignore[arg-type]
        assert bound.fetched == 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "top_k": COUNT},
        {"frequency_penalty": 0.5},
        {"temperature": 1.0, "top_k": 2, "repetition_penalty": 1.1},
    ],
)
def test_what_the_largest_logits_cannot_decide_is_decided_by_whole_rows(options: Any) -> None:
    row = np.arange(PADDED, dtype=np.float32)
    bound = device_of(row, np.random.default_rng(0))
    sampler = Sampler(SamplingParams(**options), 3, VOCAB, [])
    assert sampler.choose(LogitRow(bound, 0, 0), 5) == sampler.pick(row, 5)  # type: ignore[arg-type]
    assert bound.fetched == 1


@pytest.mark.parametrize("ties", [1, COUNT - 1, COUNT, COUNT + 1, VOCAB])
def test_the_lowest_of_tied_leaders_wins_however_many_there_are(ties: int) -> None:
    for seed in range(20):
        order = np.random.default_rng(seed)
        row = order.random(PADDED).astype(np.float32)
        leaders = order.choice(VOCAB, ties, replace=False)
        row[leaders] = 7
        bound = device_of(row, order)
        assert Sampler(SamplingParams(), 0, VOCAB, []).choose(LogitRow(bound, 0, 0), 1) == leaders.min()  # type: ignore[arg-type]
        assert bound.fetched == (ties >= COUNT)


@pytest.mark.parametrize("top_k", range(1, COUNT))
def test_ties_at_the_edge_of_top_k_go_to_the_lower_ids_of_the_whole_row(top_k: int) -> None:
    decided = 0
    for seed in range(300):
        order = np.random.default_rng(seed)
        group = seed % 9 + 1
        row = (order.permutation(PADDED) // group * 0.01).astype(np.float32)  # all but equally likely
        row[VOCAB:] = -1
        bound = device_of(row, order)
        sampler = Sampler(SamplingParams(temperature=5.0, top_k=top_k), seed, VOCAB, [])
        assert sampler.choose(LogitRow(bound, 0, 0), seed) == sampler.pick(row, seed)  # type: ignore[arg-type]
        decided += not bound.fetched
    assert 0 < decided < 300


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 20, VOCAB - 1])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 3}])
def test_a_row_that_is_not_numbers_is_an_error_wherever_the_whole_row_is_one(
    bad: float, where: int, options: Any
) -> None:
    row = np.arange(PADDED, dtype=np.float32)
    row[where] = bad
    bound = device_of(row, np.random.default_rng(0))
    sampler = Sampler(SamplingParams(**options), 3, VOCAB, [])
    if bad < 0:  # a token that cannot be chosen
        assert sampler.choose(LogitRow(bound, 0, 0), 5) == sampler.pick(row, 5)  # type: ignore[arg-type]
        return
    with pytest.raises(EngineError, match="the logits at position 5 are not finite"):
        sampler.choose(LogitRow(bound, 0, 0), 5)  # type: ignore[arg-type]


@given(tied | free, sampled | greedy | st.just({"temperature": 1.0}), st.integers(0, 2**32 - 1), st.booleans())
def test_a_score_is_that_of_the_whole_row(values: list[float], options: Any, seed: int, padded: bool) -> None:
    row = np.array(values, np.float32)
    row[VOCAB:] += 4
    found = []
    for bound in (device_of(row, np.random.default_rng(seed), padded=padded), host_of(row)):
        sampler = Sampler(SamplingParams(**options), seed, VOCAB, [5])
        request = Request([5], 9, sampler, TextStream(str), frozenset())
        token = request.decide(rows_of(bound)[0][0])  # type: ignore[arg-type]
        found.append((token, request.scores))
    assert found[0] == found[1]

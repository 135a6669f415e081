"""The sampler: Gumbel-max over the filtered softmax, a pure function of logits, seed and position."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kvrelay import EngineError
from kvrelay.noise import gumbel
from kvrelay.sampling import Sampler, SamplingParams
from kvrelay.scores import log_probability

DRAWS = 20_000
# Upper 1e-4 quantiles of the chi-square distribution, by degrees of freedom.
CHI_SQUARE = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74, 6: 27.86, 7: 29.88}
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -3.0], np.float32)

seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**31)
rows = st.integers(1, 400).flatmap(
    lambda size: hnp.arrays(np.float32, size, elements=st.floats(-60, 60, width=32, allow_nan=False))
)


def naive(row: np.ndarray, seed: int, position: int, temperature: float) -> int:
    """Gumbel-max over all tokens."""
    scaled = (row.astype(np.float64) - float(row.max())) / temperature
    return int((scaled + gumbel(seed, position, np.arange(len(row), dtype=np.uint32))).argmax())


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


def counts(row: np.ndarray, size: int, **params: Any) -> np.ndarray:
    sampler = Sampler(SamplingParams(**params), 12345, size, [])
    return np.bincount([sampler.pick(row, position) for position in range(DRAWS)], minlength=size)


def chi_square(found: np.ndarray, wanted: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom; what has no probability must not be drawn."""
    possible = wanted > 0
    assert not found[~possible].any()
    expected = wanted[possible] * DRAWS
    return float(((found[possible] - expected) ** 2 / expected).sum()), int(possible.sum()) - 1


@settings(max_examples=300)
@given(rows, seeds, positions, st.floats(0.05, 20))
def test_noise_for_likely_tokens_alone_chooses_as_noise_for_all(
    row: np.ndarray, seed: int, position: int, temperature: float
) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature), seed, len(row), [])
    assert sampler.pick(row, position) == naive(row, seed, position, temperature)


@settings(max_examples=30)
@given(seeds, st.floats(0.3, 3))
def test_a_large_flat_vocabulary_is_drawn_from_everywhere(seed: int, temperature: float) -> None:
    row = np.random.default_rng(seed).normal(0, 3, 50_000).astype(np.float32)
    sampler = Sampler(SamplingParams(temperature=temperature), seed, len(row), [])
    for position in range(5):
        assert sampler.pick(row, position) == naive(row, seed, position, temperature)


@settings(max_examples=300)
@given(rows, seeds, positions, st.integers(1, 450), st.floats(0.01, 1), st.floats(0, 1))
def test_filters_keep_the_most_likely_tokens_they_promise(
    row: np.ndarray, seed: int, position: int, top_k: int, top_p: float, min_p: float
) -> None:
    # Behind the largest, as the sampler sees them: what differs by less than a rounding there is a tie.
    order = np.argsort(row.max() - row.astype(np.float64), kind="stable")
    allowed = set(order[:top_k].tolist())
    kept = order[:top_k]
    mass = np.cumsum(softmax(row[kept]))
    # Both sides of a rounding error at the edge of the nucleus are right.
    allowed &= set(kept[: int((mass < top_p + 1e-9).sum()) + 1].tolist())
    allowed &= set(np.flatnonzero(row.astype(np.float64) >= row.max() + math.log(max(min_p, 1e-300)) - 1e-9).tolist())
    sampler = Sampler(SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p), seed, len(row), [])
    for offset in range(4):
        assert sampler.pick(row, position + offset) in allowed


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 2.5},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.3},
    ],
    ids=str,
)
def test_tokens_are_distributed_as_the_filtered_softmax(params: dict[str, Any]) -> None:
    wanted = softmax(LOGITS / params["temperature"])
    order = np.argsort(-wanted, kind="stable")
    if "top_k" in params:
        wanted[order[params["top_k"] :]] = 0
    if "top_p" in params:
        reached = np.cumsum(wanted[order] / wanted.sum()) >= params["top_p"]
        wanted[order[int(reached.argmax()) + 1 :]] = 0
    if "min_p" in params:
        wanted[wanted < params["min_p"] * wanted.max()] = 0
    statistic, freedom = chi_square(counts(LOGITS, 8, **params), wanted / wanted.sum())
    assert statistic < CHI_SQUARE[freedom]


@pytest.mark.parametrize("draft_logits", [LOGITS, -LOGITS, np.roll(LOGITS, 3), np.eye(8, dtype=np.float32)[7] * 50])
def test_what_is_committed_has_the_targets_distribution_whatever_the_draft_is(draft_logits: np.ndarray) -> None:
    """Acceptance by equality, played through for single tokens: the draft draws with the same noise."""
    target = Sampler(SamplingParams(temperature=1.0), 99, 8, [])
    draft = Sampler(SamplingParams(temperature=1.0), 99, 8, [])
    committed, accepted = [], 0
    for position in range(DRAWS):
        proposal, token = draft.pick(draft_logits, position), target.pick(LOGITS, position)
        accepted += proposal == token
        committed.append(token)
    statistic, freedom = chi_square(np.bincount(committed, minlength=8), softmax(LOGITS))
    assert statistic < CHI_SQUARE[freedom]
    distance = 0.5 * np.abs(softmax(LOGITS) - softmax(draft_logits)).sum()
    # At least (1 - TV) / (1 + TV), arXiv 2408.07978; four standard deviations of room.
    assert accepted / DRAWS >= (1 - distance) / (1 + distance) - 4 * math.sqrt(0.25 / DRAWS)
    assert distance > 0 or accepted == DRAWS


def test_positions_draw_independently() -> None:
    """Pairs of neighbouring positions are as frequent as the product of their probabilities says."""
    row = np.zeros(2, np.float32)
    sampler = Sampler(SamplingParams(temperature=1.0), 5, 2, [])
    draws = [sampler.pick(row, position) for position in range(DRAWS + 1)]
    pairs = np.bincount([2 * a + b for a, b in itertools.pairwise(draws)], minlength=4)
    statistic, freedom = chi_square(pairs, np.full(4, 0.25))
    assert statistic < CHI_SQUARE[freedom]


@given(seeds, positions)
def test_noise_is_finite_bounded_and_pure(seed: int, position: int) -> None:
    ids = np.arange(1000, dtype=np.uint32)
    noise = gumbel(seed, position, ids)
    assert np.isfinite(noise).all()
    assert noise.min() > -3.2 and noise.max() < 23
    assert np.array_equal(noise[100:200], gumbel(seed, position, ids[100:200]))
    assert not np.array_equal(noise, gumbel(seed, position + 1, ids))
    assert not np.array_equal(noise, gumbel((seed + 1) % 2**64, position, ids))


def test_the_lowest_id_wins_a_tie() -> None:
    row = np.array([1, 3, 3, 3, 0], np.float32)
    assert Sampler(SamplingParams(), 0, 5, []).pick(row, 0) == 1
    for k, allowed in ((1, {1}), (2, {1, 2})):
        sampler = Sampler(SamplingParams(temperature=1.0, top_k=k), 0, 5, [])
        assert {sampler.pick(row, position) for position in range(200)} == allowed


def test_padded_columns_are_never_chosen() -> None:
    row = np.concatenate([LOGITS, np.full(8, 1e30, np.float32)])
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 16}, {"temperature": 2.0, "top_p": 0.999}):
        sampler = Sampler(SamplingParams(**params), 1, 8, [])
        assert max(sampler.pick(row, position) for position in range(300)) < 8


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_an_error_and_never_token_0(temperature: float, bad: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature), 0, 8, [])
    with pytest.raises(EngineError, match="position 17 are not finite"):
        sampler.pick(np.full(8, bad, np.float32), 17)
    one_bad = LOGITS.copy()
    one_bad[3] = bad
    if bad != -math.inf:
        with pytest.raises(EngineError):
            sampler.pick(one_bad, 17)


def test_a_tiny_temperature_is_greedy_without_overflow() -> None:
    for temperature in (1e-6, 1e-40, 1e-300):
        for filters in ({}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}):
            with np.errstate(all="raise", under="ignore"):
                params = SamplingParams(temperature=temperature, **filters)
                assert Sampler(params, 3, 8, []).pick(LOGITS, 4) == 0


@given(rows)
def test_scores_are_log_probabilities(row: np.ndarray) -> None:
    scratch = np.empty(len(row), np.float32)
    for token in {0, len(row) - 1, int(row.argmax())}:
        assert math.isclose(
            log_probability(row, token, scratch), math.log(max(softmax(row)[token], 1e-300)), rel_tol=1e-4, abs_tol=1e-4
        )


def test_penalties_see_the_prompt_once_and_the_output_as_often_as_it_came() -> None:
    row = np.array([2.0, -2.0, 1.0, 1.0], np.float32)
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), 0, 4, [0, 0, 1])
    assert sampler._penalise(row).tolist() == [1.0, -4.0, 1.0, 1.0]
    sampler = Sampler(SamplingParams(frequency_penalty=0.5, presence_penalty=0.25), 0, 4, [0, 0, 1])
    assert sampler._penalise(row).tolist() == row.tolist()
    for token in (2, 2, 3):
        sampler.observe(token)
    assert sampler._penalise(row).tolist() == [2.0, -2.0, -0.25, 0.25]
    for token in (2, 3):
        sampler.forget(token)
    assert sampler._penalise(row).tolist() == [2.0, -2.0, 0.25, 1.0]

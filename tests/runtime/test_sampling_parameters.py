"""Sampling parameters reach every token, and are refused where they make no sense."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvrelay import ParameterError, Pipeline, SamplingParams
from rig import PROMPT, assert_same, oracle, plain, scripted

REPEATED = [40, 41, 42, 43] * 6
HOT = {"temperature": 1.5, "max_new_tokens": 64, "ignore_eos": True}


def test_a_seed_fixes_the_text_whatever_global_generators_do(llama_bundle: Path) -> None:
    pipe = Pipeline(llama_bundle, draft="cousin", window=4)
    results = []
    for run in range(5):
        random.seed(run)
        np.random.seed(run)
        random.random(), np.random.random(run + 1)
        results.append(pipe.generate(PROMPT, seed=42, **HOT))
    for result in results[1:]:
        assert_same(result, results[0])
    assert pipe.generate(PROMPT, seed=43, **HOT).token_ids != results[0].token_ids
    assert_same(plain(llama_bundle).generate(PROMPT, seed=42, **HOT), results[0])


def test_a_seed_that_was_drawn_is_recorded_and_gives_the_text_again(llama_bundle: Path) -> None:
    pipe = Pipeline(llama_bundle, draft="self", window=8)
    first, second = pipe.generate(PROMPT, **HOT), pipe.generate(PROMPT, **HOT)
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    assert_same(pipe.generate(PROMPT, seed=first.seed, **HOT), first)


@pytest.mark.parametrize(
    "penalty",
    [
        {"frequency_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7, "temperature": 1.0, "seed": 4},
        {"frequency_penalty": 0.8, "presence_penalty": -1.0, "repetition_penalty": 1.1, "temperature": 0.8, "seed": 5},
    ],
    ids=str,
)
def test_a_penalty_changes_the_text_alike_with_and_without_drafts(llama_bundle: Path, penalty: dict[str, Any]) -> None:
    reference = plain(llama_bundle)
    base = {k: v for k, v in penalty.items() if not k.endswith("penalty")}
    wanted = reference.generate(REPEATED, max_new_tokens=64, ignore_eos=True, **penalty)
    assert wanted.token_ids != reference.generate(REPEATED, max_new_tokens=64, ignore_eos=True, **base).token_ids
    for window in (2, 8):
        pipe = scripted(llama_bundle, oracle([*REPEATED, *wanted.token_ids]), window)
        found = pipe.generate(REPEATED, max_new_tokens=64, ignore_eos=True, **penalty)
        assert_same(found, wanted)
        assert found.stats.acceptance == 1.0
    for draft in ("ngram", "skip", "cousin"):
        pipe = Pipeline(llama_bundle, draft=draft, window=8)
        assert_same(pipe.generate(REPEATED, max_new_tokens=64, ignore_eos=True, **penalty), wanted)


def test_a_draft_sees_the_penalties_that_the_verifier_sees(llama_bundle: Path) -> None:
    """The target drafts for itself: only a draft that counts its own candidates is always right."""
    pipe = Pipeline(llama_bundle, draft="self", window=16)
    stats = pipe.generate(
        REPEATED, max_new_tokens=150, ignore_eos=True, frequency_penalty=1.5, repetition_penalty=1.4
    ).stats
    assert stats.acceptance is not None
    assert stats.acceptance > 0.97
    assert stats.windows > 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("temperature", 10**400),
        ("top_k", -(10**400)),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e300),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(llama_bundle: Path, name: str, value: Any) -> None:
    for draft in ("none", "self"):
        with pytest.raises(ParameterError, match=rf"^{name}="):
            Pipeline(llama_bundle, draft=draft).stream(PROMPT, **{name: value})
    with pytest.raises(ParameterError, match=rf"^{name}="):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["logit_bias", "top_a", "typical_p", "num_beams", "best_of", "n"])
def test_a_parameter_that_is_not_supported_is_refused_and_not_ignored(llama_bundle: Path, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        plain(llama_bundle).generate(PROMPT, **{name: 1})


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "7", True])
def test_a_seed_out_of_range_is_refused(llama_bundle: Path, seed: Any) -> None:
    with pytest.raises(ParameterError, match="seed="):
        plain(llama_bundle).stream(PROMPT, seed=seed)


@pytest.mark.parametrize("seed", [0, 2**64 - 1, np.int64(5)])
def test_every_seed_in_range_works(llama_bundle: Path, seed: Any) -> None:
    assert plain(llama_bundle).generate(PROMPT, seed=seed, temperature=1.0, max_new_tokens=3).seed == int(seed)


@pytest.mark.parametrize("stop", ["", ["ok", ""], [3], None, 5])
def test_a_stop_string_of_no_characters_is_refused(llama_bundle: Path, stop: Any) -> None:
    with pytest.raises(ParameterError, match="stop="):
        plain(llama_bundle).stream(PROMPT, stop=stop)


@pytest.mark.parametrize("name", ["ignore_eos", "trace", "callback"])
@pytest.mark.parametrize("value", ["no", 0])
def test_a_value_that_is_no_flag_and_no_function_is_refused(llama_bundle: Path, name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=rf"^{name}="):
        plain(llama_bundle).generate(PROMPT, **{name: value})


@pytest.mark.parametrize("exact", [None, "no", 0])
def test_exact_is_never_switched_off_by_accident(llama_bundle: Path, exact: Any) -> None:
    with pytest.raises(ParameterError, match=r"^exact="):
        Pipeline(llama_bundle, exact=exact)


def test_equal_numbers_of_other_types_mean_the_same() -> None:
    numbers = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.3}
    # numpy's scalars are not what the annotations say, and must be taken all the same.
    params = SamplingParams(**{n: np.float64(v) for n, v in numbers.items()}, top_k=np.int64(7))  # type: ignore[arg-type]
    assert params == SamplingParams(**numbers, top_k=7)
    assert {type(getattr(params, n)) for n in numbers} == {float}
    assert type(params.top_k) is int


@pytest.mark.filterwarnings("error")
def test_the_smallest_temperature_is_greedy_and_warns_of_nothing(llama_bundle: Path) -> None:
    pipe = plain(llama_bundle)
    assert_same(
        pipe.generate(PROMPT, max_new_tokens=9, temperature=1e-320, seed=1), pipe.generate(PROMPT, max_new_tokens=9)
    )


@pytest.mark.parametrize(
    ("off", "settings"),
    [
        ({}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}),
        ({}, {"temperature": 1.0, "top_k": 261}),
        ({}, {"temperature": 1.0, "top_k": 260}),
        ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}),
        ({"temperature": 0.0}, {"temperature": 1e-6}),
        ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 1e-9}),
        ({"temperature": 0.0}, {"temperature": 1.0, "min_p": 1.0}),
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_mean_what_is_documented(
    llama_bundle: Path, off: dict[str, Any], settings: dict[str, Any]
) -> None:
    wanted = plain(llama_bundle).generate(PROMPT, seed=8, max_new_tokens=40, **{"temperature": 1.0, **off})
    for draft in ("none", "cousin"):
        found = Pipeline(llama_bundle, draft=draft).generate(PROMPT, seed=8, max_new_tokens=40, **settings)
        assert_same(found, wanted)

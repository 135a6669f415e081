"""With exact, neither the draft nor the window changes a bit of the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvrelay import Pipeline, Result
from rig import PROMPT, SAMPLED, assert_same, plain

DRAFTS = ["none", "ngram", "self", "int4", "int8-dynamic", "skip", "cousin", "stranger"]
MODES: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLED, "warm": {"temperature": 0.7, "seed": 3}}


@pytest.fixture(scope="module")
def references(llama_bundle: Path) -> dict[tuple[str, str], Result]:
    found = {}
    for precision in ("fp32", "int4"):
        pipe = plain(llama_bundle, precision)
        for mode, settings in MODES.items():
            found[precision, mode] = pipe.generate(PROMPT, max_new_tokens=70, **settings)
    return found


@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("window", [2, 4, 8, 16])
@pytest.mark.parametrize("draft", DRAFTS)
def test_ids_and_scores_are_those_of_no_draft(
    llama_bundle: Path, references: dict[tuple[str, str], Result], draft: str, window: int, precision: str
) -> None:
    if draft == precision:
        pytest.skip("a target is offered as its own draft under the name self")
    pipe = Pipeline(llama_bundle, draft=draft, window=window, precision=precision)
    for mode, settings in MODES.items():
        found = pipe.generate(PROMPT, max_new_tokens=70, **settings)
        assert_same(found, references[precision, mode])


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_the_drafts_of_the_matrix_are_both_right_and_wrong(llama_bundle: Path, precision: str) -> None:
    for draft in {"ngram", "int4", "int8-dynamic", "skip", "cousin"} - {precision}:
        stats = (
            Pipeline(llama_bundle, draft=draft, window=4, precision=precision)
            .generate([*PROMPT] * 3, max_new_tokens=100, ignore_eos=True)
            .stats
        )
        assert 0 < stats.accepted < stats.evaluated, draft


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_draft_chosen_by_cost_changes_nothing(
    llama_bundle: Path, references: dict[tuple[str, str], Result], precision: str
) -> None:
    for draft in ("auto", "cousin", "ngram"):
        pipe = Pipeline(llama_bundle, draft=draft, precision=precision)
        for mode, settings in MODES.items():
            assert_same(pipe.generate(PROMPT, max_new_tokens=70, **settings), references[precision, mode])


def test_a_prompt_whose_kv_is_reused_gives_the_same_bits(llama_bundle: Path) -> None:
    pipe = Pipeline(llama_bundle, draft="cousin", window=8)
    first = pipe.generate(PROMPT, max_new_tokens=40)
    longer = [*PROMPT, *first.token_ids[:20], 7, 8, 9]
    again = pipe.generate(longer, max_new_tokens=40)
    assert again.stats.reused_tokens == len(PROMPT) + 20
    assert_same(again, plain(llama_bundle).generate(longer, max_new_tokens=40))
    assert_same(pipe.generate(PROMPT, max_new_tokens=40), first)


def test_without_exact_equal_runs_give_equal_text(llama_bundle: Path) -> None:
    results = []
    for _ in range(2):
        pipe = Pipeline(llama_bundle, draft="auto", exact=False)
        results += [pipe.generate(PROMPT, max_new_tokens=60, **SAMPLED) for _ in range(2)]
    for result in results[1:]:
        assert_same(result, results[0])
    assert results[0].stats.reused_tokens == 0, "prefill and plain steps are of two classes: no KV may be reused"


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("draft", DRAFTS[1:])
def test_many_prompts_and_seeds_give_the_output_of_no_draft(llama_bundle: Path, draft: str, precision: str) -> None:
    if draft == precision:
        pytest.skip("a target is offered as its own draft under the name self")
    reference = plain(llama_bundle, precision)
    for window in (2, 4, 8, 16):
        pipe = Pipeline(llama_bundle, draft=draft, window=window, precision=precision)
        for seed in range(12):
            prompt = [(seed * 31 + i * (seed + 3)) % 250 + 4 for i in range(1 + seed * 7)]
            for settings in ({}, {"temperature": 0.9, "seed": seed, "repetition_penalty": 1.2, "min_p": 0.02}):
                wanted = reference.generate(prompt, max_new_tokens=150, **settings)
                assert_same(pipe.generate(prompt, max_new_tokens=150, **settings), wanted)

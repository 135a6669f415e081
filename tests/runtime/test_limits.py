"""Token limit and context limit end a request at the same place with every draft."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from kvrelay import Engine, ParameterError, Pipeline, PromptError
from rig import PROMPT, Scripted, assert_same, oracle, plain, scripted, target_cache

CONTEXT = 256
REPEATED = [40, 41, 42, 43, 44, 45] * 5


@pytest.mark.parametrize("window", [4, 16])
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 10, 11, 15, 16, 17])
def test_a_lookup_never_runs_past_the_token_limit(llama_bundle: Path, window: int, limit: int) -> None:
    wanted = plain(llama_bundle).generate(REPEATED, max_new_tokens=40, ignore_eos=True)
    found = Pipeline(llama_bundle, draft="ngram", window=window).generate(
        REPEATED, max_new_tokens=limit, ignore_eos=True
    )
    assert found.token_ids == wanted.token_ids[:limit]
    assert found.scores == wanted.scores[:limit]
    assert found.finish_reason == "length"
    assert found.stats.emitted == limit


@pytest.mark.parametrize("limit", range(1, 8))
def test_an_accepted_window_never_runs_past_the_token_limit(llama_bundle: Path, limit: int) -> None:
    wanted = plain(llama_bundle).generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    pipe = scripted(llama_bundle, oracle([*PROMPT, *wanted.token_ids]), 4)
    found = pipe.generate(PROMPT, max_new_tokens=limit, ignore_eos=True)
    assert found.token_ids == wanted.token_ids[:limit]
    assert found.stats.proposed <= limit - 1


@pytest.mark.parametrize(
    "prompt", [list(range(60, 80)), [77], [77, 78, 79]], ids=["nothing repeats", "one token", "shorter than a match"]
)
def test_a_lookup_without_a_match_proposes_nothing(llama_bundle: Path, prompt: list[int]) -> None:
    pipe = Pipeline(llama_bundle, draft="ngram", window=8)
    events: list[dict[str, Any]] = []
    found = pipe.generate(prompt, max_new_tokens=3, trace=events.append)
    assert_same(found, plain(llama_bundle).generate(prompt, max_new_tokens=3))
    pairs = list(itertools.pairwise([*prompt, *found.token_ids[:-1]]))
    assert len(set(pairs)) == len(pairs), "the text itself must not repeat for this test to mean anything"
    assert found.stats.proposed == found.stats.windows == 0
    assert found.stats.acceptance is None
    assert [e["pass"] for e in events[1:]] == ["plain", "plain"]


@pytest.mark.parametrize("draft", ["none", "ngram", "self", "int4", "skip", "cousin"])
def test_the_context_ends_the_output_and_is_never_written_beyond(llama_bundle: Path, draft: str) -> None:
    window = 4
    pipe = Pipeline(llama_bundle, draft=draft, window=window)
    reference = plain(llama_bundle)
    for room in range(window + 2, 0, -1):
        prompt = [(7 * i) % 250 + 4 for i in range(CONTEXT - room)]
        wanted = reference.generate(prompt, max_new_tokens=100, ignore_eos=True)
        found = pipe.generate(prompt, max_new_tokens=100, ignore_eos=True)
        assert len(found.token_ids) == room
        assert found.finish_reason == "length"
        assert_same(found, wanted)


@pytest.mark.parametrize("window", [2, 16])
@pytest.mark.parametrize("accept", [0, 16])
def test_a_long_output_may_fill_the_context_to_its_last_token(llama_bundle: Path, window: int, accept: int) -> None:
    wanted = plain(llama_bundle).generate(PROMPT, max_new_tokens=10**9, ignore_eos=True)
    assert len(wanted.token_ids) == CONTEXT - len(PROMPT)
    drafter = Scripted([*PROMPT, *wanted.token_ids], itertools.repeat(accept))
    pipe = scripted(llama_bundle, drafter, window)
    events: list[dict[str, Any]] = []
    found = pipe.generate(PROMPT, max_new_tokens=10**9, ignore_eos=True, trace=events.append)
    assert_same(found, wanted)
    assert events[-1]["kv_length"]["after_rollback"] == CONTEXT - 1
    assert all(e["kv_length"]["written"] <= CONTEXT for e in events[1:])
    beyond = CONTEXT + 16  # a window of fixed width may leave junk behind the context, inside the capacity
    assert all(not tensor[0, :, beyond:].any() for tensor in target_cache(pipe).tensors.values())
    assert_same(pipe.generate(PROMPT, max_new_tokens=10**9, ignore_eos=True), wanted)


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 5000])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(llama_bundle: Path, length: int) -> None:
    pipe = Pipeline(llama_bundle, draft="cousin", window=4)
    with pytest.raises(PromptError, match=rf"{length} tokens.* context is {CONTEXT}") as error:
        pipe.stream([5] * length)
    assert "--context" in str(error.value)
    assert len(pipe.generate(PROMPT, max_new_tokens=5).token_ids) == 5


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "3", None])
def test_a_token_limit_that_is_no_count_is_refused(llama_bundle: Path, limit: Any) -> None:
    with pytest.raises(ParameterError, match="max_new_tokens"):
        plain(llama_bundle).stream(PROMPT, max_new_tokens=limit)


@pytest.mark.parametrize("window", [0, 1, 3, 17, -2, "4", 4.0])
def test_a_window_that_was_not_exported_is_refused_with_the_list(llama_bundle: Path, window: Any) -> None:
    with pytest.raises(ParameterError, match=r"\[2, 4, 8, 16\]"):
        Pipeline(llama_bundle, draft="ngram", window=window)


@pytest.mark.parametrize("draft", ["", "nothing", "fp32", "Ngram"])
def test_an_unknown_draft_is_refused_with_the_list(llama_bundle: Path, draft: str) -> None:
    with pytest.raises(ParameterError, match="none, ngram, self, int4"):
        Pipeline(llama_bundle, draft=draft)


def test_a_bundle_with_a_short_context_is_measured_and_run_inside_it(export_tiny: Any) -> None:
    bundle = export_tiny(context=20, verify=((1, 2), (1, 4)))
    pipe = Pipeline(bundle)
    result = pipe.generate(PROMPT, ignore_eos=True)
    assert (len(result.token_ids), result.finish_reason) == (20 - len(PROMPT), "length")
    with Engine(bundle, max_batch=2, window=4, group=1, draft="ngram") as engine:
        batched = engine.submit(PROMPT, deterministic=True, ignore_eos=True).result(60)
    assert_same(batched, result)

"""What is accepted: everything of a draft that equals the target, nothing of one that is always wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvrelay import Pipeline
from rig import PROMPT, SAMPLED, anti_oracle, assert_same, decode_entry, engine_drafter, plain, scripted, with_drafter

MODES = [pytest.param({}, id="greedy"), pytest.param(SAMPLED, id="sampled")]


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize("own_cache", [False, True])
@pytest.mark.parametrize("window", [2, 4, 8, 16])
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_draft_that_equals_the_target_is_accepted_in_every_window(
    llama_bundle: Path, precision: str, window: int, own_cache: bool, settings: dict[str, Any]
) -> None:
    pipe = Pipeline(llama_bundle, draft="self", window=window, precision=precision)
    with_drafter(pipe, engine_drafter(pipe, decode_entry(pipe), own_cache=own_cache))
    events: list[dict[str, Any]] = []
    result = pipe.generate(PROMPT, max_new_tokens=200, ignore_eos=True, trace=events.append, **settings)
    windows = [e for e in events if e["pass"] == "verify"]
    assert len(result.token_ids) == 200
    assert all(e["accepted"] == e["drafted"] for e in windows)
    assert {len(e["drafted"]) for e in windows[:-1]} == {window - 1}
    assert result.stats.acceptance == 1.0
    assert_same(
        result, plain(llama_bundle, precision).generate(PROMPT, max_new_tokens=200, ignore_eos=True, **settings)
    )


def test_a_draft_with_its_own_cache_feeds_its_last_candidate_and_no_token_twice(llama_bundle: Path) -> None:
    pipe = Pipeline(llama_bundle, draft="self", window=4)
    drafter = engine_drafter(pipe, decode_entry(pipe), own_cache=True)
    with_drafter(pipe, drafter)
    result = pipe.generate(PROMPT, max_new_tokens=101, ignore_eos=True)
    windows = result.stats.windows
    assert windows == 25
    # The prompt's 6 tokens are caught up with as 4 + 2; later one token, the last candidate, before each window.
    assert drafter._passes[4].runs == 1
    assert drafter._passes[2].runs == 1 + (windows - 1) + result.stats.proposed
    assert result.stats.draft_runs == 1 + drafter._passes[2].runs


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize("window", [2, 4, 16])
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_draft_that_is_always_wrong_is_never_accepted_and_changes_nothing(
    llama_bundle: Path, precision: str, window: int, settings: dict[str, Any]
) -> None:
    wanted = plain(llama_bundle, precision).generate(PROMPT, max_new_tokens=64, ignore_eos=True, **settings)
    pipe = scripted(llama_bundle, anti_oracle([*PROMPT, *wanted.token_ids]), window, precision)
    found = pipe.generate(PROMPT, max_new_tokens=64, ignore_eos=True, **settings)
    assert found.stats.accepted == 0
    assert found.stats.rollbacks == found.stats.windows > 0
    assert_same(found, wanted)

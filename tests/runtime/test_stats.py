"""Counters obey their identities, and the trace tells the same story as the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvrelay import Pipeline
from rig import PROMPT, SAMPLED


@pytest.mark.parametrize("draft", ["none", "ngram", "self", "int4", "int8-dynamic", "skip", "cousin", "auto"])
@pytest.mark.parametrize("window", [None, 4, 16])
@pytest.mark.parametrize("settings", [{}, SAMPLED, {"max_new_tokens": 1}, {"stop": ["a", "W", "\x05"]}], ids=str)
def test_counters_obey_their_identities(
    llama_bundle: Path, draft: str, window: int | None, settings: dict[str, Any]
) -> None:
    events: list[dict[str, Any]] = []
    pipe = Pipeline(llama_bundle, draft=draft, window=window)
    result = pipe.generate([*PROMPT, *PROMPT], trace=events.append, **{"max_new_tokens": 50, **settings})
    s = result.stats
    assert s.proposed >= s.evaluated >= s.accepted >= 0
    assert s.emitted == s.first + s.accepted + s.corrections + s.bonus
    assert s.emitted == len(result.token_ids) == len(result.scores)
    assert s.first == 1
    assert s.corrections == s.evaluated - s.accepted == s.rollbacks
    assert s.passes == s.windows + s.plain_passes == len(events) - 1
    assert s.recomputed == s.proposed - s.accepted
    assert s.prompt_tokens == 12
    assert s.acceptance == (s.accepted / s.evaluated if s.evaluated else None)
    assert s.kv_bytes > 0
    if draft == "none":
        assert (s.proposed, s.windows, s.draft_runs, s.acceptance) == (0, 0, 0, None)
        assert s.plain_passes == s.bonus == s.emitted - 1
    windows = events[1:]
    assert [t for e in events for t in e["committed"]] == result.token_ids
    assert sum(len(e["drafted"]) for e in windows) == s.proposed
    assert sum(len(e["accepted"]) for e in windows) == s.accepted
    for event in windows:
        kv = event["kv_length"]
        assert kv["before"] <= kv["after_rollback"] <= kv["written"]
        assert event["committed"][: len(event["accepted"])] == event["accepted"]
        assert len(event["committed"]) - len(event["accepted"]) == (event["ends_with"] != "match")
        assert kv["after_rollback"] - kv["before"] == len(event["committed"])


def test_a_request_of_one_token_has_no_rates(llama_bundle: Path) -> None:
    s = Pipeline(llama_bundle, draft="self", window=4).generate(PROMPT, max_new_tokens=1).stats
    assert (s.tokens_per_verify, s.tokens_per_second, s.time_per_token, s.speedup, s.acceptance) == (None,) * 5
    assert s.ttft > 0


def test_a_draft_that_does_not_pay_is_switched_off_and_the_reason_given(llama_bundle: Path) -> None:
    pipe = Pipeline(llama_bundle, draft="stranger")
    stats = pipe.generate(PROMPT, max_new_tokens=200, ignore_eos=True).stats
    assert stats.plain_passes > stats.windows
    assert "stranger: acceptance lately" in stats.policy

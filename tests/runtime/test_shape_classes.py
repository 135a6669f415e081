"""Exactness is tested on the box: engines that do not agree with themselves may not promise it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvrelay import ExactnessError, ParameterError, Pipeline
from rig import PROMPT, SAMPLED, assert_same, plain


def test_a_target_whose_pads_change_its_results_is_refused_with_the_reason(variants_bundle: Path) -> None:
    with pytest.raises(ExactnessError, match="exact=True cannot be kept on this box") as error:
        Pipeline(variants_bundle, draft="none", precision="int8-dynamic")
    message = str(error.value)
    assert "int8-dynamic-verify-1x16" in message
    assert "differ" in message
    assert "use exact=False, or export another precision" in message


@pytest.mark.parametrize("draft", ["none", "ngram", "self"])
def test_such_a_target_works_without_exact_and_repeats_itself(variants_bundle: Path, draft: str) -> None:
    results = [
        Pipeline(variants_bundle, draft=draft, precision="int8-dynamic", exact=False).generate(
            PROMPT, max_new_tokens=40, **SAMPLED
        )
        for _ in range(2)
    ]
    assert_same(results[0], results[1])
    assert len(results[0].token_ids) == 40 or results[0].finish_reason == "stop"


def test_without_exact_plain_steps_take_the_decode_engine(llama_bundle: Path) -> None:
    for exact, engines in ((True, {"fp32-step", "fp32-verify-1x2"}), (False, {"fp32-decode"})):
        pipe = Pipeline(llama_bundle, draft="none", exact=exact)
        plain_pass: Any = pipe._lanes.free[0].target._plain
        assert plain_pass._name in engines


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_verify_and_prefill_engines_are_of_one_class_here(llama_bundle: Path, precision: str) -> None:
    pipe = plain(llama_bundle, precision)
    outside = pipe._lanes.facts.outside
    inside = {name for name, why in outside.items() if why is None}
    assert {f"{precision}-verify-1x{n}@1x{n}" for n in (2, 4, 8, 16)} <= inside
    assert f"{precision}-prefill-1x16@1x16" in inside
    # Products of a single row are another kernel on some CPUs: what they give may lie apart, and then commits nothing.
    assert set(outside) - inside <= {f"{precision}-decode@1x1", f"{precision}-step@1x1"}
    plain_pass: Any = pipe._lanes.free[0].target._plain
    assert plain_pass._name != f"{precision}-decode"
    assert plain_pass._name != f"{precision}-step" or f"{precision}-step@1x1" in inside


def test_a_window_outside_the_class_is_left_out_or_refused(llama_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = plain(llama_bundle)._lanes.facts
    odd = {**facts.outside, "fp32-verify-1x4@1x4": "logits differ by up to 0.1 at context 40"}
    changed = replace(facts, outside=odd)
    monkeypatch.setattr("kvrelay.box.Box.facts", lambda *_: changed)
    pipe = Pipeline(llama_bundle, draft="self")
    assert pipe._lanes.free[0].target.windows == [2, 8, 16]
    with pytest.raises(ParameterError, match="window=4: on this box its engine lies outside the exact shape class"):
        Pipeline(llama_bundle, draft="self", window=4)
    assert Pipeline(llama_bundle, draft="self", window=4, exact=False)._lanes.free[0].target.windows == [2, 4, 8, 16]


def test_a_prefill_outside_the_class_is_used_alone_and_its_kv_not_reused(
    llama_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = plain(llama_bundle)._lanes.facts
    odd = {**facts.outside, "fp32-prefill-1x16@1x16": "KV entries differ at context 3"}
    changed = replace(facts, outside=odd)
    monkeypatch.setattr("kvrelay.box.Box.facts", lambda *_: changed)
    pipe = Pipeline(llama_bundle, draft="cousin", window=4)
    first = pipe.generate(PROMPT, max_new_tokens=20)
    again = pipe.generate([*PROMPT, *first.token_ids], max_new_tokens=20)
    assert (first.stats.reused_tokens, again.stats.reused_tokens) == (0, 0)
    assert pipe._lanes.free[0].target._prefill.runs == 1 + 2  # 6 tokens, then 26, in chunks of 16

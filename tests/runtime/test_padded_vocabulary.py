"""Rows of the vocabulary that only pad it are never chosen, proposed or fed, however loud they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvrelay import Pipeline
from kvrelay.drafts import draft_entry
from kvrelay.kv import KVCache
from rig import PROMPT, SAMPLED, assert_same, engine_drafter, plain, with_drafter
from tiny import cousin_of, target_model

MODES = [pytest.param({}, id="greedy"), pytest.param(SAMPLED, id="sampled")]


@pytest.fixture(scope="module")
def quiet(llama_bundle: Path) -> Pipeline:
    """The same weights without loud rows."""
    return plain(llama_bundle)


def loudest(pipe: Pipeline, name: str) -> int:
    """The most likely column of an engine over a text, padding included."""
    entry = next(e for e in pipe._bundle.manifest.engines if e.name == name)
    model = pipe._bundle.manifest.models[entry.model]
    bound = pipe._lanes.box.engine(entry).bind(KVCache(model, entry.kv_layers), 8, 8)
    bound.input_ids[:] = np.arange(8) + 50
    bound.logit_rows[:] = np.arange(8)
    bound.run()
    return int(bound.logits[0].argmax(1).max())


def test_the_padding_of_these_models_is_loud(variants_bundle: Path, llama_bundle: Path) -> None:
    assert loudest(plain(variants_bundle), "fp32-decode") >= 320
    assert loudest(plain(llama_bundle), "fp32-draft-cousin") >= 320


@pytest.mark.parametrize("settings", MODES)
def test_a_target_with_loud_padding_says_what_it_says_without(
    variants_bundle: Path, quiet: Pipeline, settings: dict[str, Any]
) -> None:
    found = plain(variants_bundle).generate(PROMPT, max_new_tokens=80, ignore_eos=True, **settings)
    wanted = quiet.generate(PROMPT, max_new_tokens=80, ignore_eos=True, **settings)
    assert found.token_ids == wanted.token_ids
    assert np.allclose(found.scores, wanted.scores, atol=1e-4)
    assert max(found.token_ids) < 260


@pytest.mark.parametrize("settings", MODES)
def test_a_draft_with_other_padding_and_the_same_weights_is_always_right(
    variants_bundle: Path, settings: dict[str, Any]
) -> None:
    pipe = Pipeline(variants_bundle, draft="self", window=8)
    with_drafter(pipe, engine_drafter(pipe, draft_entry(pipe._bundle, pipe.precision, "twin"), own_cache=True))
    found = pipe.generate(PROMPT, max_new_tokens=120, ignore_eos=True, **settings)
    assert found.stats.acceptance is not None
    assert found.stats.acceptance > 0.97  # its cache is float16
    assert_same(found, plain(variants_bundle).generate(PROMPT, max_new_tokens=120, ignore_eos=True, **settings))


@pytest.mark.parametrize("settings", MODES)
def test_a_draft_with_loud_padding_proposes_only_what_the_target_knows(
    llama_bundle: Path, settings: dict[str, Any]
) -> None:
    events: list[dict[str, Any]] = []
    pipe = Pipeline(llama_bundle, draft="cousin", window=8)
    result = pipe.generate(PROMPT, max_new_tokens=80, ignore_eos=True, trace=events.append, **settings)
    assert max(t for e in events[1:] for t in e["drafted"]) < 260
    assert result.stats.accepted > 0


def test_a_cousin_without_noise_is_a_copy() -> None:
    a, b = target_model(), cousin_of(target_model(), noise=0.0)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        assert torch.equal(a(ids).logits[..., :320], b(ids).logits[..., :320])

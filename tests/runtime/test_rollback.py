"""After every window the caches hold what a fresh prefill of the committed tokens would hold."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from kvrelay import Pipeline
from kvrelay.drafters import EngineDrafter
from kvrelay.drafts import draft_entry
from kvrelay.engine import BoundPass
from kvrelay.kv import KVCache
from kvrelay.request import Request
from rig import (
    PROMPT,
    SAMPLED,
    VOCAB,
    Scripted,
    assert_same,
    assert_same_entries,
    decode_entry,
    fresh_cache,
    plain,
    scripted,
    target_cache,
    with_drafter,
)

PATTERNS = [
    pytest.param(2, [0], id="the only candidate is rejected"),
    pytest.param(4, [0], id="all are rejected"),
    pytest.param(4, [2], id="the last is rejected"),
    pytest.param(4, [3], id="none is rejected"),
    pytest.param(8, [0, 7, 1, 7, 7, 2, 6], id="mixed"),
]


@pytest.mark.parametrize("settings", [pytest.param({}, id="greedy"), pytest.param(SAMPLED, id="sampled")])
@pytest.mark.parametrize(("window", "pattern"), PATTERNS)
def test_length_and_every_layer_are_right_after_every_window(
    llama_bundle: Path, window: int, pattern: list[int], settings: dict[str, Any]
) -> None:
    reference = plain(llama_bundle)
    wanted = reference.generate(PROMPT, max_new_tokens=64, ignore_eos=True, **settings)
    right = [*PROMPT, *wanted.token_ids]
    pipe = scripted(llama_bundle, Scripted(right, itertools.cycle(pattern)), window)
    fresh = fresh_cache(reference, right)
    cache = target_cache(pipe)
    committed = list(PROMPT)

    def after_window(event: dict[str, Any]) -> None:
        committed.extend(event["committed"])
        assert committed == right[: len(committed)]
        length = event["kv_length"] if event["pass"] == "prefill" else event["kv_length"]["after_rollback"]
        assert length == len(committed) - 1
        assert_same_entries(cache, fresh, length)

    found = pipe.generate(PROMPT, max_new_tokens=64, ignore_eos=True, trace=after_window, **settings)
    assert len(committed) == len(right)
    assert_same(found, wanted)


def test_the_correction_comes_from_the_row_of_the_mismatch(llama_bundle: Path) -> None:
    wanted = plain(llama_bundle).generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    right = [*PROMPT, *wanted.token_ids]
    events: list[dict[str, Any]] = []
    pipe = scripted(llama_bundle, Scripted(right, itertools.repeat(2)), 4)
    pipe.generate(PROMPT, max_new_tokens=40, ignore_eos=True, trace=events.append)
    for event in events[1:-1]:
        before = event["kv_length"]["before"]
        assert event["ends_with"] == "correction"
        assert event["accepted"] == right[before + 1 : before + 3]
        assert event["committed"] == right[before + 1 : before + 4]


@pytest.mark.parametrize("draft", ["skip", "int8-dynamic", "int4"])
def test_the_verifier_overwrites_what_a_shared_draft_left_in_every_layer(llama_bundle: Path, draft: str) -> None:
    pipe = Pipeline(llama_bundle, draft=draft, window=8)
    cache = target_cache(pipe)
    reference = plain(llama_bundle)
    wanted = reference.generate(PROMPT, max_new_tokens=90, ignore_eos=True)
    fresh = fresh_cache(reference, [*PROMPT, *wanted.token_ids])
    lengths = []

    def after_window(event: dict[str, Any]) -> None:
        if event["pass"] != "prefill":
            lengths.append(event["kv_length"]["after_rollback"])
            assert_same_entries(cache, fresh, lengths[-1])

    found = pipe.generate(PROMPT, max_new_tokens=90, ignore_eos=True, trace=after_window)
    assert found.stats.rollbacks > 0
    assert lengths[-1] == len(PROMPT) + 90 - 1
    assert_same(found, wanted)


SCRIPT = [0, 7, None, 1, None, None, 7, 7, 2, None, None, None, None]  # None: a plain step


class _Erring(EngineDrafter):
    """Drafts with an engine, and goes wrong after as many right candidates as a script says."""

    def begin(self, request: Request) -> None:
        super().begin(request)
        self.script = itertools.cycle(SCRIPT)

    def propose(self, request: Request, count: int) -> list[int]:
        right = next(self.script)
        if right is None:
            return []
        self._wrong_from = len(request.tokens) + right
        drafted = super().propose(request, count)
        self.after_propose(request)
        return drafted

    def after_propose(self, request: Request) -> None:
        raise NotImplementedError

    def _step(self, token: int, position: int) -> BoundPass:
        bound = super()._step(token, position)
        if position + 1 == self._wrong_from:
            row = bound.logits[0, 0]
            row[(int(row[:VOCAB].argmax()) + 1) % VOCAB] = 1e4
        return bound


@pytest.mark.parametrize("draft", ["target", "cousin"])
def test_a_draft_with_its_own_cache_holds_a_fresh_prefill_after_any_acceptance(llama_bundle: Path, draft: str) -> None:
    wanted = plain(llama_bundle).generate(PROMPT, max_new_tokens=150, ignore_eos=True)
    right = [*PROMPT, *wanted.token_ids]
    pipe = Pipeline(llama_bundle, draft="self", window=8)
    entry = decode_entry(pipe) if draft == "target" else draft_entry(pipe._bundle, pipe.precision, draft)
    fresh = fresh_cache(pipe, right, entry)
    cache = KVCache(fresh.model, entry.kv_layers, entry.kv_dtype)
    lengths: list[int] = []

    class Watched(_Erring):
        def after_propose(self, request: Request) -> None:
            # All that is committed has been fed, its last token with the first step.
            lengths.append(len(request.tokens))
            assert_same_entries(cache, fresh, lengths[-1])

    engine = pipe._lanes.box.engine(entry)
    with_drafter(pipe, Watched("self", lambda width: engine.bind(cache, width, 1), step_width=2, own_model=True))
    accepted: list[int] = []
    found = pipe.generate(
        PROMPT, max_new_tokens=150, ignore_eos=True, trace=lambda e: accepted.append(len(e.get("accepted", [])))
    )
    assert_same(found, wanted)
    assert len(lengths) > 20
    if draft == "target":
        assert accepted[1 : 1 + len(SCRIPT)] == [right or 0 for right in SCRIPT]

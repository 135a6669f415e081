"""Drafts in a batch: rows accept different numbers of candidates, and no output changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvrelay import Engine, EngineError, Faults, Result
from kvrelay.batch_drafters import BatchEngineDrafter
from kvrelay.slots import Row
from rig import (
    PROMPT,
    SAMPLED,
    Solo,
    Stepped,
    assert_counted,
    assert_idle,
    assert_same,
    assert_valid,
    fresh_cache,
    make_drafting_pay,
)

DRAFTS = ["ngram", "self", "skip", "int8-dynamic", "cousin", "auto"]
LOOPING = [40, 41, 42, 43, 44, 45] * 4
PROMPTS = [PROMPT, LOOPING, [200, 201, 202], list(range(60, 90)), [*PROMPT, *LOOPING]]
MODES: list[dict[str, Any]] = [{}, SAMPLED, {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2}]
Matches = list[list[tuple[int, int]]]  # for each pass, (candidates compared, matched) of each row that had some


@pytest.fixture(scope="module", params=["fp32", "int4"])
def solo(request: pytest.FixtureRequest, batch_bundle: Path) -> Solo:
    return Solo(batch_bundle, request.param)


def engine_of(solo: Solo, draft: str, **options: Any) -> Engine:
    options = {"window": 8, "group": 4, "max_batch": 5, **options}
    engine = Engine(solo.pipe._bundle.path, precision=solo.pipe.precision, draft=draft, **options)
    make_drafting_pay(engine)
    return engine


def watch(engine: Engine) -> Matches:
    """Note what each pass of the batch accepted in each of its rows."""
    drafting, passes = engine._scheduler._drafting, Matches()
    propose, learn = drafting.propose, drafting.learn

    def new_pass(*args: Any) -> list[list[int]]:
        passes.append([])
        return propose(*args)

    def note(row: Row, drafted: list[int], evaluated: int, matched: int, committed: list[int]) -> None:
        if drafted:
            passes[-1].append((evaluated, matched))
        learn(row, drafted, evaluated, matched, committed)

    drafting.propose, drafting.learn = new_pass, note
    return passes


def serve(engine: Engine, *, deterministic: bool, **limits: Any) -> list[tuple[list[int], dict[str, Any], Result]]:
    """Serve every prompt in every mode; every second request is ordinary, or all are."""
    asks = [(p, {"max_new_tokens": 40 + 7 * i, **mode, **limits}) for i, p in enumerate(PROMPTS) for mode in MODES]
    handles = [engine.submit(p, deterministic=deterministic and i % 2 == 0, **o) for i, (p, o) in enumerate(asks)]
    found = [(p, o, handle.result(60)) for (p, o), handle in zip(asks, handles, strict=True)]
    for _, _, result in found:
        assert_counted(result)
    assert_idle(engine)
    return found


@pytest.mark.parametrize("draft", DRAFTS)
def test_ordinary_rows_accept_different_numbers_and_keep_the_targets_tokens(solo: Solo, draft: str) -> None:
    with engine_of(solo, draft) as engine:
        passes = watch(engine)
        found = serve(engine, deterministic=False)
    for prompt, options, result in found:
        assert_valid(result, solo, prompt, **options)
        if solo.pipe.precision == "fp32" and "temperature" not in options:
            assert result.token_ids == solo(prompt, **options).token_ids
    stats = [result.stats for _, _, result in found]
    assert sum(s.accepted for s in stats) > 0
    if draft != "self":
        assert sum(s.rollbacks for s in stats) > 0
        assert any(len({matched for _, matched in rows}) > 1 for rows in passes), "no pass accepted unequally"
        assert any(len({matched for _, matched in rows}) > 2 for rows in passes)
    assert engine.stats.draft_failures == 0
    assert engine.stats.emitted == sum(s.emitted - s.first for s in stats)
    assert engine.stats.steps < engine.stats.step_rows < engine.stats.emitted


@pytest.mark.parametrize("in_class", [True, False])
@pytest.mark.parametrize("draft", DRAFTS)
def test_deterministic_rows_beside_drafting_ones_give_the_output_of_no_draft(
    solo: Solo, draft: str, in_class: bool
) -> None:
    with engine_of(solo, draft, in_class=in_class, faults=Faults(rollback=0.3)) as engine:
        found = serve(engine, deterministic=True)
    for i, (prompt, options, result) in enumerate(found):
        if i % 2 == 0:
            assert_same(result, solo(prompt, **options))
        else:
            assert_valid(result, solo, prompt, **options)
    ordinary = [r.stats for i, (_, _, r) in enumerate(found) if i % 2]
    deterministic = [r.stats for i, (_, _, r) in enumerate(found) if i % 2 == 0]
    assert sum(s.accepted for s in ordinary) > 0
    assert sum(s.accepted for s in deterministic) > 0
    assert (engine.stats.replays > 0) is not in_class
    assert (engine.stats.rollbacks > 0) is not in_class


def test_a_draft_that_equals_the_target_is_accepted_in_every_row(solo: Solo) -> None:
    with engine_of(solo, "self", max_batch=3) as engine:
        results = [r for _, _, r in serve(engine, deterministic=False, ignore_eos=True)]
    stats = [r.stats for r in results]
    # Steps of the draft and passes of the target are of different classes: nearly all, not all.
    assert sum(s.accepted for s in stats) >= 0.99 * sum(s.evaluated for s in stats) > 0
    assert all(r.stats.tokens_per_verify > 3 for r in results)


@pytest.mark.parametrize("in_class", [True, False])
def test_a_draft_models_own_cache_holds_what_the_rows_committed(solo: Solo, in_class: bool) -> None:
    with Stepped(engine_of(solo, "cousin", in_class=in_class, max_batch=4)) as stepped:
        engine = stepped.engine
        (drafter,) = engine._scheduler._drafting._drafters
        assert isinstance(drafter, BatchEngineDrafter)
        handles = [
            engine.submit(p, deterministic=i % 2 == 0, max_new_tokens=20 + 9 * i, ignore_eos=True)
            for i, p in enumerate(PROMPTS)
        ]
        checked = 0
        while stepped.busy:
            stepped.turn(5)
            for row in engine._scheduler._slots.active:
                length = drafter._fed[row]
                assert length <= row.request.kv_length
                wanted = fresh_cache(solo.pipe, row.request.tokens[:length], drafter._engine.entry)
                for name, tensor in wanted.tensors.items():
                    mine = drafter._cache.tensors[name][row.slot, :, :length]
                    assert np.allclose(mine, tensor[0, :, :length], atol=1e-5), f"{name} of slot {row.slot}"
                checked += length
        assert checked > 200
        for i, (prompt, handle) in enumerate(zip(PROMPTS, handles, strict=True)):
            wanted_ids = solo(prompt, max_new_tokens=20 + 9 * i, ignore_eos=True).token_ids
            if i % 2 == 0 or solo.pipe.precision == "fp32":
                assert handle.result(60).token_ids == wanted_ids


def test_acceptance_lasts_when_a_row_that_was_replayed_drafts_again(solo: Solo) -> None:
    """A row that the batch does not commit takes no candidates; its draft's cache must not fall behind or fill up."""
    options: dict[str, Any] = {"max_new_tokens": 150, "ignore_eos": True}

    def acceptance(*, replay_first: bool) -> float:
        with Stepped(engine_of(solo, "cousin", in_class=True, max_batch=2)) as stepped:
            engine = stepped.engine
            engine.submit([9, 8, 7], **options)
            mine = engine.submit(PROMPT, deterministic=True, **options)
            for _ in range(6):
                engine._scheduler._steps.in_class = not replay_first
                stepped.turn(6)
            engine._scheduler._steps.in_class = True
            stepped.drain()
            result = mine.result(60)
            assert_same(result, solo(PROMPT, **options))
            if not replay_first:
                return result.stats.acceptance or 0.0
            passes = result.stats.accepted / max(result.stats.windows, 1)
            assert passes > 0
            return result.stats.acceptance or 0.0

    always, later = acceptance(replay_first=False), acceptance(replay_first=True)
    assert later > always - 0.15


def test_kv_in_another_dtype_is_handed_over_per_row_and_counted(variants_bundle: Path) -> None:
    solo = Solo(variants_bundle)
    for draft in ("int4", "skip", "tiny-twin" if "tiny-twin" in solo.pipe.drafts else "twin"):
        engine = Engine(variants_bundle, precision="fp32", draft=draft, window=8, group=1, max_batch=3)
        make_drafting_pay(engine)
        with engine:
            found = serve(engine, deterministic=True)
        for i, (prompt, options, result) in enumerate(found):
            if i % 2 == 0:
                assert_same(result, solo(prompt, **options))
            else:
                assert_valid(result, solo, prompt, **options)
        stats = [r.stats for _, _, r in found]
        assert sum(s.accepted for s in stats) > 0
        assert all((s.kv_bytes_copied > 0) is (draft != "twin") for s in stats)
        assert engine.stats.kv_bytes_moved > 0
        assert engine.kv_bytes > engine._target.cache.bytes


def test_a_draft_engine_that_fails_costs_speed_and_nothing_else(solo: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(solo, "cousin", max_batch=3) as engine:
        (drafter,) = engine._scheduler._drafting._drafters
        assert isinstance(drafter, BatchEngineDrafter)
        step, raised = drafter._step, []
        firsts, others = itertools.count(), itertools.count()

        def failing(*args: Any, **named: Any) -> Any:
            bound = step(*args, **named)
            if next(firsts) % 5 == 3 if named["pair"] else next(others) % 19 == 3:
                for tensor in drafter._cache.tensors.values():  # what it wrote is unknown
                    for index in range(len(args[0])):
                        at = int(bound.write_index[index])
                        tensor[args[0][index].slot, :, at : at + bound.input_ids.shape[1]] = np.nan
                raised.append(True)
                raise EngineError("mine")
            return bound

        monkeypatch.setattr(drafter, "_step", failing)
        found = serve(engine, deterministic=True)
        for i, (prompt, options, result) in enumerate(found):
            if i % 2 == 0:
                assert_same(result, solo(prompt, **options))
        failures = engine.stats.draft_failures
        assert 5 < failures == len(raised), "a failure spoils the pass at hand alone"
        monkeypatch.undo()
        for _, _, result in serve(engine, deterministic=True):
            assert result.stats.accepted > 0, "the draft works again"
        assert engine.stats.draft_failures == failures


def test_costs_decide_whether_the_batch_drafts(solo: Solo) -> None:
    with engine_of(solo, "cousin") as engine:
        (drafter,) = engine._scheduler._drafting._drafters
        drafter.ms = lambda batch: 1e3
        assert all(r.stats.proposed == 0 for _, _, r in serve(engine, deterministic=False))


@pytest.fixture
def looping(solo: Solo) -> Iterator[Engine]:
    with engine_of(solo, "ngram", max_batch=2) as engine:
        yield engine


def test_a_lookup_that_finds_nothing_in_one_row_proposes_for_the_other(looping: Engine, solo: Solo) -> None:
    asks = [(LOOPING, {"max_new_tokens": 20}), (list(range(100, 110)), {"max_new_tokens": 3})]
    handles = [looping.submit(p, **o) for p, o in asks]
    for (prompt, options), handle in zip(asks, handles, strict=True):
        assert_valid(handle.result(60), solo, prompt, **options)
    assert handles[0].result().stats.proposed > 0 == handles[1].result().stats.proposed

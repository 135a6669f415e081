"""KV that stays in a slot, rows that move, and counters that add up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvrelay import Engine, Faults
from rig import PROMPT, Solo, Stepped, assert_same, assert_valid, engine_of, make_drafting_pay, prompt_of, target_cache

CONTEXT = 256
PLAIN: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(scope="module", params=["fp32", "int4"])
def solo(request: pytest.FixtureRequest, tied_bundle: Path) -> Solo:
    return Solo(tied_bundle, request.param)


@pytest.fixture
def engine(solo: Solo, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine_of(solo, **request.param) as made:
        yield made


@pytest.mark.parametrize(
    "engine", [{"in_class": c, "window": 4, "max_batch": 1} for c in (False, True, None)], indirect=True
)
def test_a_prompt_whose_kv_is_reused_gives_the_same_bits(solo: Solo, engine: Engine) -> None:
    options = {"max_new_tokens": 40, **PLAIN}
    first = engine.submit(PROMPT, deterministic=True, **options).result(60)
    longer = [*PROMPT, *first.token_ids[:20], 7, 8, 9]
    found = engine.submit(longer, deterministic=True, **options).result(60)
    assert found.stats.reused_tokens == len(PROMPT) + 20
    assert_same(found, Solo(solo.pipe._bundle.path, solo.pipe.precision)(longer, **options))
    again = engine.submit(PROMPT, deterministic=True, **options).result(60)
    assert again.stats.reused_tokens == len(PROMPT) - 1
    assert_same(again, first)
    assert engine.stats.reused_tokens == 2 * len(PROMPT) + 19


@pytest.mark.parametrize("in_class", [False, True])
def test_a_deterministic_request_never_uses_kv_that_an_ordinary_step_wrote(solo: Solo, in_class: bool) -> None:
    options = {"max_new_tokens": 40, **PLAIN}
    for seed in range(4):
        prompt = prompt_of(30, seed)
        with engine_of(solo, window=4, group=1, max_batch=1, in_class=in_class) as engine:
            ordinary = engine.submit(prompt, **options).result(60)
            if engine._target.in_class(engine._target.plain_step(1)):
                # The bits of the two differ on some boxes only: elsewhere there is nothing to tell apart.
                pytest.skip("on this box the decode engine's steps lie in the verifier's class")
            longer = [*prompt, *ordinary.token_ids]
            found = engine.submit(longer, deterministic=True, **options).result(60)
            assert found.stats.reused_tokens == len(prompt), "only what prefill wrote"
            assert_same(found, Solo(solo.pipe._bundle.path, solo.pipe.precision)(longer, **options))
            # An ordinary one may use all of it.
            assert engine.submit([*longer, 5], **options).result(60).stats.reused_tokens == len(longer)


@pytest.mark.parametrize("in_class", [False, True])
def test_the_kv_behind_a_deterministic_output_has_the_bits_of_a_request_alone(solo: Solo, in_class: bool) -> None:
    options = {"max_new_tokens": 50, **PLAIN}
    faults = Faults(rollback=0.3)
    with engine_of(solo, window=8, group=2, max_batch=3, in_class=in_class, faults=faults) as engine:
        handles = [engine.submit(prompt_of(9 + i, i), deterministic=i > 0, **options) for i in range(3)]
        results = [h.result(60) for h in handles]
        slots, cache = engine._scheduler._slots, engine._target.cache
        for i in (1, 2):
            tokens = [*prompt_of(9 + i, i), *results[i].token_ids]
            slot = next(s for s, kept in enumerate(slots.kept) if kept.tokens == tokens[:-1])
            assert slots.kept[slot].canonical == len(tokens) - 1
            alone = Solo(solo.pipe._bundle.path, solo.pipe.precision)
            alone(prompt_of(9 + i, i), **options)
            for name, tensor in target_cache(alone.pipe).tensors.items():
                assert np.array_equal(cache.tensors[name][slot, :, : len(tokens) - 1], tensor[0, :, : len(tokens) - 1])


def test_rows_that_move_keep_their_text_and_the_bytes_are_counted(solo: Solo) -> None:
    model = solo.pipe._bundle.target
    entry_bytes = 2 * model.layers * model.kv_heads * model.head_dim * 4
    options = {"max_new_tokens": 60, **PLAIN}
    with Stepped(engine_of(solo, window=4, group=2, max_batch=4, in_class=False)) as stepped:
        engine = stepped.engine
        ordinary = [engine.submit(prompt_of(8, i), max_new_tokens=6 + 4 * i, ignore_eos=True) for i in range(3)]
        stepped.turn(4)
        before = engine._scheduler._slots.bytes_moved
        late = engine.submit(PROMPT, deterministic=True, **options)
        stepped.turn(2)
        assert engine._scheduler._slots.bytes_moved > before, "a deterministic row goes to the front"
        stepped.drain()
        assert_same(late.result(60), solo(PROMPT, **options))
        for i, handle in enumerate(ordinary):
            assert_valid(handle.result(60), solo, prompt_of(8, i), max_new_tokens=6 + 4 * i, ignore_eos=True)
        assert engine.stats.kv_bytes_moved == engine._scheduler._slots.bytes_moved
        assert engine.stats.kv_bytes_moved % entry_bytes == 0
        moved = engine.stats.kv_bytes_moved
        alone = engine.submit(prompt_of(100, 9), deterministic=True, **options)
        stepped.drain()
        assert_same(alone.result(60), solo(prompt_of(100, 9), **options))
        assert engine.stats.kv_bytes_moved - moved <= 2 * entry_bytes * CONTEXT, (
            "moved when it joined, not in each step"
        )


# -- counters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_class", [False, True])
def test_the_counters_of_the_batch_add_up_to_those_of_its_requests(solo: Solo, in_class: bool) -> None:
    faults = Faults(rollback=0.3)
    with engine_of(solo, window=8, group=4, max_batch=8, in_class=in_class, faults=faults) as engine:
        handles = [
            engine.submit(prompt_of(6, i), deterministic=i % 4 > 0, max_new_tokens=40, **PLAIN) for i in range(12)
        ]
        results = [h.result(60) for h in handles]
    stats, all_stats = engine.stats, [r.stats for r in results]
    assert (stats.submitted, stats.finished, stats.cancelled, stats.failed) == (12, 12, 0, 0)
    assert stats.emitted == sum(s.emitted - s.first for s in all_stats) == 12 * 39
    assert stats.recomputed == sum(s.recomputed for s in all_stats)
    assert stats.rollbacks == sum(s.rollbacks for s in all_stats)
    deterministic = [r.stats for i, r in enumerate(results) if i % 4]
    assert stats.reused_tokens == sum(s.reused_tokens for s in all_stats)
    if in_class:
        assert stats.windows == stats.replays == stats.group_places == 0
        assert stats.group_fill is None
        assert stats.step_rows == 12 * 39
    else:
        assert stats.windows == sum(s.passes for s in deterministic)
        assert stats.replays <= stats.windows <= stats.group_places
        assert stats.rollbacks > 0 and stats.recomputed > 0
        assert stats.group_fill is not None and 0 < stats.group_fill <= 1
    assert stats.steps <= stats.step_rows <= 8 * stats.steps


def test_candidates_survive_moves_and_the_pads_of_other_groups(batch_bundle: Path) -> None:
    solo = Solo(batch_bundle)  # in fp32 its classes hardly ever differ in a token
    asks = [(prompt_of(4 + 5 * i % 30, i), {"max_new_tokens": 30 + 17 * i % 40, **PLAIN}) for i in range(24)]
    with engine_of(solo, window=16, group=4, max_batch=7, in_class=False) as engine:
        make_drafting_pay(engine)  # all shapes cost the same: the tail of the batch goes through four windows too
        handles = [engine.submit(p, deterministic=i % 5 > 0, **o) for i, (p, o) in enumerate(asks)]
        for i, ((prompt, options), handle) in enumerate(zip(asks, handles, strict=True)):
            if i % 5:
                assert_same(handle.result(60), solo(prompt, **options))
    assert engine.stats.windows > 50 < engine.stats.group_places
    assert engine.stats.kv_bytes_moved > 0
    assert engine.stats.rollbacks <= 2, "what the fast path wrote for candidates was lost"

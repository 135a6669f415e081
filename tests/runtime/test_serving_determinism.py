"""Deterministic requests get, bit for bit, what each gets alone, whatever shares the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvrelay import Engine, Faults, Result
from rig import PROMPT, SAMPLED, Solo, assert_counted, assert_idle, assert_same, engine_of, prompt_of

CONTEXT = 256
Ask = tuple[list[int], dict[str, Any]]


PLAIN: dict[str, Any] = {"ignore_eos": True}
PENALISED = {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}
ASKS: dict[str, Ask] = {
    "greedy": (PROMPT, {"max_new_tokens": 70, **PLAIN}),
    "sampled": (PROMPT, {"max_new_tokens": 60, **SAMPLED}),
    "penalties": (prompt_of(20), {"max_new_tokens": 50, "min_p": 0.02, "seed": 3, **PENALISED}),
    "greedy with penalties": (prompt_of(9, 2), {"max_new_tokens": 50, "frequency_penalty": 0.7, **PLAIN}),
    "top-k": (prompt_of(33, 3), {"max_new_tokens": 40, "temperature": 0.7, "top_k": 5, "seed": 9, **PLAIN}),
    "one token": (PROMPT, {"max_new_tokens": 1}),
    "two tokens": (prompt_of(40, 4), {"max_new_tokens": 2}),
    "one-token prompt": ([77], {"max_new_tokens": 30, **PLAIN}),
    "a prompt of whole chunks": (prompt_of(48, 5), {"max_new_tokens": 17, **PLAIN}),
    "a prompt to the context's end": (prompt_of(CONTEXT - 1, 6), {"max_new_tokens": 5, **PLAIN}),
    "a full context": (prompt_of(CONTEXT - 30, 7), {"max_new_tokens": 30, **PLAIN}),
    "a limit behind the context": (prompt_of(CONTEXT - 21, 8), {"max_new_tokens": 999, **PLAIN}),
}
OTHERS: list[Ask] = [(prompt_of(5 + 13 * i, 10 + i), {"max_new_tokens": 20 + 9 * i, "seed": i}) for i in range(6)]
SHAPES = [(4, 1), (8, 1), (16, 1), (4, 2), (8, 2), (4, 4), (8, 4), (16, 4)]


@pytest.fixture(scope="module", params=["fp32", "int4"])
def solo(request: pytest.FixtureRequest, tied_bundle: Path) -> Solo:
    return Solo(tied_bundle, request.param)


@pytest.fixture(scope="module")
def asks(solo: Solo) -> dict[str, Ask]:
    """``ASKS``, and one with a stop string that its output has."""
    prompt, options = ASKS["greedy"]
    text = solo(prompt, **options).text
    stop = text[len(text) // 2 :][:2]
    assert stop in text
    return {**ASKS, "a stop string": (PROMPT, {"max_new_tokens": 70, "stop": [stop, "never"], **PLAIN})}


@pytest.fixture
def engine(solo: Solo, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine_of(solo, **request.param) as made:
        yield made


def serve(engine: Engine, asks: dict[str, Ask], others: list[Ask], order: int | None = None) -> dict[str, Result]:
    """Serve deterministic ``asks`` among ordinary ``others``, shuffled if ``order`` is given."""
    queue: list[tuple[str | None, Ask]] = [*asks.items(), *((None, ask) for ask in others)]
    if order is not None:
        random.Random(order).shuffle(queue)
    handles = [(name, engine.submit(ask[0], deterministic=name is not None, **ask[1])) for name, ask in queue]
    results = [(name, handle.result(60)) for name, handle in handles]
    for _, result in results:
        assert_counted(result)
    assert_idle(engine)
    return {name: result for name, result in results if name is not None}


def assert_as_alone(found: dict[str, Result], asks: dict[str, Ask], solo: Solo) -> None:
    for name, result in found.items():
        prompt, options = asks[name]
        assert_same(result, solo(prompt, **options))


@pytest.mark.parametrize(("window", "group"), SHAPES)
def test_replayed_requests_give_what_each_gives_alone(
    solo: Solo, asks: dict[str, Ask], window: int, group: int
) -> None:
    faults = Faults(rollback=0.2, seed=window + group)
    with engine_of(solo, window=window, group=group, in_class=False, max_batch=6, faults=faults) as engine:
        found = serve(engine, asks, OTHERS)
    assert_as_alone(found, asks, solo)
    assert found["a stop string"].finish_reason == "stop"
    assert len(found["a full context"].token_ids) == 30
    assert len(found["a limit behind the context"].token_ids) == 21
    assert engine.stats.rollbacks > 0
    assert engine.stats.windows > engine.stats.replays > 0 or group == 1
    assert sum(r.stats.rollbacks for r in found.values()) == engine.stats.rollbacks


@pytest.mark.parametrize("in_class", [True, None])
@pytest.mark.parametrize(("window", "group"), [(4, 2), (16, 4)])
def test_requests_in_the_class_give_what_each_gives_alone(
    solo: Solo, asks: dict[str, Ask], window: int, group: int, in_class: bool | None
) -> None:
    with engine_of(solo, window=window, group=group, in_class=in_class, max_batch=6) as engine:
        found = serve(engine, asks, OTHERS)
    assert_as_alone(found, asks, solo)
    if in_class:
        assert engine.stats.replays == engine.stats.rollbacks == 0
        assert engine.stats.recomputed == 0


@pytest.mark.parametrize("engine", [{"in_class": False, "window": 8, "max_batch": 8}], indirect=True)
def test_tokens_that_flip_between_classes_are_rolled_back_without_any_fault_injected(
    solo: Solo, engine: Engine
) -> None:
    if engine._target.in_class(engine._target.plain_step(1)):
        # The bits of the two differ on some boxes only: elsewhere there is nothing to tell apart.
        pytest.skip("on this box the decode engine's steps lie in the verifier's class")
    asks = {str(i): (prompt_of(3 + 5 * i, i), {"max_new_tokens": 100, **PLAIN}) for i in range(16)}
    assert_as_alone(serve(engine, asks, []), asks, solo)
    engine.close()
    assert engine.stats.rollbacks > 0
    assert engine.stats.recomputed >= engine.stats.rollbacks


@pytest.mark.parametrize("in_class", [False, None])
def test_one_mixed_batch_gives_the_same_bits_in_any_order_and_batch_size(
    solo: Solo, asks: dict[str, Ask], in_class: bool | None
) -> None:
    rollbacks = 0
    for turn, max_batch in enumerate((1, 3, 8, 5, 8)):
        with engine_of(solo, window=8, group=4, in_class=in_class, max_batch=max_batch) as engine:
            for order in (None, turn):
                assert_as_alone(serve(engine, asks, OTHERS[: 2 * turn], order), asks, solo)
        rollbacks += engine.stats.rollbacks
    assert rollbacks > 0 or in_class is None


@pytest.mark.parametrize("engine", [{"in_class": c, "window": 4, "group": 2} for c in (False, True)], indirect=True)
def test_a_seeded_an_unseeded_a_greedy_and_a_top_k_row_share_a_batch(solo: Solo, engine: Engine) -> None:
    options = [
        {"temperature": 1.1, "seed": 5},
        {"temperature": 1.1},
        {},
        {"temperature": 0.8, "top_k": 3, "seed": 5},
    ]
    rows = [(prompt_of(11, 4), {"max_new_tokens": 40, **PLAIN, **o}) for o in options]
    seeds = []
    for permuted in (rows, rows[::-1], [rows[2], rows[0], rows[3], rows[1]]):
        handles = [engine.submit(p, deterministic=True, **o) for p, o in permuted]
        for (prompt, asked), handle in zip(permuted, handles, strict=True):
            found = handle.result(60)
            assert_same(found, solo(prompt, **{**asked, "seed": found.seed}))
            if "seed" not in asked and asked.get("temperature"):
                seeds.append(found.seed)
    assert len(set(seeds)) == 3, "a request without a seed draws one"


@pytest.mark.parametrize("engine", [{"in_class": c, "window": 8, "group": 2} for c in (False, True)], indirect=True)
def test_global_random_state_is_neither_used_nor_needed(solo: Solo, engine: Engine) -> None:
    prompt, options = PROMPT, {"max_new_tokens": 40, "temperature": 1.5, "seed": 42}
    for turn in range(3):
        random.seed(turn)
        np.random.seed(turn)
        np.random.rand(turn)
        handles = [engine.submit(prompt, deterministic=True, **options) for _ in range(3)]
        for handle in handles:
            assert_same(handle.result(60), solo(prompt, **options))
    other = engine.submit(prompt, deterministic=True, **{**options, "seed": 43}).result(60)
    assert other.token_ids != solo(prompt, **options).token_ids


@pytest.mark.parametrize("in_class", [False, True])
@pytest.mark.parametrize("offset", range(4))
def test_an_eos_at_any_place_of_a_window_ends_a_request_there(
    tied_bundle: Path, solo: Solo, offset: int, in_class: bool
) -> None:
    ids = solo(PROMPT, max_new_tokens=60, **PLAIN).token_ids
    at = next(i for i in range(2, 60) if (i - 1) % 4 == offset and ids[i] not in ids[:i])
    ended = Solo(tied_bundle, solo.pipe.precision, eos_ids=[ids[at]])
    with engine_of(ended, window=4, group=2, in_class=in_class, max_batch=4) as engine:
        handles = [engine.submit(PROMPT, deterministic=True, max_new_tokens=60) for _ in range(3)]
        goes_on = engine.submit(PROMPT, deterministic=True, max_new_tokens=60, ignore_eos=True)
        for handle in handles:
            found = handle.result(60)
            assert_same(found, ended(PROMPT, max_new_tokens=60))
            assert found.token_ids == ids[: at + 1]
            assert found.finish_reason == "stop"
        assert goes_on.result(60).token_ids == ids


@pytest.mark.parametrize("in_class", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_over_any_window_edge_ends_a_request_there(solo: Solo, length: int, in_class: bool) -> None:
    text = solo(PROMPT, max_new_tokens=60, **PLAIN).text
    with engine_of(solo, window=4, group=2, in_class=in_class, max_batch=4) as engine:
        asks = {
            str(at): (PROMPT, {"max_new_tokens": 60, "stop": [text[at : at + length]], **PLAIN})
            for at in range(3, min(len(text) - length, 24))
        }
        found = serve(engine, asks, [])
    assert_as_alone(found, asks, solo)
    assert {r.finish_reason for r in found.values()} == {"stop"}


@pytest.mark.parametrize("in_class", [False, True])
def test_a_token_limit_at_any_place_of_a_window_is_kept(solo: Solo, in_class: bool) -> None:
    asks = {str(limit): (PROMPT, {"max_new_tokens": limit, **PLAIN}) for limit in range(1, 20)}
    with engine_of(solo, window=8, group=4, in_class=in_class, max_batch=8) as engine:
        found = serve(engine, asks, OTHERS)
    assert_as_alone(found, asks, solo)
    for limit, result in found.items():
        assert len(result.token_ids) == int(limit)
        assert result.finish_reason == "length"


@pytest.mark.parametrize("engine", [{"in_class": c, "window": 4, "max_batch": 2} for c in (False, True)], indirect=True)
def test_rows_that_end_and_requests_that_join_their_slots_leave_the_others_alone(solo: Solo, engine: Engine) -> None:
    long = (PROMPT, {"max_new_tokens": 200, **PLAIN})
    short = [(prompt_of(3 + 7 * i, i), {"max_new_tokens": 3 + i, **PLAIN}) for i in range(12)]
    first = engine.submit(long[0], deterministic=True, **long[1])
    for i, (prompt, options) in enumerate(short):
        found = engine.submit(prompt, deterministic=i % 3 > 0, **options).result(60)
        if i % 3:
            assert_same(found, solo(prompt, **options))
    assert_same(first.result(60), solo(long[0], **long[1]))

"""What goes wrong costs the request that it hits, and nobody else: others go on, slots are free, nothing hangs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvrelay import (
    Engine,
    EngineError,
    ExactnessError,
    Faults,
    Handle,
    KvrelayError,
    ParameterError,
    Result,
    commits,
    serving,
)
from kvrelay.batch_drafting import Drafting
from kvrelay.batch_target import BatchTarget, Feed
from kvrelay.commits import Commits
from kvrelay.invariance import Verdict
from kvrelay.kv import KVCache
from kvrelay.shapes import Shape
from kvrelay.slots import Slots
from rig import (
    PROMPT,
    SAMPLED,
    Solo,
    Stepped,
    assert_counted,
    assert_idle,
    assert_same,
    assert_valid,
    make_drafting_pay,
    outcome,
)

OPTIONS: list[dict[str, Any]] = [{"ignore_eos": True}, SAMPLED, {"frequency_penalty": 0.5, "ignore_eos": True}]
ASKS = [
    ([(i * 37 + j * 11) % 250 + 4 for j in range(2 + 9 * i % 50)], {"max_new_tokens": 25 + i, **OPTIONS[i % 3]})
    for i in range(18)
]


@pytest.fixture(scope="module", params=["fp32", "int4"])
def solo(request: pytest.FixtureRequest, tied_bundle: Path) -> Solo:
    return Solo(tied_bundle, request.param)


@pytest.fixture
def engine(tied_bundle: Path) -> Iterator[Engine]:
    with Engine(tied_bundle, window=4, group=2, max_batch=3) as made:
        yield made


def engine_of(solo: Solo, **options: Any) -> Engine:
    options = {"window": 8, "group": 4, "max_batch": 5, **options}
    engine = Engine(solo.pipe._bundle.path, precision=solo.pipe.precision, **options)
    if engine.draft != "none":
        make_drafting_pay(engine)
    return engine


def serve(engine: Engine, solo: Solo) -> tuple[list[Result], list[KvrelayError]]:
    """Serve ``ASKS``, two of three deterministic; every output is right, or the request raises an error."""
    handles = [engine.submit(p, deterministic=i % 3 > 0, **o) for i, (p, o) in enumerate(ASKS)]
    results, errors = [], []
    for i, (handle, (prompt, options)) in enumerate(zip(handles, ASKS, strict=True)):
        result = outcome(handle)
        if isinstance(result, KvrelayError):
            with pytest.raises(type(result)):
                list(handle.stream())
            errors.append(result)
            continue
        results.append(result)
        assert_counted(result)
        if i % 3:
            assert_same(result, solo(prompt, **options))
        else:
            assert_valid(result, solo, prompt, **options)
    assert_idle(engine)
    return results, errors


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("share", [0, 0.1, 0.5, 1.0])
def test_forced_rollbacks_change_nothing_but_the_work(solo: Solo, share: float, group: int) -> None:
    with engine_of(solo, in_class=False, group=group, faults=Faults(rollback=share)) as engine:
        results, errors = serve(engine, solo)
    assert errors == []
    stats = engine.stats
    if share:
        assert stats.rollbacks > 0 and stats.recomputed > 0
    if share == 1.0:
        # What is made wrong may be what the verifier picks: its token may differ from the candidate.
        assert stats.rollbacks >= 0.95 * sum(r.stats.windows for i, r in enumerate(results) if i % 3)
        assert stats.recomputed > stats.rollbacks


def test_more_forced_rollbacks_mean_more_tokens_recomputed(solo: Solo) -> None:
    shares = []
    for share in (0, 0.3, 1.0):
        with engine_of(solo, in_class=False, faults=Faults(rollback=share)) as engine:
            serve(engine, solo)
        shares.append(engine.stats.recomputed_share or 0.0)
    assert shares[0] < shares[1] < shares[2]


@pytest.mark.parametrize("in_class", [False, True])
@pytest.mark.parametrize("draft", ["none", "ngram"])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 1.0])
def test_a_run_that_fails_costs_at_most_its_own_requests(solo: Solo, share: float, draft: str, in_class: bool) -> None:
    faults = Faults(engine=share, rollback=0.1, seed=5)
    with engine_of(solo, in_class=in_class, draft=draft, faults=faults) as engine:
        results, errors = serve(engine, solo)
        assert all(isinstance(e, EngineError) and "injected fault" in str(e) for e in errors)
        if share <= 0.1:
            assert results, "others go on"
        if share >= 0.1:
            assert errors
        engine._target._injector._faults = Faults()
        assert serve(engine, solo)[1] == [], "it serves as before"
    assert engine.stats.failed == len(errors)
    assert engine.stats.finished == 2 * len(ASKS) - len(errors)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_window_without_memory_for_its_pads_fails_its_request_alone(solo: Solo, share: float, group: int) -> None:
    with engine_of(solo, in_class=False, group=group, faults=Faults(pads=share, seed=1)) as engine:
        _, errors = serve(engine, solo)
        assert errors
        assert all("no memory" in str(e) for e in errors)
        assert len(errors) <= sum(i % 3 > 0 for i in range(len(ASKS))), "ordinary requests have no windows"
        engine._target._injector._faults = Faults()
        assert serve(engine, solo)[1] == []


def test_a_pass_that_fails_is_tried_row_by_row(solo: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(solo, in_class=False) as engine:
        run = engine._target.run

        def failing(shape: Any, slot: int, feeds: Any) -> Any:
            if shape.batch > 1:
                for row, feed in enumerate(feeds):  # half written, as a real failure may leave it
                    for tensor in engine._target.cache.tensors.values():
                        tensor[slot + row, :, feed.start : feed.start + shape.width] = np.nan
                        engine._target.cache.clear(slot + row, feed.start, feed.start + shape.width)
                raise EngineError("mine")
            return run(shape, slot, feeds)

        monkeypatch.setattr(engine._target, "run", failing)
        _, errors = serve(engine, solo)
    assert errors == []
    assert engine.stats.group_places == engine.stats.windows > 0


def test_a_row_that_has_no_step_in_the_class_alone_is_replayed_when_the_batchs_pass_fails(solo: Solo) -> None:
    """On some CPUs one row is computed in another kernel than several: steps of two lie in the class, of one do not."""
    with engine_of(solo, in_class=None, max_batch=3) as engine:
        make_drafting_pay(engine)  # all shapes cost the same, so batches decode inside the class
        target, run = engine._target, engine._target.run
        for shape in target._shapes.single_steps(1):
            target.verdicts[shape.name] = Verdict("logits differ at context 3", None)
        assert target.class_step(1) is None and not target.aligned
        in_class = [b for b in (2, 3) if target.class_step(b) is not None]
        assert in_class, "batches decode inside the class"
        failed: list[int] = []

        def failing(shape: Shape, slot: int, feeds: Sequence[Feed]) -> Any:
            if shape.width == 1 and shape.batch in in_class:
                failed.append(shape.batch)
                raise EngineError("mine")
            return run(shape, slot, feeds)

        target.run = failing
        results, errors = serve(engine, solo)
        assert not errors and len(results) == len(ASKS)
        assert set(failed) == set(in_class)
        assert engine.stats.replays > 0
        with pytest.raises(ExactnessError, match=r"no step of 1 row\(s\) lies in the verifier's shape class"):
            target.require_class_steps(3)


def test_values_that_are_not_numbers_fail_their_row_and_clear_its_slot(
    solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(solo, in_class=True, max_batch=3) as engine:
        run, cache = engine._target.run, engine._target.cache
        hit: list[int] = []

        def poisoned(shape: Any, slot: int, feeds: Any) -> Any:
            rows = run(shape, slot, feeds)
            if not hit and len(feeds) == 3 and feeds[1].start > 20:
                hit.append(slot + 1)
                rows[1][0].bound.logits[1] = np.nan
                for tensor in cache.tensors.values():
                    tensor[slot + 1, :, feeds[1].start] = np.nan
            return rows

        monkeypatch.setattr(engine._target, "run", poisoned)
        results, errors = serve(engine, solo)
        assert len(errors) == len(hit) == 1 and "not finite" in str(errors[0])
        assert len(results) == len(ASKS) - 1
        assert all(np.isfinite(tensor).all() for tensor in cache.tensors.values())


@pytest.mark.parametrize("share", [-0.1, 1.5, "1", True, None, float("nan")])
@pytest.mark.parametrize("kind", ["rollback", "engine", "pads"])
def test_a_share_of_faults_outside_its_range_is_refused(kind: str, share: Any) -> None:
    with pytest.raises(ParameterError, match=f"{kind}={share!r}: a share from 0 to 1"):
        Faults(**{kind: share})


@pytest.mark.parametrize("seed", [-1, 0.5, "x", None, True])
def test_a_seed_of_faults_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(ParameterError, match=f"faults: seed={seed!r}: a whole number of at least 0"):
        Faults(seed=seed)


# -- faults of the program itself ---------------------------------------------------------------------------------

PLACES = [
    (BatchTarget, "run"),
    (BatchTarget, "target"),
    (BatchTarget, "plain_step"),
    (KVCache, "clear"),
    (Slots, "take"),
    (Slots, "arrange"),
    (Slots, "leave"),
    (Drafting, "begin"),
    (Drafting, "propose"),
    (Drafting, "end"),
    (Handle, "_push"),
    (commits, "compare"),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[name for _, name in PLACES])
def test_a_fault_in_the_loop_ends_every_request_with_an_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    engine.submit(PROMPT, max_new_tokens=3).result(60)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("mine")

    if name == "clear":  # is called when something else failed before
        monkeypatch.setattr(engine._target, "run", broken)
    monkeypatch.setattr(owner, name, broken)
    handles = []
    with contextlib.suppress(EngineError):  # the loop may stop before all are submitted
        for i, (prompt, options) in enumerate(ASKS[:8]):
            handles.append(engine.submit(prompt, deterministic=i % 2 == 0, **options))
    for handle in handles:
        with pytest.raises(KvrelayError, match="RuntimeError: mine"):
            handle.result(60)
        with pytest.raises(KvrelayError, match="RuntimeError: mine"):
            list(handle.stream())
        handle.cancel()
    engine._scheduler._thread.join(60)
    with pytest.raises(EngineError, match="this engine stopped: RuntimeError: mine; make a new one"):
        engine.submit(PROMPT)
    engine.close()


@pytest.mark.parametrize("kind", [FileNotFoundError, KvrelayError])
def test_a_receipt_that_cannot_be_made_fails_its_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise kind("mine")

    with monkeypatch.context() as patch:
        patch.setattr(serving, "receipt_of", broken)
        bad = engine.submit(PROMPT, deterministic=True, max_new_tokens=3)
    for ask in (bad.result, lambda: list(bad.stream())):
        with pytest.raises(EngineError, match=f"its result cannot be made: {kind.__name__}: mine"):
            ask()
    assert engine.submit(PROMPT, deterministic=True, max_new_tokens=3).result(60).receipt is not None


@pytest.mark.parametrize(("owner", "name"), [(Commits, "finish"), (Slots, "leave"), (Drafting, "end")])
def test_closing_ends_every_handle_also_where_ending_a_row_fails(
    tied_bundle: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("mine")

    with Stepped(Engine(tied_bundle, window=4, group=2, max_batch=3)) as stepped:
        handles = [stepped.engine.submit(p, deterministic=True, **{**o, "max_new_tokens": 200}) for p, o in ASKS[:5]]
        stepped.turn(8)
        monkeypatch.setattr(owner, name, broken)
        monkeypatch.setattr(stepped, "_turn", lambda: False)  # as in a loop that closes
    assert all(handle.done for handle in handles)
    errors = [end for end in map(outcome, handles) if isinstance(end, KvrelayError)]
    assert errors and all("RuntimeError: mine" in str(error) for error in errors)

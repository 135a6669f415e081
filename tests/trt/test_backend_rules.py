"""What the TensorRT backend refuses, and how it lays out memory: before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_box import FakeBox, bundle_of_dialect
from fake_tensorrt import Strategy
from hypothesis import given
from hypothesis import strategies as st
from kvrelay import contract
from kvrelay.bundle import Bundle
from kvrelay.errors import CudaError, EngineError, PlanError
from kvrelay.kv import KVCache
from kvrelay.manifest import EngineEntry
from kvrelay.trt.buffers import ALIGNMENT, layout, padded_rows
from kvrelay.trt.contexts import choose_profile
from kvrelay.trt.engine import TrtEngine


def entry_of(bundle: Bundle, name: str) -> EngineEntry:
    return next(e for e in bundle.manifest.engines if e.name == name)


def cache_of(bundle: Bundle, **options: Any) -> KVCache:
    return KVCache(bundle.target, range(bundle.target.layers), **{"memory": "cuda", **options})


# --- loading ----------------------------------------------------------------------------------------------------------


def test_a_plan_that_the_library_refuses_is_named_with_both_sides(loop_bundle: Bundle, fake: FakeBox) -> None:
    entry = entry_of(loop_bundle, "fp32-verify-1x4")
    plan = fake.stored(loop_bundle, entry, b"\x7fONNX or anything else")
    wanted = (
        r"fp32-verify-1x4\.plan cannot be loaded: built for tensorrt 10\.16\.1 on sm87 \(Fake GPU\), here is "
        r"tensorrt 10\.16\.1 on sm87 \(Fake GPU\): the magic tag of the plan does not match; run `kvrelay build` again"
    )
    with pytest.raises(EngineError, match=wanted):
        TrtEngine(entry, loop_bundle.target, plan, fake.library)


@pytest.mark.parametrize("damage", [lambda d: d[: len(d) // 2], lambda d: b"", lambda d: bytes(len(d))])
def test_a_damaged_plan_never_reaches_the_library(loop_bundle: Bundle, fake: FakeBox, damage: Any) -> None:
    entry = entry_of(loop_bundle, "fp32-verify-1x4")
    plan = fake.plan(loop_bundle, entry)
    plan.path.write_bytes(damage(plan.path.read_bytes()))
    fake.library.Runtime = lambda logger: pytest.fail("it was handed over")  # type: ignore[method-assign]
    with pytest.raises(PlanError, match=r"fp32-verify-1x4\.plan"):
        TrtEngine(entry, loop_bundle.target, plan, fake.library)


@pytest.mark.parametrize(
    ("entry_change", "model_change", "facts", "message"),
    [
        ({}, {"capacity": 512}, {}, r"shape of past_key\.0 is \(1, 2, 320, 16\) in its plan, the manifest says"),
        ({"kv_dtype": "float16"}, {}, {}, r"dtype of past_key\.0 is DataType\.FLOAT in its plan, the manifest says"),
        ({"sequence": 8}, {}, {}, r"shape of input_ids is \(1, 4\) in its plan, the manifest says \(1, 8\)"),
        ({"batch": None}, {}, {}, r"shape of input_ids is \(1, 4\) in its plan, the manifest says \(-1, 4\)"),
        ({"kv_layers": [0, 1]}, {}, {}, r"tensors differ from the manifest in \['past_key\.2'"),
        ({}, {}, {"on_host": "logits"}, r"place of logits is TensorLocation\.HOST in its plan"),
        ({}, {}, {"no_alias": "present_value.1"}, r"present_value\.1 shares the memory of no input in its plan, it mu"),
        ({"dialect": "decomposed"}, {}, {}, r"tensors differ from the manifest in \['new_key\.0'"),
    ],
)
def test_a_plan_whose_tensors_are_not_the_manifests_is_refused(
    loop_bundle: Bundle, fake: FakeBox, entry_change: Any, model_change: Any, facts: Any, message: str
) -> None:
    entry = entry_of(loop_bundle, "fp32-verify-1x4")
    plan = fake.plan(loop_bundle, entry, **facts)
    model = loop_bundle.target.model_copy(update=model_change)
    with pytest.raises(EngineError, match=message):
        TrtEngine(entry.model_copy(update=entry_change), model, plan, fake.library)


@pytest.mark.parametrize("fake", ["10.13.3"], indirect=True)
def test_a_library_that_cannot_update_in_place_is_told_the_dialect_that_it_can_run(
    loop_bundle: Bundle, fake: FakeBox
) -> None:
    entry = entry_of(loop_bundle, "fp32-verify-1x4")
    with pytest.raises(EngineError, match=r"tensorrt 10\.13\.3 cannot update a cache in place.*dialect decomposed"):
        fake.engine(loop_bundle, entry)
    appending = bundle_of_dialect(loop_bundle, "decomposed")
    engine = fake.engine(appending, entry_of(appending, entry.name), append=True)
    engine.bind(cache_of(loop_bundle), 4, 4).run()


# --- binding ----------------------------------------------------------------------------------------------------------


def test_a_context_is_made_for_one_pass_with_memory_that_all_share(loop_bundle: Bundle, fake: FakeBox) -> None:
    cache = cache_of(loop_bundle, slots=2)
    decode = fake.engine(loop_bundle, entry_of(loop_bundle, "fp32-decode"))
    verify = fake.engine(loop_bundle, entry_of(loop_bundle, "fp32-verify-1x4"))
    passes = [decode.bind(cache, w, 1, slot=s) for w, s in ((64, 0), (1, 0), (1, 1))] + [verify.bind(cache, 4, 4)]
    contexts = fake.library.contexts
    assert [c.profile for c in contexts] == [1, 0, 0, 0]
    assert {c.strategy for c in contexts} == {Strategy.USER_MANAGED}
    assert len({c.memory for c in contexts}) == 1
    for context, slot in zip(contexts, (0, 0, 1, 0), strict=True):
        for name in cache.names:
            alias = name.replace("past_", "present_")
            assert context.addresses[name] == context.addresses[alias] == cache.address(name, slot)
    assert len({c.addresses["logits"] for c in contexts[:3]}) == 1, "passes over one cache share rows of logits"
    assert len({c.addresses["input_ids"] for c in contexts}) == 4
    for bound in passes:
        bound.run()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"width": 17, "batch": 2},
            r"no profile of its plan holds input_ids of \(2, 17\), they hold \(1, 1\) to \(4, ",
        ),
        ({"width": 1, "batch": 5}, r"--max-batch"),
        ({"width": 1, "slot": 5}, r"slots 5\.\.5 lie outside a cache of 5"),
    ],
)
def test_a_shape_that_no_profile_holds_is_refused(
    loop_bundle: Bundle, fake: FakeBox, arguments: Any, message: str
) -> None:
    decode = fake.engine(loop_bundle, entry_of(loop_bundle, "fp32-decode"))
    with pytest.raises(EngineError, match=message):
        decode.bind(cache_of(loop_bundle, slots=5), rows=1, **arguments)


def test_a_fixed_engine_and_a_cache_elsewhere_are_refused(loop_bundle: Bundle, fake: FakeBox) -> None:
    verify = fake.engine(loop_bundle, entry_of(loop_bundle, "fp32-verify-1x4"))
    with pytest.raises(EngineError, match=r"has the fixed shape \(1, 4, 4\), asked for \(1, 8, 8\)"):
        verify.bind(cache_of(loop_bundle), 8, 8)
    with pytest.raises(EngineError, match="needs a cache there, got one in host memory"):
        verify.bind(cache_of(loop_bundle, memory="host"), 4, 4)
    with pytest.raises(EngineError, match="wants a float32 cache of layers"):
        verify.bind(cache_of(loop_bundle, dtype="float16"), 4, 4)


def test_slots_at_addresses_that_tensorrt_refuses_are_refused_first(loop_bundle: Bundle, fake: FakeBox) -> None:
    verify = fake.engine(loop_bundle, entry_of(loop_bundle, "fp32-verify-1x4"))
    odd = loop_bundle.target.model_copy(update={"capacity": 321})
    with pytest.raises(EngineError, match=r"slot 1 lies at 0x\w+, TensorRT needs a multiple of 256"):
        verify.bind(KVCache(odd, range(3), slots=2, memory="cuda"), 4, 4, slot=1)


def test_a_row_that_would_leave_the_cache_never_reaches_the_gpu(loop_bundle: Bundle, fake: FakeBox) -> None:
    bound = fake.engine(loop_bundle, entry_of(loop_bundle, "fp32-verify-1x4")).bind(cache_of(loop_bundle), 4, 4)
    for start in (-1, 317):
        bound.write_index[:] = start
        with pytest.raises(EngineError, match=rf"a pass of 4 at entries {start}\.\.{start} leaves the capacity 320"):
            bound.run()
    bound.write_index[:] = 316
    bound.run()


def test_a_run_that_the_library_refuses_says_why_and_the_pass_can_be_used_again(
    loop_bundle: Bundle, fake: FakeBox
) -> None:
    bound = fake.engine(loop_bundle, entry_of(loop_bundle, "fp32-verify-1x4")).bind(cache_of(loop_bundle), 4, 4)
    (context,) = fake.library.contexts
    for warm in (False, True):  # the second time while it is captured
        address = context.addresses.pop("present_key.0")
        with pytest.raises(EngineError, match=r"verify-1x4 did not run: shapes and addresses come before execution"):
            bound.run()
        context.addresses["present_key.0"] = address + 256
        with pytest.raises(EngineError, match=r"did not run: present_key\.0 must have the address of past_key\.0"):
            bound.run()
        context.addresses["present_key.0"] = address
        bound.run()
        assert (bound.launcher.graph is not None) == warm


def test_each_engine_tells_what_the_library_said_of_it_and_nothing_older(loop_bundle: Bundle, fake: FakeBox) -> None:
    cache = cache_of(loop_bundle)
    engines = [fake.engine(loop_bundle, entry_of(loop_bundle, n)) for n in ("fp32-verify-1x2", "fp32-verify-1x4")]
    passes = [engine.bind(cache, width, width) for engine, width in zip(engines, (2, 4), strict=True)]
    for bound, context, name in zip(passes, fake.library.contexts, ("present_key.0", "present_key.1"), strict=True):
        context.addresses[name] += 256
        with pytest.raises(EngineError, match=rf"did not run: {name} must have the address of"):
            bound.run()
    fake.library.contexts[0].execute_async_v3 = lambda _: False  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="1x2 did not run: the library gave no reason"):
        passes[0].run()


def test_an_engine_that_cannot_be_captured_runs_call_by_call_and_says_so(
    loop_bundle: Bundle, fake: FakeBox, caplog: pytest.LogCaptureFixture
) -> None:
    entry = entry_of(loop_bundle, "fp32-verify-1x4")
    wanted = fake.engine(loop_bundle, entry).bind(cache_of(loop_bundle), 4, 4)
    bound = fake.engine(loop_bundle, entry).bind(cache_of(loop_bundle), 4, 4)
    fake.library.contexts[-1].captures = True  # what this one does on execution, no capture takes
    for run in range(3):
        for one in (wanted, bound):
            one.input_ids[:] = run
            one.write_index[:] = 4 * run
            one.logit_rows[:] = range(4)
            one.run()
        assert np.array_equal(wanted.logits, bound.logits)
    assert wanted.launcher.graph is not None
    assert bound.launcher.graph is None
    (said,) = caplog.messages
    assert said.startswith("engine fp32-verify-1x4 runs without a CUDA graph: ")


def test_a_fault_of_the_gpu_is_an_error_of_the_run_that_waits_for_it(loop_bundle: Bundle, fake: FakeBox) -> None:
    bound = fake.engine(loop_bundle, entry_of(loop_bundle, "fp32-verify-1x4")).bind(cache_of(loop_bundle), 4, 4)
    fake.library.hook = lambda _: fake.cuda.fail_later(fake.cuda.cudaError_t.cudaErrorIllegalAddress)
    with pytest.raises(CudaError, match="cannot finish the work before a mark: cudaErrorIllegalAddress"):
        bound.run()
    fake.cuda.fail_later(fake.cuda.cudaError_t.cudaSuccess)


# --- layout -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.lists(st.integers(1, 9), max_size=3), st.sampled_from(["int64", "float32"])), max_size=6))
def test_tensors_of_a_block_are_aligned_and_do_not_overlap(tensors: list[tuple[list[int], str]]) -> None:
    places, size = layout({str(i): (tuple(shape), kind) for i, (shape, kind) in enumerate(tensors)})
    end = 0
    for place, (shape, kind) in zip(places.values(), tensors, strict=True):
        assert place.offset % ALIGNMENT == 0
        assert place.offset >= end
        end = place.offset + int(np.prod(shape)) * np.dtype(kind).itemsize
    assert size >= end
    assert size % ALIGNMENT == 0


@given(st.integers(1, 300), st.integers(1, 2000))
def test_rows_are_padded_to_the_least_number_that_ends_aligned(rows: int, row_bytes: int) -> None:
    found = padded_rows(rows, row_bytes)
    assert found * row_bytes % ALIGNMENT == 0
    assert all(n * row_bytes % ALIGNMENT for n in range(rows, found))


class TwoProfiles:
    """An engine with a profile for many rows of few tokens, and one for a row of many."""

    num_optimization_profiles = 2

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, -1) if name == contract.INPUT_IDS else (-1, 7)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        wide = [(1, 1), (1, 9), (1, 64)] if name == contract.INPUT_IDS else [(1, 7)] * 3
        many = [(1, 1), (1, 1), (8, 16)] if name == contract.INPUT_IDS else [(1, 7), (1, 7), (8, 7)]
        return [many, wide][profile]


@given(st.integers(1, 10), st.integers(1, 70))
def test_the_first_profile_that_holds_every_input_is_chosen(batch: int, width: int) -> None:
    shapes = {contract.INPUT_IDS: (batch, width), "past_key.0": (batch, 7)}
    holds = [batch <= 8 and width <= 16, batch == 1 and width <= 64]
    if any(holds):
        assert choose_profile(TwoProfiles(), shapes, "x") == holds.index(True)
    else:
        with pytest.raises(EngineError, match=r"they hold \(1, 1\) to \(8, 16\), \(1, 1\) to \(1, 64\)"):
            choose_profile(TwoProfiles(), shapes, "x")

"""The whole draft-verify loop on the TensorRT backend, over a strict fake that computes real results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from fake_box import FakeBox, Loop, bundle_of_dialect, fake_box
from fake_tensorrt import Kernels
from kvrelay.bundle import Bundle, open_bundle
from kvrelay.errors import EngineError
from kvrelay.kv import KVCache
from kvrelay.trt import buffers

PROMPT = [50, 60, 70, 80, 90, 100, 50, 60, 70]
LONG = [(7 * i) % 250 + 4 for i in range(70)]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-k": {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    "sampled": {"temperature": 0.9},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
}


@pytest.fixture(scope="module")
def wanted(loop_bundle: Bundle) -> dict[str, Any]:
    """What ONNX Runtime gives without a draft."""
    loop = Loop(loop_bundle, None)
    return {way: loop(PROMPT, max_new_tokens=40, ignore_eos=True, **options) for way, options in WAYS.items()}


@pytest.mark.parametrize("draft", ["none", "self", "ngram", "cousin"])
def test_it_gives_the_tokens_and_scores_of_onnx_runtime(
    loop_bundle: Bundle, fake: FakeBox, wanted: dict[str, Any], draft: str
) -> None:
    loop = Loop(loop_bundle, fake, draft)
    accepted = 0
    for way, options in WAYS.items():
        found = loop(PROMPT, max_new_tokens=40, ignore_eos=True, **options)
        assert found.token_ids == wanted[way].token_ids, way
        assert found.scores == wanted[way].scores, way
        assert found.stats.kv_bytes_copied == 0
        accepted += found.stats.accepted
    assert (accepted > 0) == (draft != "none")


def test_engines_that_cannot_update_the_cache_give_the_same_and_their_bytes_are_counted(
    loop_bundle: Bundle, fake: FakeBox, wanted: dict[str, Any]
) -> None:
    appending = bundle_of_dialect(loop_bundle, "decomposed")
    found = Loop(appending, fake, "self", append=True)(PROMPT, max_new_tokens=40, ignore_eos=True)
    assert found.token_ids == wanted["greedy"].token_ids
    assert found.scores == wanted["greedy"].scores
    entry = 2 * 3 * 2 * 16 * 4  # key and value, layers, heads, head size, bytes
    stats = found.stats
    fed = 16 + 4 * stats.windows + 2 * stats.plain_passes + stats.draft_runs  # pads are written too
    assert stats.kv_bytes_copied == fed * entry


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_graphs_of_the_dialect_decomposed_give_what_they_give_on_onnx_runtime(
    export_tiny: Callable[..., Path], fake: FakeBox, precision: str
) -> None:
    path = export_tiny(tiny.target_model(), dialect="decomposed", precisions=(precision,), verify=((1, 2), (1, 4)))
    bundle = open_bundle(path)
    here, there = Loop(bundle, fake, "self"), Loop(bundle, None)
    for options in WAYS.values():
        found = here(PROMPT, max_new_tokens=40, ignore_eos=True, **options)
        wanted = there(PROMPT, max_new_tokens=40, ignore_eos=True, **options)
        assert (found.token_ids, found.scores) == (wanted.token_ids, wanted.scores)
        assert found.stats.kv_bytes_copied > 0


def test_a_request_that_the_largest_logits_decide_copies_no_row_to_the_host(loop_bundle: Bundle, fake: FakeBox) -> None:
    loop = Loop(loop_bundle, fake, "self")
    before = fake.cuda.copied
    loop(PROMPT, max_new_tokens=30, ignore_eos=True)
    loop(PROMPT, max_new_tokens=30, ignore_eos=True, **WAYS["top-k"])
    assert all(memory._host is None for memory in buffers._logits[loop.cache])
    runs = sum(p.runs for p in (*loop.target._passes, *loop.drafter._passes.values()))  # type: ignore[union-attr]
    # The inputs, and of at most 4 rows 64 values and ids and a sum, each in blocks of 256 bytes: no cache, no row.
    assert fake.cuda.copied - before <= runs * (3 * 256 + 2 * 4 * 256 + 256)
    loop(PROMPT, max_new_tokens=5, ignore_eos=True, **WAYS["penalised"])
    assert any(memory._host is not None for memory in buffers._logits[loop.cache])


def test_a_plan_without_the_largest_logits_hands_over_whole_rows(
    loop_bundle: Bundle, fake: FakeBox, wanted: dict[str, Any]
) -> None:
    loop = Loop(loop_bundle, fake, top=False)
    assert loop.target._plain.top() is None
    found = loop(PROMPT, max_new_tokens=40, ignore_eos=True)
    assert (found.token_ids, found.scores) == (wanted["greedy"].token_ids, wanted["greedy"].scores)


def test_passes_are_replayed_as_graphs_from_the_second_run_on(loop_bundle: Bundle, fake: FakeBox) -> None:
    loop = Loop(loop_bundle, fake, "self")
    bound = loop.target._plain
    results = []
    for run in range(4):
        bound.input_ids[:] = 9
        bound.write_index[:] = 5
        bound.logit_rows[:] = np.arange(2)
        calls = len(fake.cuda.calls)
        bound.run()
        made = fake.cuda.calls[calls:]
        assert ("cudaGraphLaunch" in made) == (run > 0)
        assert made.count("cudaStreamBeginCapture") == (run == 1)
        if run > 1:
            assert made == ["cudaGraphLaunch", "cudaEventRecord", "cudaEventSynchronize"]
        results.append(bound.logits.copy())
    assert all(np.array_equal(r, results[0]) for r in results)


def test_without_graphs_every_run_is_queued_call_by_call(
    loop_bundle: Bundle, fake: FakeBox, wanted: dict[str, Any]
) -> None:
    found = Loop(loop_bundle, fake, "self", graphs=False)(PROMPT, max_new_tokens=40, ignore_eos=True)
    assert found.token_ids == wanted["greedy"].token_ids
    assert "cudaGraphLaunch" not in fake.cuda.calls


def test_a_library_that_captures_by_itself_is_left_to_it(
    loop_bundle: Bundle, tmp_path: Path, wanted: dict[str, Any]
) -> None:
    with fake_box(tmp_path, captures=True) as box:
        found = Loop(loop_bundle, box, "self")(PROMPT, max_new_tokens=40, ignore_eos=True)
        assert found.token_ids == wanted["greedy"].token_ids
        assert all(context.captures for context in box.library.contexts)
        assert {context.kernels for context in box.library.contexts} == {Kernels.EAGER}, "bits would change later"
        assert "cudaStreamBeginCapture" not in box.cuda.calls


def test_every_prompt_length_and_a_slot_that_was_used_before_give_the_same(loop_bundle: Bundle, fake: FakeBox) -> None:
    here, there = Loop(loop_bundle, fake, "self"), Loop(loop_bundle, None)
    for length in (1, 15, 16, 17, 40, 3):
        options: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
        assert here(LONG[:length], **options).token_ids == there(LONG[:length], **options).token_ids


def test_lanes_of_several_threads_give_what_they_give_alone(loop_bundle: Bundle, fake: FakeBox) -> None:
    prompts = [LONG[i : i + 9] for i in (0, 11, 22)]
    loops = [Loop(loop_bundle, fake, "self") for _ in prompts]
    options: dict[str, Any] = {"max_new_tokens": 25, "ignore_eos": True}
    alone = [loop(prompt, **options).token_ids for loop, prompt in zip(loops, prompts, strict=True)]
    together: list[Any] = [None] * 3

    def generate(index: int) -> None:
        together[index] = loops[index](prompts[index], **options).token_ids

    threads = [threading.Thread(target=generate, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_a_pass_in_use_by_another_thread_is_refused(loop_bundle: Bundle, fake: FakeBox) -> None:
    bound = Loop(loop_bundle, fake).target._plain
    inside, leave = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        inside.set()
        leave.wait(20)

    fake.library.hook = hold
    thread = threading.Thread(target=bound.run)
    thread.start()
    assert inside.wait(20)
    with pytest.raises(EngineError, match="is in use by another thread: bind one for each thread"):
        bound.run()
    leave.set()
    thread.join()


@pytest.mark.parametrize("dialect", ["standard", "decomposed"])
def test_neighbouring_slots_run_in_one_pass_and_others_are_left_alone(
    loop_bundle: Bundle, fake: FakeBox, dialect: str
) -> None:
    bundle = bundle_of_dialect(loop_bundle, dialect)
    (entry,) = [e for e in bundle.engines(role="verify") if e.batch == 2]
    model = loop_bundle.target
    cache = KVCache(model, range(model.layers), slots=4, memory="cuda")
    bound = fake.engine(bundle, entry, append=dialect == "decomposed").bind(cache, 4, 4, slot=1, batch=2)
    single = Loop(loop_bundle, None)
    bound.input_ids[:] = [[5, 6, 7, 8], [9, 10, 11, 12]]
    bound.logit_rows[:] = np.arange(4)
    for starts in ([0, 0], [4, 2]):
        bound.write_index[:] = starts
        bound.run()
        for row, start in enumerate(starts):
            rows = single.target.replay(bound.input_ids[row].tolist(), 0, 4)
            if start:
                rows = single.target.replay(bound.input_ids[row].tolist(), start, 4)
            assert np.allclose([r.whole for r in rows], bound.logits[row], atol=1e-5)
            assert np.allclose(single.cache.read(0, 0, start + 4), cache.read(1 + row, 0, start + 4), atol=1e-5)
    assert not cache.read(0, 0, 12).any()
    assert not cache.read(3, 0, 12).any()
    assert not cache.read(1, 8, 12).any()

"""Several generations at once, from several threads, cancelled, closed and nested."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kvrelay
import pytest
from kvrelay import EngineError, ParameterError, Pipeline, Result, ThreadCountError
from rig import PROMPT, assert_counted, assert_same, plain

PREFILL = 16  # tokens of the tiny bundle's prefill chunk

PROMPTS = [[(i * 37 + j * 11) % 250 + 4 for j in range(2 + i % 9)] for i in range(50)]


def settings(i: int) -> dict[str, Any]:
    return {"max_new_tokens": 24, "temperature": 0.8 * (i % 2), "seed": i}


@pytest.mark.parametrize("workers", [2, 4])
def test_generations_at_once_equal_generations_one_by_one(llama_bundle: Path, workers: int) -> None:
    serial = plain(llama_bundle)
    wanted = [serial.generate(p, **settings(i)) for i, p in enumerate(PROMPTS)]
    pipe = Pipeline(llama_bundle, draft="cousin", window=8)
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(lambda i: pipe.generate(PROMPTS[i], **settings(i)), range(len(PROMPTS))))
    for a, b in zip(found, wanted, strict=True):
        assert_same(a, b)
    assert 1 <= len(pipe._lanes.free) <= workers


def test_a_callback_may_generate_on_the_same_pipeline(llama_bundle: Path) -> None:
    pipe = Pipeline(llama_bundle, draft="skip", window=4)
    reference = plain(llama_bundle)
    inner: list[Result] = []

    def callback(piece: str) -> None:
        if len(inner) < 3:
            inner.append(pipe.generate([9, 8, 7], max_new_tokens=20))

    outer = pipe.generate(PROMPT, max_new_tokens=40, callback=callback)
    assert_same(outer, reference.generate(PROMPT, max_new_tokens=40))
    assert len(inner) == 3
    for result in inner:
        assert_same(result, reference.generate([9, 8, 7], max_new_tokens=20))
    assert len(pipe._lanes.free) == 2


def test_two_streams_may_be_read_in_turn(llama_bundle: Path) -> None:
    pipe = Pipeline(llama_bundle, draft="cousin", window=4)
    prompts = [PROMPT, [200, 201, 202]]
    streams = [pipe.stream(p, max_new_tokens=40, temperature=0.9, seed=i) for i, p in enumerate(prompts)]
    open_streams = list(streams)
    while open_streams:
        open_streams = [s for s in open_streams if next(s, None) is not None]
    for i, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
        wanted = plain(llama_bundle).generate(prompt, max_new_tokens=40, temperature=0.9, seed=i)
        assert_same(stream.result, wanted)


def test_another_thread_may_cancel(llama_bundle: Path) -> None:
    pipe = Pipeline(llama_bundle, draft="cousin", window=4)
    wanted = plain(llama_bundle).generate(PROMPT, max_new_tokens=200, ignore_eos=True)
    inside, cancelled = threading.Event(), threading.Event()

    def trace(event: dict[str, Any]) -> None:
        if event["pass"] != "prefill" and not inside.is_set():
            inside.set()
            assert cancelled.wait(60)

    stream = pipe.stream(PROMPT, max_new_tokens=200, ignore_eos=True, trace=trace)

    def cancel() -> None:
        assert inside.wait(60)
        stream.cancel()
        cancelled.set()

    helper = threading.Thread(target=cancel)
    helper.start()
    text = "".join(stream)
    helper.join()
    result = stream.result
    assert result.finish_reason == "cancelled"
    assert text == result.text
    assert 2 <= len(result.token_ids) <= 5, "the window in flight is finished, no other begun"
    assert result.token_ids == wanted.token_ids[: len(result.token_ids)]
    assert len(result.scores) == len(result.token_ids) == result.stats.emitted
    assert_same(pipe.generate(PROMPT, max_new_tokens=200, ignore_eos=True), wanted)


def test_a_stream_closed_early_gives_its_slot_back(llama_bundle: Path) -> None:
    pipe = Pipeline(llama_bundle, draft="self", window=4)
    wanted = pipe.generate(PROMPT, max_new_tokens=60)
    for _ in range(3):
        stream = pipe.stream(PROMPT, max_new_tokens=60)
        next(stream)
        assert pipe._lanes.free == []
        stream.close()
        assert len(pipe._lanes.free) == 1
        assert stream.result.finish_reason == "cancelled"
        assert list(stream) == []
    assert_same(pipe.generate(PROMPT, max_new_tokens=60), wanted)


def test_a_stream_that_is_dropped_gives_its_slot_back(llama_bundle: Path) -> None:
    pipe = plain(llama_bundle)
    stream = pipe.stream(PROMPT, max_new_tokens=60)
    next(stream)
    del stream
    gc.collect()
    assert len(pipe._lanes.free) == 1


def test_a_stream_that_is_never_read_takes_no_slot(llama_bundle: Path) -> None:
    pipe = plain(llama_bundle)
    stream = pipe.stream(PROMPT)
    assert len(pipe._lanes.free) == 1
    with pytest.raises(ParameterError, match="no result yet"):
        _ = stream.result
    stream.close()
    assert len(pipe._lanes.free) == 1
    assert (stream.result.finish_reason, stream.result.token_ids, stream.result.text) == ("cancelled", [], "")


def test_a_prompt_that_is_being_processed_is_cancelled_at_the_next_chunk(llama_bundle: Path) -> None:
    pipe = plain(llama_bundle)
    prompt = [(i * 7) % 250 + 4 for i in range(200)]
    wanted = pipe.generate(prompt, max_new_tokens=5)
    (lane,) = pipe._lanes.free
    lane.tokens = []
    stream = pipe.stream(prompt, max_new_tokens=5)
    chunk, chunks = lane.target.prefill_chunk, 0

    def counted(*arguments: Any) -> Any:
        nonlocal chunks
        chunks += 1
        if chunks == 2:
            stream.cancel()
        return chunk(*arguments)

    lane.target.prefill_chunk = counted  # type: ignore[method-assign]
    assert list(stream) == []
    assert chunks == 2
    assert (stream.result.finish_reason, stream.result.token_ids, stream.result.scores) == ("cancelled", [], [])
    assert_counted(stream.result)
    again = pipe.generate(prompt, max_new_tokens=5)
    assert again.stats.reused_tokens == 2 * PREFILL, "what was processed is kept"
    assert_same(again, wanted)


def test_a_stream_cancelled_before_it_is_read_runs_nothing(llama_bundle: Path) -> None:
    pipe = plain(llama_bundle)
    stream = pipe.stream(PROMPT)
    stream.cancel()
    assert list(stream) == []
    assert (stream.result.finish_reason, stream.result.token_ids) == ("cancelled", [])


def test_a_generation_that_failed_has_no_result_but_its_error(llama_bundle: Path) -> None:
    pipe = plain(llama_bundle)
    (lane,) = pipe._lanes.free

    def fail(*_: Any, **__: Any) -> None:
        raise EngineError("engine failed")

    lane.target._run = fail  # type: ignore[method-assign]
    stream = pipe.stream(PROMPT)
    with pytest.raises(EngineError, match="engine failed"):
        next(stream)
    assert list(stream) == []
    with pytest.raises(EngineError, match="engine failed"):
        _ = stream.result


def test_the_garbage_collector_may_give_a_slot_back_while_one_is_taken(
    llama_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = plain(llama_bundle)
    streams = [pipe.stream(PROMPT, max_new_tokens=9) for _ in range(2)]
    for stream in streams:
        next(stream)
    streams.pop().close()
    forgotten = [streams.pop()]
    forgotten.append(forgotten)  # type: ignore[arg-type]  # a cycle: only the collector finds it
    del stream, forgotten
    reusable = pipe._lanes._reusable

    def collecting(*arguments: Any) -> int:
        gc.collect()
        return reusable(*arguments)

    monkeypatch.setattr(pipe._lanes, "_reusable", collecting)
    thread = threading.Thread(target=pipe.generate, args=(PROMPT,), kwargs={"max_new_tokens": 2}, daemon=True)
    gc.disable()
    try:
        thread.start()
        thread.join(60)
    finally:
        gc.enable()
    assert not thread.is_alive(), "the lane that comes back waits for the lock of the one that is taken"
    assert len(pipe._lanes.free) == 2


def test_a_trace_that_raises_gives_the_slot_back(llama_bundle: Path) -> None:
    pipe = plain(llama_bundle)

    def trace(event: dict[str, Any]) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        pipe.generate(PROMPT, max_new_tokens=10, trace=trace)
    assert len(pipe._lanes.free) == 1
    assert len(pipe.generate(PROMPT, max_new_tokens=10).token_ids) == 10


def test_a_callback_that_raises_gives_the_slot_back_though_its_error_is_kept(llama_bundle: Path) -> None:
    pipe = plain(llama_bundle)

    def callback(piece: str) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as kept:
        pipe.generate(PROMPT, max_new_tokens=10, callback=callback)
    assert kept.value.__traceback__ is not None
    assert len(pipe._lanes.free) == 1


@pytest.mark.parametrize("action", ["next", "close"])
def test_a_stream_in_use_by_one_thread_refuses_another(llama_bundle: Path, action: str) -> None:
    pipe = Pipeline(llama_bundle, draft="self", window=4)
    inside, go_on = threading.Event(), threading.Event()

    def trace(event: dict[str, Any]) -> None:
        inside.set()
        assert go_on.wait(60)

    stream = pipe.stream(PROMPT, max_new_tokens=30, trace=trace)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: list(stream))
        assert inside.wait(60)
        try:
            with pytest.raises(ParameterError, match="in use by another thread"):
                next(stream) if action == "next" else stream.close()
        finally:
            go_on.set()
        assert "".join(reading.result(60)) == plain(llama_bundle).generate(PROMPT, max_new_tokens=30).text
    assert len(pipe._lanes.free) == 1


def test_all_engines_of_a_process_run_on_one_number_of_threads(llama_bundle: Path) -> None:
    in_force = plain(llama_bundle).threads
    assert in_force == kvrelay.use_threads(None) == kvrelay.use_threads(in_force) == 2
    assert Pipeline(llama_bundle, draft="none", threads=2).threads == 2
    with pytest.raises(ThreadCountError, match=r"threads=1: .* already runs its engines on 2 thread"):
        Pipeline(llama_bundle, threads=1)
    with pytest.raises(ThreadCountError, match="use threads=2 or another process"):
        kvrelay.use_threads(1)


@pytest.mark.parametrize("threads", [0, -1, 10**6, "2", 2.0, True])
def test_a_thread_count_out_of_range_is_refused_with_the_range(threads: Any) -> None:
    with pytest.raises(ParameterError, match=r"threads=.*give 1 to \d+"):
        kvrelay.use_threads(threads)


def test_a_result_waits_for_the_end_of_the_stream_and_closing_keeps_the_text_of_its_ids(llama_bundle: Path) -> None:
    pipe = plain(llama_bundle)
    full = pipe.generate(PROMPT, max_new_tokens=6, ignore_eos=True)
    stream = pipe.stream(PROMPT, max_new_tokens=6, ignore_eos=True, stop=[full.text + "x"])  # holds all text back
    pieces = iter(stream)
    first = next(pieces)
    with pytest.raises(ParameterError, match="read it to its end"):
        _ = stream.result
    rest = "".join(pieces)
    assert first + rest == stream.result.text == full.text
    closed = pipe.stream(PROMPT, max_new_tokens=40, ignore_eos=True)
    next(closed)
    closed.close()
    assert closed.result.finish_reason == "cancelled"
    assert closed.result.text == pipe._intake.tokenizer.decode(closed.result.token_ids).rstrip("\ufffd")

"""Handles, streams, cancelling, closing, threads, and what an engine refuses."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvrelay import Engine, EngineError, Handle, KvrelayError, ParameterError, Pipeline, PromptError, read_receipt
from rig import PROMPT, SAMPLED, Solo, Stepped, assert_idle, assert_same, read_all

LONG: dict[str, Any] = {"max_new_tokens": 200, "ignore_eos": True}
PROMPTS = [[(i * 37 + j * 11) % 250 + 4 for j in range(2 + i % 9)] for i in range(40)]


@pytest.fixture(scope="module")
def solo(batch_bundle: Path) -> Solo:
    return Solo(batch_bundle)


@pytest.fixture
def engine(batch_bundle: Path) -> Iterator[Engine]:
    with Engine(batch_bundle, window=8, max_batch=3) as made:
        yield made


@pytest.fixture
def stepped(batch_bundle: Path) -> Iterator[Stepped]:
    with Stepped(Engine(batch_bundle, window=4, group=2, max_batch=2, in_class=False)) as made:
        yield made


def loop_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "kvrelay-engine"]


# -- results and streams ------------------------------------------------------------------------------------------


def test_a_request_gives_what_a_pipeline_gives_for_text_chat_and_ids(batch_bundle: Path, engine: Engine) -> None:
    pipe = Pipeline(batch_bundle, draft="none")
    for prompt in ("Hello", [{"role": "user", "content": "Hi"}], PROMPT, np.array(PROMPT)):
        for options in ({}, SAMPLED):
            found = engine.submit(prompt, deterministic=True, max_new_tokens=30, **options).result(60)
            assert_same(found, pipe.generate(prompt, max_new_tokens=30, **options))
            assert found.stats.ttft > 0 and found.stats.kv_bytes > 0
            assert found.receipt is not None
    ordinary = engine.submit(PROMPT, max_new_tokens=30).result(60)
    assert ordinary.token_ids == pipe.generate(PROMPT, max_new_tokens=30).token_ids
    assert ordinary.receipt is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_streamed_pieces_join_to_the_text(engine: Engine, solo: Solo, deterministic: bool) -> None:
    stop = solo(PROMPT, **LONG).text[40:43]
    asks = [{**LONG}, {**LONG, "stop": stop}, {"max_new_tokens": 1}, {"max_new_tokens": 60, **SAMPLED}]
    handles = [engine.submit(PROMPT, deterministic=deterministic, **options) for options in asks]
    for options, handle in zip(asks, handles, strict=True):
        text, result = read_all(handle)
        assert text == result.text == solo(PROMPT, **options).text
        assert handle.done
        assert list(handle.stream()) == [], "each piece is given once"
        assert handle.result() is result


def test_text_is_streamed_before_the_end(stepped: Stepped, solo: Solo) -> None:
    handle = stepped.engine.submit(PROMPT, deterministic=True, **LONG)
    stepped.turn(30)
    assert not handle.done
    pieces = handle.stream()
    first = next(pieces)
    assert first and solo(PROMPT, **LONG).text.startswith(first)
    stepped.drain()
    assert first + "".join(pieces) == handle.result().text == solo(PROMPT, **LONG).text


def test_a_deterministic_request_streams_only_what_was_verified(stepped: Stepped, solo: Solo) -> None:
    handle = stepped.engine.submit(PROMPT, deterministic=True, **LONG)
    stepped.turn()
    (row,) = stepped.engine._scheduler._commits.open
    candidates = 0
    while stepped.busy:
        stepped.turn()
        assert row.request.output == solo(PROMPT, **LONG).token_ids[: len(row.request.output)]
        assert len(row.candidates) <= 3
        candidates = max(candidates, len(row.candidates))
    assert candidates > 0
    assert_same(handle.result(), solo(PROMPT, **LONG))


def test_a_result_that_is_not_there_in_time_is_a_timeout_and_the_request_goes_on(stepped: Stepped, solo: Solo) -> None:
    handle = stepped.engine.submit(PROMPT, deterministic=True, **LONG)
    stepped.turn(3)
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match=f"after {timeout} s; it goes on"):
            handle.result(timeout)
    stepped.drain()
    assert_same(handle.result(0), solo(PROMPT, **LONG))


# -- cancelling ---------------------------------------------------------------------------------------------------


def check_cancelled(handle: Handle, solo: Solo, prompt: list[int], least: int, most: int) -> None:
    text, result = read_all(handle)
    assert result.finish_reason == "cancelled"
    assert text == result.text
    assert least <= len(result.token_ids) <= most
    wanted = solo(prompt, **LONG)
    assert result.token_ids == wanted.token_ids[: len(result.token_ids)]
    assert result.scores == wanted.scores[: len(result.token_ids)]
    assert result.stats.emitted == len(result.token_ids)
    assert result.receipt is not None and result.receipt.finish_reason == "cancelled"


def test_a_request_that_waits_can_be_cancelled(stepped: Stepped, solo: Solo) -> None:
    running = [stepped.engine.submit(p, deterministic=True, **LONG) for p in PROMPTS[:2]]
    stepped.turn(6)
    waiting = stepped.engine.submit(PROMPT, deterministic=True, **LONG)
    after = stepped.engine.submit(PROMPTS[3], deterministic=True, **LONG)
    waiting.cancel()
    stepped.turn()
    check_cancelled(waiting, solo, PROMPT, 0, 0)
    stepped.drain()
    for prompt, handle in zip([*PROMPTS[:2], PROMPTS[3]], [*running, after], strict=True):
        assert_same(handle.result(), solo(prompt, **LONG))
    assert (stepped.engine.stats.cancelled, stepped.engine.stats.finished) == (1, 4)


def test_a_request_can_be_cancelled_while_its_prompt_is_processed(stepped: Stepped, solo: Solo) -> None:
    long_prompt = [(7 * i) % 250 + 4 for i in range(60)]
    other = stepped.engine.submit(PROMPT, deterministic=True, **LONG)
    stepped.turn(5)
    handle = stepped.engine.submit(long_prompt, deterministic=True, **LONG)
    stepped.turn(2)
    row = stepped.engine._scheduler._slots.prefilling
    assert row is not None and 0 < row.request.kv_length < 60
    handle.cancel()
    stepped.turn()
    check_cancelled(handle, solo, long_prompt, 0, 0)
    again = stepped.engine.submit(long_prompt, deterministic=True, max_new_tokens=20)
    stepped.drain()
    assert again.result().stats.reused_tokens == 32, "what was processed may serve the same prompt"
    assert_same(again.result(), solo(long_prompt, max_new_tokens=20))
    assert_same(other.result(), solo(PROMPT, **LONG))


@pytest.mark.parametrize("turns", [3, 4, 5, 6, 7])
def test_a_request_can_be_cancelled_with_any_number_of_candidates(stepped: Stepped, solo: Solo, turns: int) -> None:
    handles = [stepped.engine.submit(p, deterministic=True, **LONG) for p in PROMPTS[:2]]
    stepped.turn(turns)
    handles[0].cancel()
    stepped.turn()
    check_cancelled(handles[0], solo, PROMPTS[0], 1, 4 * turns)
    late = stepped.engine.submit(PROMPT, deterministic=True, **LONG)
    stepped.drain()
    assert_same(handles[1].result(), solo(PROMPTS[1], **LONG))
    assert_same(late.result(), solo(PROMPT, **LONG))
    assert_idle(stepped.engine)


def test_a_request_that_has_ended_stays_as_it_is_when_cancelled(engine: Engine, solo: Solo) -> None:
    handle = engine.submit(PROMPT, deterministic=True, max_new_tokens=20)
    found = handle.result(60)
    handle.cancel()
    handle.cancel()
    assert handle.result(0) is found
    assert_same(found, solo(PROMPT, max_new_tokens=20))
    assert engine.stats.cancelled == 0


def test_another_thread_may_cancel_while_one_reads(engine: Engine, solo: Solo) -> None:
    handle = engine.submit(PROMPT, deterministic=True, **LONG)
    pieces = handle.stream()
    first = next(pieces)
    thread = threading.Thread(target=handle.cancel)
    thread.start()
    text = first + "".join(pieces)
    thread.join(60)
    result = handle.result(60)
    assert text == result.text
    assert result.token_ids == solo(PROMPT, **LONG).token_ids[: len(result.token_ids)]
    assert_idle(engine)


# -- closing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [0, 1, 4, 9])
def test_closing_ends_every_request_as_cancelled(batch_bundle: Path, solo: Solo, turns: int) -> None:
    prompts = [PROMPT, [(7 * i) % 250 + 4 for i in range(90)], *PROMPTS[:3]]
    with Stepped(Engine(batch_bundle, window=4, group=2, max_batch=2, in_class=False)) as stepped:
        handles = [stepped.engine.submit(p, deterministic=True, **LONG) for p in prompts]
        stepped.turn(turns)
    for prompt, handle in zip(prompts, handles, strict=True):
        check_cancelled(handle, solo, prompt, 0, 4 * turns)
    assert_idle(stepped.engine)
    with pytest.raises(EngineError, match="closed: make a new one"):
        stepped.engine.submit(PROMPT)
    assert stepped.engine.stats.submitted == len(prompts) + 1
    stepped.engine.close()  # once more does nothing


def test_with_closes_also_when_its_body_fails(batch_bundle: Path) -> None:
    before = len(loop_threads())
    handles = []

    def body() -> None:
        with Engine(batch_bundle) as engine:
            handles.append(engine.submit(PROMPT, **LONG))
            assert len(loop_threads()) == before + 1
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        body()
    (handle,) = handles
    assert handle.result(0).finish_reason in ("cancelled", "length")
    assert len(loop_threads()) == before


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_engine_that_is_dropped_ends_its_thread(batch_bundle: Path, deterministic: bool) -> None:
    before = loop_threads()
    engine = Engine(batch_bundle, max_batch=2)
    handle = engine.submit(PROMPT, deterministic=deterministic, max_new_tokens=5)
    handle.result(60)
    (thread,) = [t for t in loop_threads() if t not in before]
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None, "a handle that is kept does not keep the engine"
    thread.join(60)
    assert not thread.is_alive()
    assert handle.result().finish_reason == "length"


def test_a_handle_that_is_kept_keeps_nothing_of_the_vocabularys_size(stepped: Stepped) -> None:
    handle = stepped.engine.submit(PROMPT, deterministic=True, max_new_tokens=9, repetition_penalty=1.1)
    stepped.turn()
    (row,) = stepped.engine._scheduler._commits.open
    sampler = weakref.ref(row.request.sampler)
    del row
    stepped.drain()
    gc.collect()
    assert sampler() is None
    handle.cancel()
    assert len(handle.result().token_ids) == 9


def test_a_closed_engine_gives_its_memory_back(batch_bundle: Path) -> None:
    engine = Engine(batch_bundle, max_batch=2)
    handle = engine.submit(PROMPT, max_new_tokens=5)
    cache = weakref.ref(engine._target.cache)
    handle.result(60)
    engine.close()
    del engine
    gc.collect()
    assert cache() is None


# -- several at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 4])
def test_requests_from_several_threads_equal_those_one_by_one(engine: Engine, solo: Solo, workers: int) -> None:
    def ask(i: int) -> None:
        options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.8 * (i % 2), "seed": i}
        text, result = read_all(engine.submit(PROMPTS[i], deterministic=True, **options))
        assert text == result.text
        found.append((i, result, options))

    found: list[Any] = []
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(ask, range(len(PROMPTS))))
    assert len(found) == len(PROMPTS)
    for i, result, options in found:
        assert_same(result, solo(PROMPTS[i], **options))
    assert_idle(engine)


def test_two_engines_and_a_pipeline_work_at_once_on_one_bundle(batch_bundle: Path, solo: Solo) -> None:
    pipe = Pipeline(batch_bundle, draft="cousin", window=4)
    with (
        Engine(batch_bundle, window=4, group=2, max_batch=2, in_class=False) as one,
        Engine(batch_bundle, precision="int4", window=8, group=1, max_batch=3) as two,
    ):
        first = [one.submit(p, deterministic=True, **LONG) for p in PROMPTS[:4]]
        second = [two.submit(p, deterministic=True, **LONG) for p in PROMPTS[:4]]
        for prompt in PROMPTS[:4]:
            assert_same(pipe.generate(prompt, **LONG), solo(prompt, **LONG))
        other = Solo(batch_bundle, "int4")
        for prompt, a, b in zip(PROMPTS[:4], first, second, strict=True):
            assert_same(a.result(60), solo(prompt, **LONG))
            assert_same(b.result(60), other(prompt, **LONG))


def test_requests_are_admitted_in_the_order_in_which_they_came(stepped: Stepped) -> None:
    handles = [stepped.engine.submit(p, max_new_tokens=6, ignore_eos=True) for p in PROMPTS[:6]]
    ended: list[int] = []
    while stepped.busy:
        stepped.turn()
        ended += [i for i, h in enumerate(handles) if h.done and i not in ended]
    assert ended == sorted(ended)


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, r"max_batch=0: a whole number of at least 1"),
        ({"max_batch": 2.0}, r"max_batch=2.0: a whole number"),
        ({"max_batch": True}, r"max_batch=True: a whole number"),
        ({"window": 3}, r"group=4, window=3: this bundle has verify engines .*4x8"),
        ({"group": 3}, r"group=3, window=16: this bundle has verify engines"),
        ({"group": -1}, r"group=-1: a whole number of at least 1"),
        ({"window": "8"}, r"window='8': a whole number"),
        ({"in_class": 1}, r"in_class=1: True or False"),
        ({"precision": "fp64"}, r"precision='fp64': this bundle has fp32, int4"),
        ({"draft": "nothing"}, r"draft='nothing': this bundle has auto, none, ngram"),
        ({"threads": 1}, r"threads=1: .*threads=2"),
    ],
)
def test_an_engine_option_that_does_not_fit_is_refused(
    batch_bundle: Path, options: dict[str, Any], message: str
) -> None:
    before = len(loop_threads())
    with pytest.raises(KvrelayError, match=message):
        Engine(batch_bundle, **options)
    assert len(loop_threads()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: a whole number of at least 1"),
        ({"temperature": -1.0}, r"temperature=-1.0: 0 \(greedy\) or more"),
        ({"top_p": 0.0}, "top_p=0.0: over 0"),
        ({"top_k": -3}, "top_k=-3"),
        ({"min_p": 2.0}, "min_p=2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"seed": -1}, "seed=-1: a whole number"),
        ({"stop": [""]}, "at least one character"),
        ({"stop": 3}, "stop=3"),
        ({"stop": ["a\ud800"]}, "half of a character"),
        ({"ignore_eos": "yes"}, "ignore_eos='yes': True or False"),
        ({"deterministic": "yes"}, "deterministic='yes': True or False"),
    ],
)
def test_a_parameter_out_of_range_is_refused_and_nothing_is_queued(
    engine: Engine, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        engine.submit(PROMPT, **options)
    assert engine.stats.submitted == 0
    assert_idle(engine)
    assert len(engine.submit(PROMPT, max_new_tokens=2, ignore_eos=True).result(60).token_ids) == 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([5] * 256, "256 tokens.*context is 256"), ([], "no tokens"), ([260], "0 to 259"), (b"no", "of type bytes")],
)
def test_a_prompt_that_does_not_fit_is_refused_and_nothing_is_queued(engine: Engine, prompt: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        engine.submit(prompt)
    assert engine.stats.submitted == 0


def test_an_unknown_parameter_is_refused(engine: Engine) -> None:
    with pytest.raises(TypeError, match="best_of"):
        # Unknown on purpose: what is not supported is refused, not ignored.
        engine.submit(PROMPT, best_of=2)  # type: ignore[call-arg]


def test_values_of_numpy_are_taken(batch_bundle: Path, solo: Solo) -> None:
    with Engine(batch_bundle, max_batch=np.int64(2), window=np.int64(8), in_class=np.False_) as engine:
        found = engine.submit(
            np.array(PROMPT), deterministic=np.True_, max_new_tokens=np.int64(9), seed=np.int64(1), ignore_eos=np.True_
        ).result(60)
        assert_same(found, solo(PROMPT, max_new_tokens=9, seed=1, ignore_eos=True))
    assert engine.stats.replays > 0, "in_class=False asks for replays"


def test_the_receipt_names_stop_strings_given_in_any_form(engine: Engine, solo: Solo) -> None:
    stop = solo(PROMPT, **LONG).text[40:43]
    forms: list[Any] = [stop, [stop], (stop,), iter([stop])]
    for form in forms:
        found = engine.submit(PROMPT, deterministic=True, stop=form, **LONG).result(60)
        assert found.finish_reason == "stop"
        assert found.receipt is not None and found.receipt.options["stop"] == [stop]


def test_a_receipt_names_the_bundles_folder_wherever_the_process_stands(
    batch_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(batch_bundle.parent)
    gone = tmp_path / "gone"
    gone.mkdir()
    with Engine(batch_bundle.name, max_batch=2) as engine:
        for folder in (tmp_path, gone):
            monkeypatch.chdir(folder)
            if folder is gone:
                gone.rmdir()
            receipt = engine.submit(PROMPT, deterministic=True, max_new_tokens=3).result(60).receipt
            assert receipt is not None and Path(receipt.bundle) == batch_bundle.resolve()


def test_a_receipt_shows_a_folder_that_is_no_utf8(batch_bundle: Path, tmp_path: Path) -> None:
    real = shutil.copytree(batch_bundle, tmp_path / os.fsdecode(b"r\xe9al"))
    with Engine(real, max_batch=1, window=8, group=1) as engine:
        receipt = engine.submit(PROMPT, deterministic=True, max_new_tokens=3).result(60).receipt
    assert receipt is not None and receipt.bundle.endswith(r"r\xe9al")
    receipt.save(tmp_path / "receipt.json")
    assert read_receipt(tmp_path / "receipt.json") == receipt


def test_a_receipt_is_saved_and_read_under_a_name_or_a_path(engine: Engine, tmp_path: Path) -> None:
    receipt = engine.submit(PROMPT, deterministic=True, max_new_tokens=3).result(60).receipt
    assert receipt is not None
    for path in (str(tmp_path / "name.json"), tmp_path / "path.json"):
        receipt.save(path)
        assert read_receipt(path) == receipt


@pytest.mark.parametrize("moment", ["loading", "first use"])
def test_a_progress_function_may_use_what_is_open_and_is_refused_to_open_a_bundle(
    batch_bundle: Path, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    pipe = Pipeline(batch_bundle, draft="none")
    stream = pipe.stream(PROMPT, max_new_tokens=9, ignore_eos=True)
    next(stream)  # its lane is taken: another generation makes one
    told: list[str] = []

    def progress(line: str) -> None:
        told.append(line)
        if line.startswith(moment):
            assert pipe.generate(PROMPT, max_new_tokens=2).token_ids
            assert engine.submit(PROMPT, max_new_tokens=2).result(60).token_ids
            Engine(batch_bundle)

    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    with pytest.raises(ParameterError, match=r"is opened in a progress function.*before or afterwards"):
        Engine(batch_bundle, progress=progress)
    assert told[-1].startswith(moment)

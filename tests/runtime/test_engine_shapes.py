"""Engines at changing shapes: every pass gives what a fresh session gives, and rows do not disturb each other."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kvrelay import EngineError, Pipeline
from kvrelay.box import Box
from kvrelay.bundle import Bundle, open_bundle
from kvrelay.kv import KVCache
from kvrelay.manifest import EngineEntry
from kvrelay.ort import OrtEngine
from rig import PROMPT, plain

TEXT = np.random.default_rng(3).integers(4, 260, (3, 200))


@pytest.fixture(scope="module")
def bundle(llama_bundle: Path) -> Bundle:
    return open_bundle(llama_bundle)


def entry_of(bundle: Bundle, name: str) -> EngineEntry:
    return next(e for e in bundle.manifest.engines if e.name == name)


def new_engine(bundle: Bundle, name: str) -> OrtEngine:
    """A session of its own, that nothing ran in before."""
    engine = Box(bundle, None).engine(entry_of(bundle, name))
    assert isinstance(engine, OrtEngine)
    return engine


def run(engine: OrtEngine, cache: KVCache, tokens: np.ndarray, at: int) -> np.ndarray:
    """Feed ``tokens`` ``[B, S]`` at entry ``at`` of the first slots; return logits ``[B, S, V]``."""
    batch, width = tokens.shape
    bound = engine.bind(cache, width, width, batch=batch)
    bound.input_ids[:] = tokens
    bound.write_index[:] = at
    bound.logit_rows[:] = np.arange(width)
    bound.run()
    return bound.logits.copy()


@pytest.mark.parametrize("name", ["fp32-decode", "int4-decode", "int8-dynamic-draft", "fp32-draft-skip"])
def test_one_session_at_changing_shapes_gives_what_fresh_sessions_give(bundle: Bundle, name: str) -> None:
    layers = entry_of(bundle, name).kv_layers
    one, cache = new_engine(bundle, name), KVCache(bundle.target, layers, slots=3)
    # Width, entry and rows of passes: prefill, decode, verify, a rollback, other rows, a new request.
    turns = [(17, 0, 1), (1, 17, 1), (4, 18, 1), (1, 20, 1), (4, 21, 1), (3, 0, 3), (1, 3, 3), (2, 4, 1), (1, 0, 1)]
    for width, at, batch in turns:
        tokens = TEXT[:batch, at : at + width]
        before = {n: t.copy() for n, t in cache.tensors.items()}
        found = run(one, cache, tokens, at)
        other = KVCache(bundle.target, layers, slots=3)
        for tensor_name, tensor in other.tensors.items():
            tensor[:] = before[tensor_name]
        wanted = run(new_engine(bundle, name), other, tokens, at)
        assert np.array_equal(found, wanted), (width, at, batch)
        for tensor_name, tensor in other.tensors.items():
            assert np.array_equal(tensor, cache.tensors[tensor_name])


@pytest.mark.parametrize("name", ["fp32-decode", "fp32-verify-1x8", "fp32-prefill-1x16"])
def test_a_pass_may_start_from_an_empty_cache(bundle: Bundle, name: str) -> None:
    entry = entry_of(bundle, name)
    engine = new_engine(bundle, name)
    width, rows = entry.sequence or 1, entry.rows or 1
    bound = engine.bind(KVCache(bundle.target, range(3)), width, rows)
    bound.input_ids[:] = TEXT[0, :width]
    bound.logit_rows[:] = np.arange(rows) if rows > 1 else width - 1
    bound.run()
    whole = run(new_engine(bundle, "fp32-decode"), KVCache(bundle.target, range(3)), TEXT[:1, :width], 0)
    assert np.allclose(bound.logits[0], whole[0, -rows:], atol=1e-4)


@pytest.mark.parametrize("name", ["fp32-decode", "int4-decode"])
def test_rows_that_accept_different_numbers_of_tokens_equal_their_own_runs(bundle: Bundle, name: str) -> None:
    width = 4
    engine = new_engine(bundle, name)
    cache = KVCache(bundle.target, range(3), slots=3)
    texts = TEXT.copy()
    alone = [run(engine, KVCache(bundle.target, range(3)), texts[row : row + 1], 0)[0] for row in range(3)]
    lengths = np.array([3, 7, 12])
    for row, length in enumerate(lengths):
        bound = engine.bind(cache, int(length), 1, slot=row)
        bound.input_ids[:] = texts[row, :length]
        bound.run()
    bound = engine.bind(cache, width, width, batch=3)
    bound.logit_rows[:] = np.arange(width)
    for turn in range(20):
        accepted = [(0, 2, width - 1)[(turn + row) % 3] for row in range(3)]
        for row in range(3):
            right = texts[row, lengths[row] : lengths[row] + width]
            bound.input_ids[row] = np.where(np.arange(width) <= accepted[row], right, (right + 1) % 260)
        bound.write_index[:] = lengths
        bound.run()
        for row in range(3):
            wanted = alone[row][lengths[row] : lengths[row] + accepted[row] + 1]
            found = bound.logits[row, : accepted[row] + 1]
            assert np.array_equal(found[:, :260].argmax(1), wanted[:, :260].argmax(1)), (turn, row)
            assert np.allclose(found, wanted, atol=1e-4)
            lengths[row] += accepted[row] + 1
        if turn == 9:  # row 1 ends and another request takes its slot
            texts[1] = TEXT[1][::-1]
            alone[1] = run(engine, KVCache(bundle.target, range(3)), texts[1:2], 0)[0]
            lengths[1] = 0


def test_a_shape_that_an_engine_lacks_is_refused_with_both_shapes(bundle: Bundle) -> None:
    engine, cache = new_engine(bundle, "fp32-verify-1x8"), KVCache(bundle.target, range(3))
    with pytest.raises(EngineError, match=r"\(1, 8, 8\), asked for \(1, 4, 4\)"):
        engine.bind(cache, 4, 4)
    with pytest.raises(EngineError, match="wants a float32 cache"):
        engine.bind(KVCache(bundle.target, range(3), np.float16), 8, 8)
    with pytest.raises(EngineError, match="wants a float32 cache of layers"):
        engine.bind(KVCache(bundle.target, range(2)), 8, 8)
    with pytest.raises(EngineError, match=r"slots 1\.\.1 lie outside a cache of 1"):
        engine.bind(cache, 8, 8, slot=1)


def test_an_entry_that_disagrees_with_its_file_is_refused_when_loaded(bundle: Bundle) -> None:
    entry = entry_of(bundle, "fp32-verify-1x8")
    file = bundle.path / entry.file.path
    with pytest.raises(EngineError, match="axis 1 is 8, the manifest says 4"):
        OrtEngine(entry.model_copy(update={"sequence": 4}), file, prepared=False)
    with pytest.raises(EngineError, match="differ from the manifest in"):
        OrtEngine(entry.model_copy(update={"kv_layers": [0, 1]}), file, prepared=False)


def test_a_pass_beyond_the_capacity_is_refused_before_it_runs(llama_bundle: Path) -> None:
    target = plain(llama_bundle)._lanes.free[0].target
    with pytest.raises(EngineError, match="a pass of 16 at 310 leaves the capacity 320"):
        target.replay([5] * 16, 310, 16)


def test_bound_memory_outlives_the_names_that_it_had(bundle: Bundle) -> None:
    engine = new_engine(bundle, "fp32-decode")

    def bind() -> object:
        cache = KVCache(bundle.target, range(3))
        for tensor in cache.tensors.values():
            tensor[:, :, :20] = 0.25
        bound = engine.bind(cache, 3, 3)
        bound.input_ids[:] = np.array([[7, 8, 9]])  # a temporary: its content is copied
        bound.write_index[:] = np.array([20])
        bound.logit_rows[:] = np.arange(3)
        return bound

    results = []
    for disturbed in (False, True):
        bound = bind()
        if disturbed:
            gc.collect()
            noise = [np.full(1 << 20, 255, np.uint8) for _ in range(100)]
            del noise
        bound.run()  # type: ignore[attr-defined]
        results.append(bound.logits.copy())  # type: ignore[attr-defined]
    assert np.array_equal(*results)


def test_a_result_stays_as_it_was_while_others_run(llama_bundle: Path) -> None:
    pipe = Pipeline(llama_bundle, draft="cousin", window=4)
    prompt = list(PROMPT)
    stream = pipe.stream(prompt, max_new_tokens=30)
    prompt[:] = [9] * 6  # the caller's list is the caller's
    list(stream)
    result = stream.result
    ids, scores = list(result.token_ids), list(result.scores)
    pipe.generate([11, 12, 13], max_new_tokens=30)
    assert (result.token_ids, result.scores) == (ids, scores)
    assert result.token_ids == plain(llama_bundle).generate(PROMPT, max_new_tokens=30).token_ids


def test_memory_filled_with_junk_at_every_allocation_changes_nothing(llama_bundle: Path) -> None:
    program = (
        "import sys, json, kvrelay\n"
        "pipe = kvrelay.Pipeline(sys.argv[1], draft='cousin', window=8, threads=2)\n"
        f"print(json.dumps(pipe.generate({PROMPT}, max_new_tokens=60).token_ids))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(llama_bundle)],
        env={**os.environ, "MALLOC_PERTURB_": "165"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout) == plain(llama_bundle).generate(PROMPT, max_new_tokens=60).token_ids

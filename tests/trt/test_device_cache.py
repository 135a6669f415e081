"""KV caches in GPU memory do what those in host memory do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from fake_box import FakeBox
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvrelay.cuda.entries import _runs
from kvrelay.errors import EngineError
from kvrelay.kv import HandOver, KVCache, kv_bytes
from kvrelay.manifest import ModelEntry

MODEL = ModelEntry(
    name="m", family="llama", layers=3, hidden=8, heads=2, kv_heads=2, head_dim=4, vocab_size=9, padded_vocab_size=9,
    context=150, capacity=160, rope={}, source="s", source_sha256="0" * 64,
)  # fmt: skip
SLOTS = 3
FAKE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)

slots = st.integers(0, SLOTS - 1)
places = st.integers(0, MODEL.capacity)
writes = st.tuples(st.just("write"), slots, places, places)
clears = st.tuples(st.just("clear"), slots, places, places)
swaps = st.tuples(st.just("swap"), slots, slots, places)


@FAKE
@given(st.lists(writes | clears | swaps, max_size=8), st.integers(0, 2**32 - 1))
def test_any_sequence_of_changes_leaves_the_entries_that_the_host_has(
    fake: FakeBox, changes: list[tuple[str, int, int, int]], seed: int
) -> None:
    random = np.random.default_rng(seed)
    here, there = (KVCache(MODEL, range(3), slots=SLOTS, memory=memory) for memory in ("host", "cuda"))  # type: ignore[arg-type]
    for what, slot, a, b in changes:
        if what == "swap":
            assert here.swap(slot, a % SLOTS, b) == there.swap(slot, a % SLOTS, b)
            continue
        start, end = sorted((a, b))
        values = random.standard_normal((6, 2, end - start, 4)).astype(np.float32)
        for cache in (here, there):
            if what == "clear":
                cache.clear(slot, start, end)
            else:
                assert cache.write(slot, start, values) == values.nbytes
        values[:] = np.nan  # a write has taken them
    for slot in range(SLOTS):
        assert np.array_equal(here.read(slot, 0, MODEL.capacity), there.read(slot, 0, MODEL.capacity))


def test_a_new_cache_is_zero_and_has_no_arrays_on_the_host(fake: FakeBox) -> None:
    cache = KVCache(MODEL, [0, 2], slots=2, memory="cuda")
    assert not cache.read(1, 0, MODEL.capacity).any()
    assert cache.bytes == kv_bytes(MODEL, 2, 4, 2 * MODEL.capacity)
    assert cache.address("past_value.2", 1) - cache.address("past_key.0", 0) == 7 * 2 * 160 * 4 * 4
    with pytest.raises(EngineError, match="has no arrays on the host"):
        cache.tensors  # noqa: B018


@pytest.mark.parametrize("source", ["host float32", "cuda float32", "cuda float16"])
@pytest.mark.parametrize("destination", ["host float16", "cuda float32", "cuda float16"])
def test_a_hand_over_moves_each_new_entry_once_between_any_two_places(
    fake: FakeBox, source: str, destination: str
) -> None:
    def cache(place: str, layers: list[int]) -> KVCache:
        memory, dtype = place.split()
        return KVCache(MODEL, layers, dtype, slots=2, memory=memory)  # type: ignore[arg-type]

    one, other = cache(source, [0, 1, 2]), cache(destination, [0, 2])
    hand_over = HandOver(one, other)
    random = np.random.default_rng(1)
    written = np.zeros((6, 2, MODEL.capacity, 4), one.dtype)
    for length in (3, 3, 80, 81, 150):
        start = hand_over.lengths[1]
        written[:, :, start:length] = random.standard_normal((6, 2, length - start, 4))
        one.write(1, start, written[:, :, start:length])
        hand_over.advance(length, slot=1)
        found = other.read(1, 0, MODEL.capacity)
        assert np.array_equal(found, written[[0, 1, 4, 5]].astype(other.dtype))
    expected = kv_bytes(MODEL, 2, other.dtype.itemsize, 150)
    if source != destination and "host" not in (source + destination):  # over the host: both ways count
        expected += kv_bytes(MODEL, 2, one.dtype.itemsize, 150)
    assert hand_over.bytes == expected
    assert not other.read(0, 0, MODEL.capacity).any()


@pytest.mark.parametrize("memory", ["host", "cuda"])
def test_a_draft_without_attention_has_a_cache_of_nothing(fake: FakeBox, memory: Any) -> None:
    one, other = KVCache(MODEL, [0], memory="cuda"), KVCache(MODEL, [], "float16", slots=2, memory=memory)
    hand_over = HandOver(one, other)
    hand_over.advance(9)
    assert other.swap(0, 1, 5) == hand_over.bytes == 0
    other.clear(1)
    assert other.read(0, 0, 9).shape == (0, 2, 9, 4)


def test_a_hand_over_on_the_gpu_waits_for_nothing(fake: FakeBox) -> None:
    one, other = (KVCache(MODEL, layers, memory="cuda") for layers in ([0, 1, 2], [0, 2]))
    calls = len(fake.cuda.calls)
    HandOver(one, other).advance(100)
    assert fake.cuda.calls[calls:] == ["cudaMemcpy3DAsync"] * 2, "one call for each run of neighbouring tensors"


def test_a_hand_over_to_the_gpu_returns_before_it_is_done(fake: FakeBox) -> None:
    one, other = KVCache(MODEL, [0], memory="host"), KVCache(MODEL, [0], memory="cuda")
    hand_over = HandOver(one, other)
    hand_over.advance(5)
    calls = len(fake.cuda.calls)
    hand_over.advance(30)
    made: list[Any] = fake.cuda.calls[calls:]
    assert made == ["cudaEventSynchronize", "cudaEventSynchronize", "cudaMemcpy3DAsync", "cudaEventRecord"]
    (stream,) = fake.cuda._streams()
    assert stream.queue


@given(st.lists(st.integers(0, 30), unique=True, max_size=20), st.integers(0, 5))
def test_runs_cover_every_pair_of_places_once(mine: list[int], shift: int) -> None:
    theirs = [shift + i // 2 * 3 + i % 2 for i in range(len(mine))]
    runs = _runs(mine, theirs)
    assert [(a + i, b + i) for a, b, n in runs for i in range(n)] == list(zip(mine, theirs, strict=True))
    assert len(runs) <= len(mine)
    assert math.prod(n for _, _, n in runs) > 0

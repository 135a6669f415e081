"""The KV cache stays where it is: bound once, updated in place, never moved or copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvrelay import EngineError, MemoryBudgetError, Pipeline, kv
from kvrelay.bundle import open_bundle
from kvrelay.drafts import draft_entry
from kvrelay.kv import HandOver, KVCache, kv_bytes
from kvrelay.ort.passes import OrtPass
from rig import PROMPT, assert_same, decode_entry, plain, target_cache


def passes(pipe: Pipeline) -> list[OrtPass]:
    """Every bound pass of the pipeline's first slot."""
    lane = pipe._lanes.free[0]
    drafting = [p for d in lane.drafters.values() for p in getattr(d, "_passes", {}).values()]
    return [*lane.target._passes, *drafting]


def addresses(bound: list[OrtPass]) -> list[int]:
    """Where the inputs, outputs and caches of passes lie."""
    found = []
    for each in bound:
        found += [a.ctypes.data for a in (each.input_ids, each.write_index, each.logit_rows, each.logits)]
        found += [value.data_ptr() for value in each._binding.get_outputs()]
        found += [tensor.ctypes.data for tensor in each._cache.tensors.values()]
    return found


def test_present_lies_at_the_address_of_past(llama_bundle: Path) -> None:
    pipe = Pipeline(llama_bundle, draft="self", window=8)
    pipe.generate(PROMPT, max_new_tokens=20)
    cache = target_cache(pipe)
    wanted = [cache.address(name, 0) for name in cache.tensors]
    for bound in passes(pipe):
        logits, *present = (value.data_ptr() for value in bound._binding.get_outputs())
        assert logits == bound.logits.ctypes.data
        assert present == wanted
        assert all(a % 64 == 0 for a in present)


def test_a_slot_is_bound_at_its_own_address(llama_bundle: Path) -> None:
    pipe = plain(llama_bundle)
    cache = KVCache(pipe._bundle.target, range(3), slots=3)
    bound = pipe._lanes.box.engine(decode_entry(pipe)).bind(cache, 2, 1, slot=1, batch=2)
    assert isinstance(bound, OrtPass)
    assert [v.data_ptr() for v in bound._binding.get_outputs()][1:] == [cache.address(n, 1) for n in cache.tensors]
    bound.input_ids[:] = 5
    bound.run()
    assert all(not tensor[0].any() and tensor[1:].any() for tensor in cache.tensors.values())


@pytest.mark.parametrize("draft", ["none", "int8-dynamic", "cousin"])
def test_nothing_moves_in_200_steps(llama_bundle: Path, draft: str) -> None:
    pipe = Pipeline(llama_bundle, draft=draft, window=2)
    pipe.generate(PROMPT, max_new_tokens=20, ignore_eos=True)  # binds the widths that catching up needs
    lane, bound = pipe._lanes.free[0], passes(pipe)
    before = addresses(bound)
    seen = []
    found = pipe.generate(
        PROMPT, max_new_tokens=249, ignore_eos=True, trace=lambda _: seen.append(addresses(bound) == before)
    )
    assert found.stats.passes >= 100
    assert len(found.token_ids) == 249
    assert all(seen)
    assert pipe._lanes.free == [lane]
    assert passes(pipe) == bound, "no pass was bound anew"


def test_a_canary_in_the_cache_reaches_the_next_pass(llama_bundle: Path) -> None:
    pipe = plain(llama_bundle)
    clean = pipe.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    cache = target_cache(pipe)

    def disturb(event: dict[str, Any]) -> None:
        if event["pass"] == "plain" and event["kv_length"]["after_rollback"] == 12:
            cache.tensors["past_value.1"][0, :, 3] = 7.0

    found = pipe.generate(PROMPT, max_new_tokens=30, ignore_eos=True, trace=disturb)
    same = 12 - len(PROMPT) + 1
    assert found.scores[:same] == clean.scores[:same]
    assert found.scores[same] != clean.scores[same]
    assert (cache.tensors["past_value.1"][0, :, 3] == 7.0).all(), "nothing else writes there"


@pytest.mark.parametrize("role", ["decode", "verify", "prefill"])
def test_a_pass_writes_its_own_rows_and_no_other_byte(llama_bundle: Path, role: str) -> None:
    pipe = plain(llama_bundle)
    for entry in pipe._bundle.engines(role=role, precision="fp32"):
        width = entry.sequence or 3
        cache = KVCache(pipe._bundle.target, range(3))
        random = np.random.default_rng(0)
        for tensor in cache.tensors.values():
            tensor[:] = random.normal(size=tensor.shape)
        before = {name: tensor.copy() for name, tensor in cache.tensors.items()}
        bound = pipe._lanes.box.engine(entry).bind(cache, width, entry.rows or 1)
        bound.input_ids[:] = np.arange(width) + 9
        bound.write_index[:] = 37
        bound.run()
        for name, tensor in cache.tensors.items():
            written = (tensor != before[name]).any(axis=(0, 1, 3))
            assert np.flatnonzero(written).tolist() == list(range(37, 37 + width)), (entry.name, name)


def test_entries_behind_the_length_do_not_count(llama_bundle: Path) -> None:
    pipe = Pipeline(llama_bundle, draft="skip", window=8)
    wanted = pipe.generate(PROMPT, max_new_tokens=60)
    for tensor in target_cache(pipe).tensors.values():
        tensor[:] = 1e4
    pipe._lanes.free[0].tokens = []
    assert_same(pipe.generate(PROMPT, max_new_tokens=60), wanted)


def test_values_that_are_no_numbers_end_the_request_and_their_slot_is_not_used_again(llama_bundle: Path) -> None:
    pipe = Pipeline(llama_bundle, draft="cousin", window=4)
    wanted = pipe.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    cache = target_cache(pipe)

    def disturb(event: dict[str, Any]) -> None:
        cache.tensors["past_key.0"][0, :, 2] = np.nan

    stream = pipe.stream(PROMPT, max_new_tokens=30, ignore_eos=True, trace=disturb)
    with pytest.raises(EngineError, match="not finite"):
        list(stream)
    assert pipe._lanes.free == []
    assert_same(pipe.generate(PROMPT, max_new_tokens=30, ignore_eos=True), wanted)
    assert target_cache(pipe) is not cache


def test_shared_drafts_copy_no_kv(llama_bundle: Path) -> None:
    for draft in ("none", "ngram", "self", "int4", "int8-dynamic", "skip", "cousin"):
        stats = Pipeline(llama_bundle, draft=draft, window=8).generate(PROMPT, max_new_tokens=50).stats
        assert stats.kv_bytes_copied == 0, draft
        assert stats.kv_bytes == 2 * 3 * 2 * 16 * 4 * 320


@pytest.mark.parametrize("window", [4, 16])
@pytest.mark.parametrize("draft", ["int4", "skip"])
def test_a_hand_over_copies_each_verified_entry_once_and_counts_its_bytes(
    variants_bundle: Path, draft: str, window: int
) -> None:
    pipe = Pipeline(variants_bundle, draft=draft, window=window, precision="fp32")
    entry = draft_entry(pipe._bundle, "fp32", draft)
    assert entry.kv_dtype == "float16"
    drafter: Any = pipe._lanes.free[0].drafters[draft]
    hand_over: HandOver = drafter._hand_over
    copied: list[tuple[int, int]] = []
    advance = hand_over.advance

    def watched(length: int, slot: int = 0) -> None:
        first = hand_over.lengths[0]
        advance(length)
        copied.append((first, length))
        for name, tensor in hand_over.destination.tensors.items():
            source = hand_over.source.tensors[name][0, :, :length]
            assert np.array_equal(tensor[0, :, :length], source.astype(np.float16)), name

    hand_over.advance = watched  # type: ignore[method-assign]
    result = pipe.generate(PROMPT, max_new_tokens=100, ignore_eos=True)
    assert_same(result, plain(variants_bundle).generate(PROMPT, max_new_tokens=100, ignore_eos=True))
    assert result.stats.accepted > 0
    assert copied[0] == (0, len(PROMPT))
    entries = sum(length - first for first, length in copied)
    assert entries == copied[-1][1], "every entry moves once"
    model = pipe._bundle.target
    assert result.stats.kv_bytes_copied == kv_bytes(model, len(entry.kv_layers), 2, entries)
    assert result.stats.kv_bytes_copied == 2 * len(entry.kv_layers) * 2 * 16 * 2 * entries


def test_a_cache_that_cannot_fit_is_refused_with_both_numbers(llama_bundle: Path) -> None:
    model = plain(llama_bundle)._bundle.target
    with pytest.raises(MemoryBudgetError, match=r"1000000000 slot\(s\) x 320 entries needs \d+ MiB, \d+ MiB are"):
        KVCache(model, range(3), slots=10**9)
    assert KVCache(model, range(3)).bytes == sum(t.nbytes for t in KVCache(model, range(3)).tensors.values())


def test_a_cache_fits_into_what_a_container_leaves(
    llama_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_bundle(llama_bundle).target
    needed = kv_bytes(model, model.layers, 4, model.capacity)
    monkeypatch.setattr(kv, "_CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 600000\n")
    for limit, fits in ((needed + 400_000, True), (needed + 399_999, False), ("max", True)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        if fits:
            assert KVCache(model, range(model.layers)).bytes == needed
        else:
            with pytest.raises(MemoryBudgetError, match="free memory"):
                KVCache(model, range(model.layers))

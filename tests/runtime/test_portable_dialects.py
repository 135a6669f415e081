"""The dialects `standard` and `decomposed` serve the same loop: drafts, batches, float16 caches, and counted copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kvrelay import Engine, Handle, Pipeline
from kvrelay.bundle import open_bundle
from kvrelay.kv import KVCache, kv_bytes
from kvrelay.ort import OrtEngine
from rig import PROMPT, assert_same, plain, target_cache

FORMS = [("standard", "fp16"), ("standard", "int4"), ("decomposed", "fp32"), ("decomposed", "fp16")]
ITEMSIZE = {"fp32": 4, "fp16": 2, "int4": 2}
Bundles = dict[str, Path]


@pytest.mark.parametrize(("dialect", "precision"), FORMS)
def test_every_draft_gives_the_output_of_none(portable_bundles: Bundles, dialect: str, precision: str) -> None:
    bundle = portable_bundles[dialect]
    wanted = plain(bundle, precision).generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    assert wanted.stats.kv_bytes == 2 * 3 * 2 * 16 * ITEMSIZE[precision] * open_bundle(bundle).target.capacity
    shared = ["int4"] if (dialect, precision) == ("standard", "fp16") else []
    for draft in ("ngram", "self", "skip", "cousin", *shared):
        pipe = Pipeline(bundle, draft=draft, window=8, precision=precision)
        found = pipe.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
        assert_same(found, wanted)
        assert found.stats.windows > 0
        if draft == "self":  # at width 1, which may be another shape class
            assert found.stats.acceptance is not None
            assert found.stats.acceptance > 0.9
        assert (found.stats.kv_bytes_copied > 0) is (dialect == "decomposed"), draft


def test_a_draft_of_other_activations_gets_verified_entries_handed_over(portable_bundles: Bundles) -> None:
    bundle = portable_bundles["standard"]
    wanted = plain(bundle, "fp32").generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    found = Pipeline(bundle, draft="int4", window=8, precision="fp32").generate(
        PROMPT, max_new_tokens=40, ignore_eos=True
    )
    assert_same(found, wanted)
    assert found.stats.kv_bytes_copied > 0


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_backend_writes_the_rows_of_a_pass_and_no_other_byte(portable_bundles: Bundles, precision: str) -> None:
    bundle = open_bundle(portable_bundles["decomposed"])
    standard = open_bundle(portable_bundles["standard"])
    dtype = "float32" if precision == "fp32" else "float16"
    for entry in bundle.engines(precision=precision):
        if entry.draft == "cousin":
            continue
        twin = next(e for e in standard.manifest.engines if e.name == entry.name)
        batch, width, starts = entry.batch or 2, entry.sequence or 3, [37, 5, 0, 100][: entry.batch or 2]
        engines = [OrtEngine(e, b.path / e.file.path, prepared=False) for b, e in ((bundle, entry), (standard, twin))]
        caches = [KVCache(bundle.target, range(3), dtype, slots=batch + 1) for _ in engines]
        for cache in caches:
            random = np.random.default_rng(0)
            for tensor in cache.tensors.values():
                tensor[:] = random.normal(size=tensor.shape)
        before = {name: tensor.copy() for name, tensor in caches[0].tensors.items()}
        passes = [e.bind(c, width, entry.rows or 1, slot=1, batch=batch) for e, c in zip(engines, caches, strict=True)]
        for bound in passes:
            bound.input_ids[:] = np.arange(batch * width).reshape(batch, width) + 9
            bound.write_index[:] = starts
            bound.run()
        for name, tensor in caches[0].tensors.items():
            changed = (tensor != before[name]).any(axis=(1, 3))  # [slots, Lmax]
            wanted = np.zeros_like(changed)
            for row, start in enumerate(starts):
                wanted[row + 1, start : start + width] = int(name.split(".")[1]) in entry.kv_layers
            np.testing.assert_array_equal(changed, wanted, err_msg=f"{entry.name} {name}")
            other = caches[1].tensors[name].astype(np.float32)
            np.testing.assert_allclose(tensor.astype(np.float32), other, atol=1e-5 if precision == "fp32" else 5e-3)
        layers = len(entry.kv_layers)
        assert passes[0].kv_bytes_copied == batch * kv_bytes(bundle.target, layers, tensor.itemsize, width)
        assert passes[1].kv_bytes_copied == 0


def test_a_request_counts_the_bytes_of_all_its_passes(portable_bundles: Bundles) -> None:
    pipe = plain(portable_bundles["decomposed"], "fp16")
    result = pipe.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    lane = pipe._lanes.free[0]
    entries = sum(p.runs * p.input_ids.shape[1] for p in lane.target._passes)
    assert entries >= len(PROMPT) + 29
    assert result.stats.kv_bytes_copied == kv_bytes(pipe._bundle.target, 3, 2, entries)
    assert target_cache(pipe).dtype == np.float16


@pytest.mark.parametrize(("dialect", "precision"), [("standard", "fp16"), ("decomposed", "fp16")])
def test_a_deterministic_request_in_a_batch_gives_what_it_gives_alone(
    portable_bundles: Bundles, dialect: str, precision: str
) -> None:
    with Engine(portable_bundles[dialect], precision=precision, max_batch=4, window=8, draft="skip") as engine:

        def submit(n: int) -> Handle:
            return engine.submit(PROMPT[: n + 2], deterministic=n % 2 == 0, max_new_tokens=24, ignore_eos=True)

        alone = [submit(n).result() for n in range(5)]
        together = [handle.result() for handle in [submit(n) for n in range(5)]]
        stats = engine.stats
    for n, (result, wanted) in enumerate(zip(together, alone, strict=True)):
        assert len(result.token_ids) == 24
        if n % 2 == 0:
            assert_same(result, wanted)
    assert stats.finished == 10
    assert (stats.kv_bytes_copied > 0) is (dialect == "decomposed")

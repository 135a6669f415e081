"""Pipelines and engines at places with a GPU, which here is fake: targets on TensorRT, drafts anywhere, one stream."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kvrelay
import pytest
from fake_box import FakeBox
from fake_places import fake_gpu
from kvrelay import Engine, EngineError, ParameterError, Pipeline
from kvrelay.box import Box
from kvrelay.bundle import Bundle
from kvrelay.gpu import Gpu
from kvrelay.kv import kv_bytes
from kvrelay.manifest import EngineEntry
from kvrelay.place import place_of
from kvrelay.shapes import target_shapes
from kvrelay.trt.plans import Plan

PROMPT = [50, 60, 70, 80, 90, 100, 50, 60, 70]
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "seed": 3}
TENSORRT: dict[str, Any] = {"backend": "tensorrt"}
ON_CPU: dict[str, Any] = {**TENSORRT, "draft_provider": "cpu"}


@pytest.fixture(scope="module")
def bundle(loop_bundle: Bundle) -> Bundle:
    return loop_bundle


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeBox]:
    """A fake GPU with TensorRT."""
    with fake_gpu(tmp_path, "12.6") as box:
        yield box


def plain(bundle: Bundle) -> kvrelay.Result:
    return Pipeline(bundle.path, draft="none").generate(PROMPT, **OPTIONS)


@pytest.mark.parametrize("draft", ["none", "ngram", "self"])
def test_a_target_on_tensorrt_gives_the_text_of_onnx_runtime_and_copies_no_kv(
    bundle: Bundle, gpu: FakeBox, draft: str
) -> None:
    found = Pipeline(bundle.path, draft=draft, **TENSORRT).generate(PROMPT, **OPTIONS)
    wanted = plain(bundle)
    assert (found.token_ids, found.scores, found.text) == (wanted.token_ids, wanted.scores, wanted.text)
    assert found.stats.kv_bytes_copied == 0


def test_a_draft_on_the_cpu_gets_each_entry_of_a_target_on_the_gpu_once(bundle: Bundle, gpu: FakeBox) -> None:
    pipe = Pipeline(bundle.path, draft="self", window=4, **ON_CPU)
    found = pipe.generate(PROMPT, **OPTIONS)
    wanted = plain(bundle)
    assert (found.token_ids, found.scores) == (wanted.token_ids, wanted.scores)
    assert found.stats.accepted > 0
    lane = pipe._lanes.free[0]
    assert lane.target.cache.memory == "cuda"
    # At its last proposal the draft had all but the last window's entries.
    seen = found.stats.kv_bytes_copied / kv_bytes(bundle.target, bundle.target.layers, 4, 1)
    most = len(PROMPT) + len(found.token_ids) - 1
    assert most - 4 <= seen <= most
    assert seen == int(seen)


def test_costs_of_a_draft_elsewhere_are_kept_apart(
    bundle: Bundle, gpu: FakeBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    Pipeline(bundle.path, draft="none", **TENSORRT)
    Pipeline(bundle.path, draft="none", **ON_CPU)
    Pipeline(bundle.path, draft="none")
    names = [f.name for f in (tmp_path / "cache").rglob("*costs*.json")]
    assert len(names) == 3
    assert len({re.sub(r".*-", "", name) for name in names}) == 2, "two places of the target"
    assert sum("costs-with" in name for name in names) == 1


def test_findings_about_a_plan_do_not_outlive_it(bundle: Bundle, gpu: FakeBox, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def verdicts() -> None:
        checked.clear()
        box = Box(bundle, None, checked.append, place_of("tensorrt", None))
        box.verdicts("fp32", [target_shapes(box, "fp32", 1).main])

    verdicts()
    verdicts()
    assert not any("bit for bit" in line for line in checked), "it was stored"
    plan = FakeBox.plan

    def rebuilt(self: FakeBox, bundle: Bundle, entry: EngineEntry, most: int) -> Plan:
        return self.stored(bundle, entry, plan(self, bundle, entry, most).path.read_bytes() + b" ", most)

    monkeypatch.setattr(FakeBox, "plan", rebuilt)
    verdicts()
    assert any("bit for bit" in line for line in checked), "another plan is another engine"


def test_a_receipt_names_the_gpu_and_the_plans_and_replays(bundle: Bundle, gpu: FakeBox) -> None:
    options = {"max_batch": 2, "window": 4, "group": 2, **TENSORRT}
    with Engine(bundle.path, **options) as engine:
        result = engine.submit(PROMPT, deterministic=True, **OPTIONS).result()
    assert result.token_ids == plain(bundle).token_ids
    assert result.receipt is not None
    conditions = result.receipt.conditions
    assert conditions.backend == "tensorrt 10.16.1"
    assert conditions.provider == "tensorrt"
    assert conditions.device == "Fake GPU (sm87, 8 multiprocessors)"
    assert conditions.libraries == "CUDA 12.6, driver for CUDA 12.6"
    for entry in bundle.engines(role="verify"):
        assert conditions.engines[entry.name] not in ("", entry.file.sha256), "the plan's own hash"
    with Engine(bundle.path, **options) as engine:
        again = engine.submit(PROMPT, deterministic=True, **OPTIONS).result()
    assert again.receipt == result.receipt


@pytest.mark.parametrize("left", [0, 1, 2, 3, 5])
def test_the_end_of_the_context_fits_the_profiles(bundle: Bundle, gpu: FakeBox, left: int) -> None:
    prompt = [(7 * i) % 250 + 4 for i in range(bundle.target.context - left)]
    pipe = Pipeline(bundle.path, draft="self", window=4, **TENSORRT)
    if not left:
        with pytest.raises(kvrelay.PromptError):
            pipe.generate(prompt, **OPTIONS)
        return
    for _ in range(2):
        found = pipe.generate(prompt, **OPTIONS)
        assert (len(found.token_ids), found.finish_reason) == (left, "length")
    assert found.token_ids == Pipeline(bundle.path, draft="none").generate(prompt, **OPTIONS).token_ids


def test_generations_of_several_threads_take_turns_on_one_gpu(bundle: Bundle, gpu: FakeBox) -> None:
    pipe = Pipeline(bundle.path, draft="self", window=4, **TENSORRT)
    prompts = [[4 + i, 50, 60, 70 + i] for i in range(6)]
    wanted = [Pipeline(bundle.path, draft="none").generate(p, **OPTIONS).token_ids for p in prompts]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda p: pipe.generate(p, **OPTIONS).token_ids, prompts))
    assert found == wanted


def test_threads_belong_to_onnxruntime(bundle: Bundle, gpu: FakeBox) -> None:
    with pytest.raises(ParameterError, match="no thread pool"):
        Pipeline(bundle.path, draft="none", threads=2, **TENSORRT)
    assert Pipeline(bundle.path, draft="self", threads=2, **ON_CPU).threads == 1


def test_a_dialect_that_a_backend_cannot_run_is_refused_before_a_plan_is_looked_for(
    llama_bundle: Path, gpu: FakeBox
) -> None:
    with pytest.raises(EngineError, match=r"the dialect ort is not for tensorrt.*--dialect standard or decomposed"):
        Pipeline(llama_bundle, draft="none", **TENSORRT)


def test_gpus_of_one_name_with_other_multiprocessors_share_no_findings() -> None:
    agx, nano = (Gpu("Orin", "sm87", 2**33, True, count) for count in (16, 8))
    assert agx.identity != nano.identity
    assert str(nano) == "Orin (sm87, 8 multiprocessors)"

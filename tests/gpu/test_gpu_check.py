"""The GPU check proves itself on a box without a GPU: its logic on the CPU, and what it says where nothing can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_check as gpu_check_script
import pytest
import right
from fake_places import fake_gpu
from kvrelay import BundleError
from kvrelay.bundle import open_bundle
from kvrelay.place import place_of
from make_bundle import export_seeded, without_weights
from seeded import make_weights
from setting import Outcome, Setting

HERE = Path(__file__).parent
GEOMETRY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny seeded bundle of the dialect `standard`, without its weights."""
    folder = tmp_path_factory.mktemp("gpu-check")
    options: dict[str, Any] = {"verify": ((1, 2), (1, 8), (2, 4)), "prefill": 16, "context": 320}
    without_weights(
        export_seeded(
            folder / "standard",
            GEOMETRY,
            dialect="standard",
            precisions=("fp16",),
            drafts=("skip", "int4"),
            skip=("attention.1",),
            **options,
        )
    )
    return folder


def gpu_check(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, HERE / "gpu_check.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, env=dict(os.environ))


def test_weights_that_did_not_travel_are_made_again_byte_for_byte(bundles: Path) -> None:
    folder = bundles / "standard"
    with pytest.raises(BundleError, match="missing"):
        open_bundle(folder)
    weights = make_weights(folder)
    assert open_bundle(folder).manifest.weights.bytes == weights.stat().st_size
    recipe = json.loads((folder / "seeded.json").read_text())
    kept = [p for p in recipe["pieces"] if not p["weight"]]
    assert sum(p["length"] for p in kept) < weights.stat().st_size / 5, "constants alone travel"


def test_every_check_passes_on_the_cpu(bundles: Path, tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    done = gpu_check(bundles, "--output", output, "--place", "onnxruntime:cpu", "--seconds", 400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    mine = {o["check"]: o for o in found["places"]["onnxruntime (cpu), standard"]}
    skipped = {name for name, o in mine.items() if o["status"] == "skipped"}
    assert skipped == {"CUDA graphs", "draft on the CPU"}
    assert not any(o["status"] == "failed" for o in mine.values())
    assert mine["numerics"]["figures"]["fp16-decode"]["relative difference"] == 0
    assert set(mine["losslessness"]["figures"]) == {
        f"{d}, {way}" for d in ("ngram", "skip", "int4") for way in ("greedy", "sampled")
    }
    assert sum(mine["zero KV copies"]["figures"].values()) == 0
    assert set(mine["verify over decode"]["figures"]["ms"]) == {"1", "2", "8"}
    assert set(mine["speed at batch 8"]["figures"]) == {"none", "ngram", "skip", "int4"}
    (without,) = found["places"]["onnxruntime (cpu), decomposed"]
    assert "make gpu-check-bundle" in without["detail"]


def test_what_needs_a_gpu_passes_on_a_fake_one(bundles: Path, tmp_path: Path) -> None:
    make_weights(bundles / "standard")
    with fake_gpu(tmp_path, "12.6"):
        setting = Setting(open_bundle(bundles / "standard"), place_of("tensorrt", None), lambda _: None)
        for check in (right.kv_copies, right.cuda_graphs, right.draft_on_the_cpu):
            outcome = check(setting)
            assert outcome.status == "passed", outcome
            if check is right.cuda_graphs:
                assert all(outcome.figures.values()), outcome
        del setting


def test_a_library_that_fails_while_it_builds_fails_its_place_alone(
    bundles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> None:
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr(gpu_check_script, "library_version", lambda _: "10.16.1")
    monkeypatch.setattr(gpu_check_script, "_build", build)
    outcome = gpu_check_script._open(bundles / "standard", place_of("tensorrt", None))
    assert isinstance(outcome, Outcome)
    assert (outcome.status, outcome.detail) == ("failed", "TypeError: incompatible function arguments")


def test_without_a_gpu_everything_is_skipped_with_a_reason(bundles: Path, tmp_path: Path) -> None:
    done = gpu_check(bundles, "--output", tmp_path / "found.json")
    if "sm" in done.stdout.partition("GPU: ")[2].partition("\n")[0]:
        pytest.skip("this box has a GPU")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 run, 0 failed, 8 skipped" in done.stdout
    for mine in json.loads((tmp_path / "found.json").read_text())["places"].values():
        (outcome,) = mine
        assert outcome["status"] == "skipped" and len(outcome["detail"]) > 20

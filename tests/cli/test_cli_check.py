"""``kvrelay check``: what the box has, and what a bundle's engines keep bit for bit on it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from test_cli import assert_one_clear_line, kvrelay


@pytest.fixture(scope="module")
def group_bundle(export_tiny: Callable[..., Path]) -> Path:
    """A Llama with a verify shape of two windows."""
    return export_tiny(verify=((1, 2), (1, 4), (1, 8), (2, 8), (1, 16)))


def found(*args: object) -> dict[str, Any]:
    done = kvrelay("check", *args, "--json")
    assert done.returncode == 0, done.stderr
    return {s["precision"]: s for s in json.loads(done.stdout)["precisions"]}


def test_without_a_bundle_the_box_is_described() -> None:
    done = kvrelay("check")
    assert done.returncode == 0, done.stderr
    for word in ("usable cores", "memory", "instruction sets", "Python", "TensorRT", "GPU", onnxruntime.__version__):
        assert word in done.stdout
    report = json.loads(kvrelay("check", "--json").stdout)
    assert report["usable cores"].startswith(f"{len(os.sched_getaffinity(0))} of")
    assert report["engines on the CPU"] == "can run: dialects ort, standard, decomposed"
    assert report["onnxruntime"].endswith("cpu runs")
    flags = Path("/proc/cpuinfo").read_text()
    for name, flag in (("avx2", "avx2"), ("avx512", "avx512f"), ("amx", "amx_tile")):
        has = report["instruction sets"].partition("not ")[0]
        assert (name in has.replace(";", ",").split(", ")) == (f" {flag}" in flags)


def test_the_box_is_described_where_nothing_is_installed_and_tools_fail(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho no driver here\nexit 9\n")
    tool.chmod(0o755)
    code = (
        "import sys\n"
        "for name in ('onnxruntime', 'tensorrt'): sys.modules[name] = None\n"
        "from kvrelay.cli import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers', 'onnx'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "check", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "kvrelay[cpu]" in report["onnxruntime"]
    assert report["engines on the CPU"] == "cannot run: pip install 'kvrelay[cpu]'"
    assert report["GPU"].startswith("none can be used") and "no driver here" in report["GPU"]
    assert report["TensorRT"].startswith("not installed") and "kvrelay[tensorrt]" in report["TensorRT"]
    assert report["engines on TensorRT"] == "cannot run: see TensorRT"


def test_a_bundles_shapes_are_sorted_into_classes_and_processes_compared(group_bundle: Path) -> None:
    s = found(group_bundle, "--max-batch", 3)["fp32"]
    shapes = set(s["verdicts"])
    for b, n in ((1, 2), (1, 4), (1, 8), (2, 8), (1, 16)):
        assert f"fp32-verify-{b}x{n}@{b}x{n}" in shapes
    for b in (1, 2, 3):
        assert {f"fp32-decode@{b}x1", f"fp32-decode@{b}x2", f"fp32-step@{b}x1"} <= shapes
    assert "fp32-prefill-1x16@1x16" in shapes
    inside = {name for name, verdict in s["verdicts"].items() if verdict["outside"] is None}
    assert set(s["classes"][0]) == inside
    listed = [name for names in s["classes"] for name in names]
    assert len(listed) == len(set(listed))
    assert shapes - set(listed) == {name for name, verdict in s["verdicts"].items() if verdict["unstable"]}
    # What this CPU was measured to keep.
    assert {name for name in shapes if "verify" in name or "prefill" in name} <= inside
    assert (s["windows"], s["exact_refusal"], s["class_batches"]) == ("sliding", None, [1, 2, 3])
    assert s["processes"]["process_changes"] == []
    assert s["processes"]["other_threads"] == 1
    assert s["processes"]["repeated"] and s["processes"]["prefix_kept"]


def test_the_table_says_what_follows_and_stored_findings_are_used(group_bundle: Path) -> None:
    before = found(group_bundle, "--max-batch", 2)
    manifest = (group_bundle / "manifest.json").read_bytes()
    done = kvrelay("check", group_bundle, "--max-batch", 2, "--precision", "fp32")
    assert done.returncode == 0, done.stderr
    assert "checking" not in done.stderr
    for word in (
        "fp32-verify-2x8@2x8",
        "in class",
        "stable",
        "class 1, the verifier's: fp32-verify-1x2@1x2",
        "deterministic requests: sliding windows, in fp32-verify-1x16@1x16",
        "exact: yes",
        "decoding inside the class: batch sizes 1, 2 of 1 to 2",
        "a second process: the same bits",
        "1 thread(s) in place of 2",
    ):
        assert word in done.stdout
    assert found(group_bundle, "--max-batch", 2) == before
    assert (group_bundle / "manifest.json").read_bytes() == manifest


def test_findings_are_taken_from_the_boxs_cache_unless_found_again(group_bundle: Path, box: Path) -> None:
    before = found(group_bundle, "--max-batch", 1)
    folder = box / hashlib.sha256((group_bundle / "manifest.json").read_bytes()).hexdigest()[:16]

    def doctor(kind: str, edit: Callable[[dict[str, Any]], None]) -> str:
        (file,) = folder.glob(f"{kind}-fp32-*.json")
        data = json.loads(file.read_text())
        edit(data)
        file.write_text(json.dumps(data))
        return kvrelay("check", group_bundle, "--max-batch", 1).stdout

    def change_process(stored: dict[str, Any]) -> None:
        for one in stored.values():
            one.update(process_changes=["fp32-step@1x1"], threads_change=["a prompt"], prefix_kept=False)

    text = doctor("processes", change_process)
    assert "a second process: other bits in fp32-step@1x1" in text
    assert "in place of 2: other bits in a prompt" in text
    assert "a prompt continued from a kept beginning: other bits" in text
    apart = {"outside": "logits differ", "unstable": None}
    text = doctor("shapes", lambda stored: stored.update({"fp32-prefill-1x16@1x16": apart}))
    assert "deterministic requests: windows aligned to multiples of 16, in fp32-verify-1x16@1x16" in text
    unstable = {"outside": "logits differ", "unstable": "they move with the pads"}
    text = doctor("shapes", lambda stored: stored.update({"fp32-verify-1x16@1x16": unstable}))
    assert "refused: fp32-verify-1x16@1x16 does not agree with itself (they move with the pads)" in text
    assert "exact: no: fp32-verify-1x16 does not agree with itself (logits differ)" in text
    doctor("processes", lambda stored: stored.update(dict.fromkeys(stored, "damaged")))
    doctor("classes", lambda stored: stored.update(dict.fromkeys(stored, 5)))
    assert found(group_bundle, "--max-batch", 1, "--again") == before


def test_a_target_that_quantises_activations_is_refused_with_the_reason(variants_bundle: Path) -> None:
    done = kvrelay("check", variants_bundle, "--precision", "int8-dynamic", "--max-batch", 2)
    assert done.returncode == 0, done.stderr
    assert "deterministic requests: refused: int8-dynamic-verify-1x16@1x16 does not agree with itself" in done.stdout
    assert "exact: no: int8-dynamic-verify-1x16 does not agree with itself" in done.stdout
    assert "processes and threads: not checked" in done.stdout
    assert "class 1, the verifier's: no shape" in done.stdout
    both = found(variants_bundle, "--max-batch", 1)
    assert set(both) == {"fp32", "int8-dynamic"}
    assert both["int8-dynamic"]["processes"] is None
    assert both["fp32"]["windows"] == "sliding"


def test_bad_input_is_one_line(group_bundle: Path, tmp_path: Path) -> None:
    assert_one_clear_line(kvrelay("check", tmp_path / "none"), "does not exist")
    assert_one_clear_line(kvrelay("check", group_bundle, "--precision", "fp64"), "precision='fp64'", "fp32")
    assert_one_clear_line(kvrelay("check", group_bundle, "--max-batch", 0), "--max-batch 0")


def test_the_fingerprint_module_prints_one_line_of_json(group_bundle: Path) -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvrelay.fingerprint", str(group_bundle), *options]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    runs = [run("--precision", "fp32", "--threads", "2") for _ in range(2)]
    assert [done.returncode for done in runs] == [0, 0], runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert len(runs[0].stdout.splitlines()) == 1
    data = json.loads(runs[0].stdout)
    assert data["threads"] == 2
    assert "fp32-verify-2x8@2x8" in data["sha256"]
    assert_one_clear_line(run("--precision", "fp64", "--threads", "2"), "fp64", "fp32")
    assert_one_clear_line(run("--precision", "fp32", "--threads", "2", "--shapes", "x@1xy"), "x@1xy")

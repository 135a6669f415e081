"""Backends, providers and their packages: what cannot run where it was told to is one clear error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
from kvrelay import BackendMissingError, CudaError, EngineError, ParameterError, Pipeline
from kvrelay.cli.gpu_report import jetson
from kvrelay.dialects import dialects_of, refusal
from kvrelay.gpu import gpus
from kvrelay.ort import library, probe, providers
from kvrelay.ort.threads import load_session
from kvrelay.place import HOST, draft_place_of, place_of


class Session:
    """Stands in for a session of onnxruntime-gpu, which cannot run on a box without a GPU.

    Args:
        running: providers that started.
        assigned: by provider, the operators that it runs.
    """

    def __init__(self, running: list[str], assigned: dict[str, list[str]]) -> None:
        self._running = running
        self._assigned = assigned

    def get_providers(self) -> list[str]:
        return self._running

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return [
            SimpleNamespace(ep_name=name, get_nodes=lambda ops=ops: [SimpleNamespace(op_type=op) for op in ops])
            for name, ops in self._assigned.items()
        ]


CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def test_a_session_that_fell_back_to_the_cpu_is_refused() -> None:
    with pytest.raises(EngineError, match=rf"engine verify: ONNX Runtime fell back to {CPU}, {CUDA} did not start"):
        providers.check_assignment(Session([CPU], {CPU: ["MatMul"]}), ("cuda",), "verify")


def test_operators_on_the_cpu_are_refused_unless_the_cpu_was_named() -> None:
    session = Session([CUDA, CPU], {CUDA: ["MatMul"] * 9, CPU: ["Shape", "Range", *["Attention"] * 3, "TensorScatter"]})
    with pytest.raises(EngineError, match=r'3 x Attention, 1 x TensorScatter.*provider="cuda,cpu"'):
        providers.check_assignment(session, ("cuda",), "verify")
    providers.check_assignment(session, ("cuda", "cpu"), "verify")


def test_arithmetic_on_lengths_may_stay_on_the_cpu() -> None:
    lengths = ["Shape", "Squeeze", "Range", "Unsqueeze", "Add", "Cast", "Gather", "ReduceMax"]
    providers.check_assignment(Session([CUDA, CPU], {CUDA: ["MatMul"], CPU: lengths}), ("cuda",), "decode")


def test_the_real_session_says_where_its_operators_run(llama_bundle: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = load_session(llama_bundle / "fp32-decode.onnx", options)
    providers.check_assignment(session, ("cpu",), "decode")
    session.get_providers = lambda: [CUDA, CPU]  # as where CUDA started and took no operator
    with pytest.raises(EngineError, match="GroupQueryAttention"):
        providers.check_assignment(session, ("cuda",), "decode")


def test_a_build_without_a_provider_is_named_with_the_package_that_has_it(llama_bundle: Path) -> None:
    for provider in ("cuda", "tensorrt", "tensorrt,cuda"):
        with pytest.raises((BackendMissingError, CudaError), match=r"GPU|CUDA|kvrelay\[gpu\]"):
            Pipeline(llama_bundle, draft="none", provider=provider)
    with pytest.raises(BackendMissingError, match=r"provider cuda: onnxruntime .* pip install 'kvrelay\[gpu\]'"):
        providers.check_providers(("cuda",))


def test_two_builds_of_onnxruntime_in_one_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library._refuse_two_builds.cache_clear()
    monkeypatch.setattr(library, "version", {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}.__getitem__)
    try:
        with pytest.raises(BackendMissingError, match=r"onnxruntime 1\.32\.0 and onnxruntime-gpu 1\.31\.1 share"):
            library.onnxruntime()
    finally:
        library._refuse_two_builds.cache_clear()


@pytest.mark.parametrize(
    ("backend", "provider", "words"),
    [
        ("torch", None, "one of onnxruntime, tensorrt, tensorrt-rtx"),
        ("onnxruntime", "rocm", "one of cpu, cuda, tensorrt"),
        ("onnxruntime", "cpu,cuda", "cpu last"),
        ("onnxruntime", "cuda,cuda", "cpu last"),
        ("onnxruntime", "", "one of cpu"),
        ("tensorrt", "cuda", "providers belong to onnxruntime"),
    ],
)
def test_places_that_do_not_exist_are_refused(backend: str, provider: str | None, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        place_of(backend, provider)


def test_drafts_run_where_the_target_does_unless_they_are_sent_elsewhere() -> None:
    gpu = place_of("tensorrt", None)
    assert draft_place_of(gpu, None, None) == gpu
    assert draft_place_of(gpu, None, "cpu") == HOST
    assert draft_place_of(HOST, "tensorrt-rtx", None) == place_of("tensorrt-rtx", None)
    with pytest.raises(ParameterError, match="draft_provider"):
        draft_place_of(gpu, None, "npu")
    assert (HOST.memory, gpu.memory, place_of("onnxruntime", "cuda,cpu").memory) == ("host", "cuda", "cuda")


def test_dialects_follow_the_backends_versions() -> None:
    assert dialects_of("onnxruntime", "1.32.0") == ["ort", "standard", "decomposed"]
    assert dialects_of("onnxruntime", "1.31.1") == ["standard", "decomposed"]
    assert dialects_of("tensorrt", "10.3.0") == ["decomposed"]
    assert dialects_of("tensorrt", "10.13.2.6") == ["decomposed"]
    assert dialects_of("tensorrt", "10.16.1") == dialects_of("tensorrt", "11.4.0.19") == ["standard", "decomposed"]
    assert refusal("decomposed", "tensorrt", "10.3.0") is None
    why = refusal("standard", "tensorrt", "10.3.0")
    assert why is not None and "needs 10.15" in why and "--dialect decomposed" in why


def test_a_gpu_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    code = SimpleNamespace(name="cudaErrorInsufficientDriver", __int__=lambda _: 35)
    codes: list[Any] = [type("Code", (), {"__int__": lambda _: 35, "name": code.name})(), None]
    monkeypatch.setattr("kvrelay.gpu.runtime", lambda: SimpleNamespace(cudaGetDeviceCount=lambda: tuple(codes)))
    with pytest.raises(CudaError, match="CUDA cannot count the GPUs of this box: cudaErrorInsufficientDriver"):
        gpus()
    codes[:] = [0, 0]
    with pytest.raises(CudaError, match="CUDA_VISIBLE_DEVICES"):
        gpus()


def test_a_provider_is_tried_and_not_only_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.why_it_does_not_run("cpu") is None
    monkeypatch.setattr(probe, "preload", lambda: None)
    monkeypatch.setattr(probe, "load_session", lambda *_: Session([CPU], {CPU: ["Relu"]}))
    why = probe.why_it_does_not_run("cuda")
    assert why is not None and why.startswith(f"ONNX Runtime fell back to {CPU}")


@pytest.mark.parametrize(
    ("release", "jetpack"),
    [
        ("# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64", "36.4.3 (JetPack 6)"),
        ("# R38 (release), REVISION: 2.0, GCID: 1, BOARD: generic", "38.2.0 (JetPack 7)"),
        ("something else", "an unknown release"),
    ],
)
def test_a_jetson_is_known_by_its_release(tmp_path: Path, release: str, jetpack: str) -> None:
    assert jetson(tmp_path) is None
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text(release)
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/model").write_bytes(b"NVIDIA Jetson AGX Orin\0")
    assert jetson(tmp_path) == f"NVIDIA Jetson AGX Orin, Jetson Linux {'of ' if 'unknown' in jetpack else ''}{jetpack}"


def test_the_command_line_says_in_one_line_what_is_missing(llama_bundle: Path) -> None:
    code = "from kvrelay.cli import main; main()"
    command = [sys.executable, "-c", code, "run", str(llama_bundle), "hello", "--backend", "tensorrt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    (line,) = [text for text in done.stderr.splitlines() if text.startswith("kvrelay: ")]
    assert "dialect ort is not for tensorrt" in line or "kvrelay[tensorrt]" in line

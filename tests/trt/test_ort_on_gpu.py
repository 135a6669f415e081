"""Passes of ONNX Runtime's CUDA provider over a fake GPU. The session is a stand-in: onnxruntime-gpu cannot run here.

It has the provider's rules: a host input is copied when it is bound, device memory is read on the provider's stream,
outputs stay on the device, and a captured graph keeps its addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_box import FakeBox
from fake_places import fake_gpu
from kvrelay import Engine, EngineError, Pipeline, Result
from kvrelay.bundle import Bundle
from kvrelay.cuda import Device
from kvrelay.kv import KVCache, kv_bytes
from kvrelay.ort import gpu as ort_gpu
from kvrelay.ort.engine import OrtEngine
from kvrelay.ort.threads import load_session

PROMPT = [50, 60, 70, 80, 90, 100, 50, 60, 70]
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "seed": 3}
CUDA: dict[str, Any] = {"provider": "cuda"}


class Binding:
    """What was bound, as the provider takes it."""

    def __init__(self) -> None:
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}

    def bind_input(self, name: str, device: str, index: int, dtype: Any, shape: Any, address: int) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if device == "cpu":  # copied now, whatever the host writes later
            kept = np.empty(shape, dtype)
            kept.reshape(-1).view(np.uint8)[:] = FakeSession.box.cuda.view(address, size)
            self.inputs[name] = (kept, address, dtype, shape)
        else:
            self.inputs[name] = (None, address, dtype, shape)

    def bind_output(self, name: str, device: str, index: int, dtype: Any, shape: Any, address: int) -> None:
        assert device == "cuda", f"{name} would be copied to the host in every run"
        self.outputs[name] = (None, address, dtype, shape)


class FakeSession:
    """A session whose products a CPU computes and whose memory is the fake GPU's."""

    box: FakeBox
    loaded: list[list[tuple[str, dict[str, str]]]]

    def __init__(self, file: Path, options: Any, providers: list[tuple[str, dict[str, str]]]) -> None:
        self._real = load_session(file, options)
        self.loaded.append(providers)
        self.graphs: dict[str, tuple[int, ...]] = {}
        self._options = providers[0][1]
        self._stream = int(self._options["user_compute_stream"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def get_providers(self) -> list[str]:
        return [name for name, _ in self.loaded[-1]]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return []

    def get_input_memory_infos(self) -> list[Any]:
        return [SimpleNamespace(name="Cuda") for _ in self._real.get_inputs()]

    def io_binding(self) -> Binding:
        return Binding()

    def run_with_iobinding(self, binding: Binding, options: Any) -> None:
        cuda = self.box.cuda
        addresses = tuple(a for _, a, *_ in (*binding.inputs.values(), *binding.outputs.values()))
        # The TensorRT provider has one graph for a session and does not look at the id.
        captured = self._options.get("trt_cuda_graph_enable") == "1"
        graph = "" if captured else options.get_run_config_entry("gpu_graph_id")
        assert self.graphs.setdefault(graph, addresses) == addresses, "a graph has the addresses of its capture"
        with cuda.lock:
            (stream,) = [h for h in cuda.handles if int(h) == self._stream]
            cuda._drain(stream)
        real = self._real.io_binding()
        for bind, bound in ((real.bind_input, binding.inputs), (real.bind_output, binding.outputs)):
            for name, (kept, address, dtype, shape) in bound.items():
                size = int(np.prod(shape)) * np.dtype(dtype).itemsize
                memory = kept if kept is not None else cuda.view(address, size)
                bind(name, "cpu", 0, dtype, shape, memory.ctypes.data)
        self._real.run_with_iobinding(real)


@pytest.fixture(scope="module")
def path(loop_bundle: Bundle) -> Path:
    return loop_bundle.path


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBox]:
    """A fake GPU with a stand-in for ONNX Runtime's sessions."""
    with fake_gpu(tmp_path, "13.0") as box:
        monkeypatch.setattr(FakeSession, "box", box, raising=False)
        monkeypatch.setattr(FakeSession, "loaded", [], raising=False)
        monkeypatch.setattr(ort_gpu, "load_session", FakeSession)
        monkeypatch.setattr(ort_gpu, "check_providers", lambda _: None)
        monkeypatch.setattr(ort_gpu, "preload", lambda: None)
        yield box


def plain(path: Path) -> Result:
    return Pipeline(path, draft="none").generate(PROMPT, **OPTIONS)


def test_passes_of_the_tensorrt_provider_are_not_captured_since_it_has_one_graph_for_a_session(
    path: Path, gpu: FakeBox
) -> None:
    pipe = Pipeline(path, draft="self", window=4, provider="tensorrt")
    assert pipe.generate(PROMPT, **OPTIONS).token_ids == plain(path).token_ids
    assert not pipe._lanes.box.engine(pipe._lanes._decode).captured
    for ((name, options),) in gpu_loads():
        assert name == "TensorrtExecutionProvider"
        assert options.get("trt_cuda_graph_enable", "0") == "0"


def test_a_pass_that_would_leave_the_cache_is_refused_before_it_runs(path: Path, gpu: FakeBox) -> None:
    pipe = Pipeline(path, draft="none", **CUDA)
    (entry,) = pipe._bundle.engines(role="decode")
    bound = pipe._lanes.box.engine(entry).bind(pipe._lanes.box.cache(entry), 4, 1)
    capacity = pipe._bundle.target.capacity
    for start in (-1, capacity - 3):
        bound.write_index[:] = start
        with pytest.raises(
            EngineError, match=rf"a pass of 4 at entries {start}\.\.{start} leaves the capacity {capacity}"
        ):
            bound.run()


@pytest.mark.parametrize("draft", ["none", "ngram", "self", "cousin"])
def test_it_gives_the_text_of_the_cpu_and_copies_no_kv(path: Path, gpu: FakeBox, draft: str) -> None:
    found = Pipeline(path, draft=draft, window=4, **CUDA).generate(PROMPT, **OPTIONS)
    wanted = plain(path)
    assert (found.token_ids, found.scores) == (wanted.token_ids, wanted.scores)
    assert found.stats.kv_bytes_copied == 0


def test_a_target_on_the_cpu_takes_a_draft_on_the_gpu(path: Path, gpu: FakeBox) -> None:
    found = Pipeline(path, draft="self", window=4, draft_provider="cuda").generate(PROMPT, **OPTIONS)
    assert found.token_ids == plain(path).token_ids
    assert found.stats.accepted > 0
    model = Pipeline(path, draft="none")._bundle.target
    seen = found.stats.kv_bytes_copied / kv_bytes(model, model.layers, 4, 1)
    most = len(PROMPT) + len(found.token_ids) - 1
    assert most - 4 <= seen <= most


def test_sessions_use_the_devices_stream_and_capture_graphs(path: Path, gpu: FakeBox) -> None:
    Pipeline(path, draft="none", **CUDA)
    for ((name, options),) in gpu_loads():
        assert name == "CUDAExecutionProvider"
        assert options["user_compute_stream"] == str(Device.current().stream.handle)
        assert (options["enable_cuda_graph"], options["use_tf32"]) == ("1", "0")


def gpu_loads() -> list[list[tuple[str, dict[str, str]]]]:
    assert FakeSession.loaded
    return FakeSession.loaded


def test_an_engine_that_cannot_be_captured_runs_without_graphs_and_says_so(
    path: Path, gpu: FakeBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(file: Path, options: Any, providers: list[tuple[str, dict[str, str]]]) -> FakeSession:
        if providers[0][1]["enable_cuda_graph"] == "1":
            raise EngineError("This session cannot use the graph capture feature as requested by the user")
        return FakeSession(file, options, providers)

    monkeypatch.setattr(ort_gpu, "load_session", load)
    said: list[str] = []
    pipe = Pipeline(path, draft="none", progress=said.append, **CUDA)
    assert pipe.generate(PROMPT, **OPTIONS).token_ids == plain(path).token_ids
    assert any("fp32-decode runs without a CUDA graph" in line for line in said)
    assert not pipe._lanes.box.engine(pipe._lanes._decode).captured


def test_engines_that_cannot_update_the_cache_have_their_entries_written_on_the_gpu(
    decomposed_bundle: Path, gpu: FakeBox
) -> None:
    path = decomposed_bundle
    found = Pipeline(path, draft="none", **CUDA).generate(PROMPT, **OPTIONS)
    wanted = plain(path)
    assert (found.token_ids, found.scores) == (wanted.token_ids, wanted.scores)
    assert found.stats.kv_bytes_copied == wanted.stats.kv_bytes_copied > 0


def test_eight_rows_and_three_threads_share_one_stream(path: Path, gpu: FakeBox) -> None:
    prompts = [[4 + i, 50, 60, 70 + i] for i in range(6)]
    wanted = [Pipeline(path, draft="none").generate(p, **OPTIONS).token_ids for p in prompts]
    pipe = Pipeline(path, draft="self", window=4, **CUDA)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda p: pipe.generate(p, **OPTIONS).token_ids, prompts)) == wanted
    with Engine(path, max_batch=3, window=4, group=2, **CUDA) as engine:
        handles = [engine.submit(p, deterministic=True, **OPTIONS) for p in prompts]
        results = [handle.result() for handle in handles]
    assert [r.token_ids for r in results] == wanted
    assert all(r.receipt is not None and r.receipt.conditions.provider == "cuda" for r in results)


def test_a_cache_in_the_wrong_memory_is_refused(path: Path, gpu: FakeBox) -> None:
    pipe = Pipeline(path, draft="none", **CUDA)
    (entry,) = pipe._bundle.engines(role="decode")
    cache = KVCache(pipe._bundle.target, range(3))
    with pytest.raises(EngineError, match="runs on cuda memory, its cache lies in host"):
        pipe._lanes.box.engine(entry).bind(cache, 1, 1)
    host = OrtEngine(entry, path / entry.file.path, prepared=False)
    with pytest.raises(EngineError, match="runs on host memory, its cache lies in cuda"):
        host.bind(pipe._lanes.box.cache(entry), 1, 1)


def test_the_tensorrt_provider_gets_its_caches_and_the_shapes_of_dynamic_axes(path: Path, tmp_path: Path) -> None:
    pipe = Pipeline(path, draft="none")
    bundle = pipe._bundle
    (decode,) = bundle.engines(role="decode")
    options = ort_gpu.tensorrt_options(decode, bundle.target, 8, tmp_path)
    assert (options["trt_engine_cache_enable"], options["trt_timing_cache_enable"]) == ("1", "1")
    assert decode.file.sha256[:32] in options["trt_engine_cache_path"]
    least, most = (dict(s.split(":") for s in options[f"trt_profile_{k}_shapes"].split(",")) for k in ("min", "max"))
    assert (least["input_ids"], most["input_ids"], most["write_index"]) == ("1x1", "8x64", "8")
    assert most["past_key.0"].startswith("8x2x")
    (prefill,) = bundle.engines(role="prefill")
    assert not any("profile" in key for key in ort_gpu.tensorrt_options(prefill, bundle.target, 8, tmp_path))

"""`kvrelay build` on TensorRT-RTX itself, without a GPU: what it builds, keeps, refuses and survives."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from bundles import RTX, edit_graph, edit_manifest, fake_gpu, nodes, part_of, tensorrt_of
from kvrelay.boxcache import cache_directory
from kvrelay.bundle import open_bundle
from kvrelay.cli import main
from kvrelay.errors import (
    BackendMissingError,
    CacheDirectoryError,
    KvrelayError,
    MemoryBudgetError,
    ParameterError,
    PlanError,
)
from kvrelay.kv import kv_bytes
from kvrelay.trt import device
from kvrelay.trt.build import Build
from kvrelay.trt.device import this_device
from kvrelay.trt.memory import together
from kvrelay.trt.plans import FOLDER, find_plan, read_plan
from onnx import helper, numpy_helper

pytest.importorskip("tensorrt_rtx")

DEVICES = "sm86,sm89,sm120"
SMALL = ["fp16-verify-1x2", "fp16-prefill-1x16"]
ON_RTX = ("--backend", RTX, "--device", "sm86")
MAIN = "from kvrelay.cli import main; main()"
HEAVY = ["torch", "transformers", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "cuda", "kvrelay_export"]


def start(*args: object, code: str = MAIN) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, "build", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_apart(*args: object, code: str = MAIN) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    process = start(*args, code=code)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(*args: object) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, which saves the imports."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    argv = ["kvrelay", "build", *map(str, args)]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", argv)
        try:
            main()
        except SystemExit as stop:
            status = int(stop.code or 0)
    return subprocess.CompletedProcess(argv, status, out.getvalue(), err.getvalue())


def assert_one_clear_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("kvrelay: ")]
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in line


def plans(bundle: Path) -> list[Path]:
    return sorted((cache_directory(bundle) / FOLDER).glob("*.plan"))


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, bool]]:
    """Of each engine in the printed table: its plan, and whether it was there."""
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\s+(\S+)\s+([0-9a-f]{12})\s+[\d.]+ MiB\s+(was there|[\d.]+ s)\s*$", done.stdout, re.M)
    return {engine: (plan, made == "was there") for engine, plan, made in found}


@pytest.fixture
def small(standard_bundle: Path, tmp_path: Path, cache: Path) -> Path:
    """A bundle of two engines that build in a second."""
    return part_of(standard_bundle, tmp_path / "small", SMALL)


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_every_role_builds_for_three_kinds_of_gpu_at_once_without_a_remark(
    standard_bundle: Path, cache: Path, precision: str
) -> None:
    bundle = open_bundle(standard_bundle)
    work = Build(bundle, RTX, DEVICES)
    entries = [e for e in bundle.manifest.engines if e.precision == precision]
    assert {e.role for e in entries} == {"decode", "verify", "prefill", "draft"}
    for entry in entries:
        built = work.build(entry)
        assert built.remarks == ()
        assert built.plan.key.compute_capability == ("sm86", "sm89", "sm120")
        assert len(read_plan(built.plan)) == built.plan.size > 10_000


def test_float32_and_the_decomposed_dialect_build_too(
    standard_bundle: Path, decomposed_bundle: Path, cache: Path
) -> None:
    for path, names in ((standard_bundle, ["fp32-decode"]), (decomposed_bundle, ["fp16-decode", "fp16-verify-1x2"])):
        bundle = open_bundle(path)
        work = Build(bundle, RTX, "sm86")
        for entry in bundle.manifest.engines:
            if entry.name in names:
                assert work.build(entry).remarks == ()


def test_the_command_builds_into_the_cache_and_keeps_what_is_there(small: Path) -> None:
    before = sorted(small.iterdir())
    first = run(small, "--backend", RTX, "--device", "sm89,sm86")
    assert "plans for tensorrt-rtx 1.7" in first.stdout and "sm86, sm89" in first.stdout
    assert re.search(r"^fp16-verify-1x2 will need \d+ MiB", first.stderr, re.M)
    assert re.search(r"^2 engines together will need \d+ MiB", first.stderr, re.M)
    made = rows(first)
    assert set(made) == set(SMALL) and not any(there for _, there in made.values())
    again = run(small, "--backend", RTX, "--device", "sm86,sm89")
    assert rows(again) == {name: (plan, True) for name, (plan, _) in made.items()}
    assert "will need" not in again.stderr
    assert sorted(small.iterdir()) == before


def test_building_needs_neither_torch_nor_onnx_nor_cuda_bindings(small: Path) -> None:
    blocked = f"import sys\nfor name in {HEAVY}: sys.modules[name] = None\n"
    assert set(rows(run_apart(small, *ON_RTX, code=blocked + MAIN))) == set(SMALL)


def test_a_bundle_is_built_from_any_place_and_by_any_path(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "a space" / "\u00e9 and e\u0301"
    place.mkdir(parents=True)
    small.rename(place / "bundle")
    (tmp_path / "link").symlink_to(place / "bundle")
    monkeypatch.chdir(place)
    assert set(rows(run("bundle", *ON_RTX))) == set(SMALL)
    assert all(there for _, there in rows(run(tmp_path / "link", *ON_RTX)).values())


def test_a_damaged_plan_is_built_anew(small: Path) -> None:
    run(small, *ON_RTX)
    damaged, whole = plans(small)
    for content in (damaged.read_bytes()[:1000], b"", b"random" * 1000, (small / f"{SMALL[0]}.onnx").read_bytes()):
        damaged.write_bytes(content)
        done = run(small, *ON_RTX)
        assert f"building anew: {damaged}" in done.stderr
        there = {name: there for name, (_, there) in rows(done).items()}
        assert there == {name: name not in damaged.name for name in SMALL}
    bundle = open_bundle(small)
    for entry in bundle.manifest.engines:
        assert read_plan(Build(bundle, RTX, "sm86").build(entry).plan)
    assert whole.exists()


def causal(graph: onnx.GraphProto) -> None:
    nodes(graph, "Attention")[0].attribute.append(helper.make_attribute("is_causal", 1))


def unknown_operator(graph: onnx.GraphProto) -> None:
    graph.node[-1].op_type = "Nonsense"


@pytest.mark.parametrize("edit", [causal, unknown_operator])
def test_one_wrong_graph_fails_the_build_before_any_plan_is_made(small: Path, edit: Any) -> None:
    edit_graph(small, SMALL[1], edit)
    assert_one_clear_line(run(small, *ON_RTX), SMALL[1], "node ")
    assert not plans(small)


def test_an_input_that_the_library_drops_fails_the_build(small: Path) -> None:
    def no_rows(graph: onnx.GraphProto) -> None:
        graph.initializer.append(numpy_helper.from_array(np.array([[0, 1]]), "rows"))
        for node in graph.node:
            node.input[:] = ["rows" if name == "logit_rows" else name for name in node.input]

    edit_graph(small, SMALL[0], no_rows)
    assert_one_clear_line(run(small, *ON_RTX), f"{SMALL[0]}: ", "Unused Input: logit_rows", "not built")
    assert not plans(small)


@pytest.mark.parametrize(
    "moment",
    [
        "progress = lambda line: 'Building engine' in line and die()",  # in the library
        "boxcache.os.fsync = lambda _: die()",  # while the plan is written
        "plans.publish_json = lambda *_: die()",  # when it is written, before its record is
    ],
)
def test_a_killed_build_leaves_nothing_that_loads_and_the_next_one_completes_it(small: Path, moment: str) -> None:
    code = (
        "import os, sys\n"
        "from kvrelay import boxcache, bundle\n"
        "from kvrelay.trt import build, plans\n"
        "die = lambda: os.kill(os.getpid(), 9)\n"
        "progress = lambda line: None\n"
        f"{moment}\n"
        "opened = bundle.open_bundle(sys.argv[2])\n"
        "build.Build(opened, 'tensorrt-rtx', 'sm86', progress=progress).build(opened.manifest.engines[0])\n"
    )
    assert run_apart(small, code=code).returncode == -signal.SIGKILL
    bundle = open_bundle(small)
    device = Build(bundle, RTX, "sm86").device
    for entry in bundle.manifest.engines:
        with pytest.raises(PlanError, match="has no plan"):
            find_plan(bundle, entry, device)
    assert not any(there for _, there in rows(run(small, *ON_RTX)).values())
    assert all(read_plan(find_plan(bundle, entry, device)) for entry in bundle.manifest.engines)
    assert not list((cache_directory(small) / FOLDER).glob("*.part"))


def test_ctrl_c_ends_a_build_where_the_library_asks_whether_to_go_on(small: Path) -> None:
    bundle = open_bundle(small)
    seen: list[str] = []

    def interrupt(line: str) -> None:
        seen.append(line)
        if len(seen) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    work = Build(bundle, RTX, "sm86", progress=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore the signal
    try:
        with pytest.raises(KeyboardInterrupt):
            work.build(bundle.manifest.engines[0])
    finally:
        signal.signal(signal.SIGINT, before)
    assert not plans(small)
    assert any("Building engine" in line for line in seen)
    assert work.build(bundle.manifest.engines[0]).seconds  # the lock is free again


def test_two_builds_of_one_bundle_share_the_work(small: Path) -> None:
    both = [start(small, *ON_RTX) for _ in range(2)]
    tables = []
    for process in both:
        out, err = process.communicate(timeout=300)
        tables.append(rows(subprocess.CompletedProcess(process.args, process.returncode, out, err)))
    for name in SMALL:
        (one, one_there), (other, other_there) = tables[0][name], tables[1][name]
        assert one == other
        assert one_there != other_there
    assert len(plans(small)) == len(SMALL)


def test_a_cache_that_cannot_be_written_is_one_clear_line(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "file" / "cache"))
    assert_one_clear_line(run(small, *ON_RTX), "no folder for the box's cache can be written", "set KVRELAY_CACHE")


@pytest.mark.parametrize(
    ("taken", "message"), [(FOLDER, "plans cannot be written to {}"), (f"{FOLDER}/lock", "cannot lock {}/lock")]
)
def test_a_plan_folder_that_cannot_be_used_is_one_clear_line(small: Path, taken: str, message: str) -> None:
    place = cache_directory(small) / taken
    if taken == FOLDER:
        place.write_text("a file where the folder would be")
    else:
        place.mkdir(parents=True)
    folder = cache_directory(small) / FOLDER
    assert_one_clear_line(run(small, *ON_RTX), message.format(folder), "set KVRELAY_CACHE")


@pytest.mark.parametrize("most", [2**31, 10**20])
def test_a_batch_that_the_library_cannot_count_to_is_one_clear_line(
    standard_bundle: Path, tmp_path: Path, cache: Path, most: int
) -> None:
    bundle = part_of(standard_bundle, tmp_path / "dynamic", ["fp16-decode"])
    done = run(bundle, *ON_RTX, "--max-batch", most)
    assert_one_clear_line(done, "fp16-decode: the profile decode is refused: input_ids", str(most), "smaller --max-b")


def test_what_a_progress_function_raises_ends_the_build_and_is_raised(small: Path) -> None:
    def tell(line: str) -> None:
        if "Building engine" in line:
            raise ZeroDivisionError("of the caller")

    bundle = open_bundle(small)
    with pytest.raises(ZeroDivisionError, match="of the caller"):
        Build(bundle, RTX, "sm86", progress=tell).build(bundle.manifest.engines[0])
    assert not plans(small)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_read_only_plan_folder_is_one_clear_error(small: Path, cache: Path) -> None:
    bundle = open_bundle(small)
    work = Build(bundle, RTX, "sm86")
    folder = cache_directory(small) / FOLDER
    folder.chmod(0o555)
    try:
        with pytest.raises((CacheDirectoryError, OSError), match=str(folder)):
            work.build(bundle.manifest.engines[0])
    finally:
        folder.chmod(0o755)


def test_other_dialects_are_refused_with_the_export_that_makes_the_right_one(
    small: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorrt_of(monkeypatch, "10.3.0", without=["IKVCacheUpdateLayer"])
    with pytest.raises(PlanError, match=r"is of dialect standard, tensorrt 10\.3\.0 takes decomposed: .* --dialect d"):
        Build(open_bundle(small), "tensorrt")
    edit_manifest(small, lambda m: [e.update(dialect="ort") for e in m["engines"]])
    words = ["is of dialect ort", f"`kvrelay export checkpoint --dialect standard --output {small}-standard`"]
    assert_one_clear_line(run(small, *ON_RTX), *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--backend", "cuda"), ["--backend cuda: one of tensorrt, tensorrt-rtx"]),
        (("--backend", RTX, "--device", "sm87"), ["--device sm87", "builds for sm75, sm80, sm86", "not for sm87"]),
        (("--backend", RTX, "--device", "sm86,gtx"), ["not for gtx"]),
        (("--backend", RTX, "--device", ","), ["--device ,"]),
        ((*ON_RTX, "--max-batch", "0"), ["--max-batch 0: at least 1"]),
    ],
)
def test_bad_input_is_one_clear_line(small: Path, options: tuple[str, ...], words: list[str]) -> None:
    assert_one_clear_line(run(small, *options), *words)


@pytest.mark.parametrize(
    ("backend", "module", "package"),
    [
        ("tensorrt", "tensorrt", "kvrelay[tensorrt]"),
        (RTX, "tensorrt_rtx", "tensorrt-rtx-cu13"),
    ],
)
def test_a_missing_library_is_named_with_its_package(
    small: Path, monkeypatch: pytest.MonkeyPatch, backend: str, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert_one_clear_line(run(small, "--backend", backend), module, package)


def test_an_import_that_fails_for_a_shared_library_says_which(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.10: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    assert_one_clear_line(run(small), "libnvinfer.so.10: cannot open", "pip install")
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__="8.6.1"))
    assert_one_clear_line(run(small), "TensorRT 8.6.1 is installed, 10.3 or newer is needed")


def test_without_a_gpu_the_current_device_is_refused_with_what_is_missing(
    small: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(small)
    with monkeypatch.context() as patch:
        for name in ("cuda", "cuda.bindings", "cuda.bindings.runtime", "cuda.cudart"):
            patch.setitem(sys.modules, name, None)
        assert_one_clear_line(run(small, "--backend", RTX), "CUDA needs the Python module cuda", "cuda-python")
    fake_gpu(monkeypatch, error=100)
    with pytest.raises(BackendMissingError, match=r"no GPU can be used here: cudaErrorNoDevice \(100\).*--device sm86"):
        Build(bundle, RTX)

    def missing(_: int) -> None:
        raise RuntimeError("Failed to dlopen\nlibcuda.so.1")

    with monkeypatch.context() as patch:
        patch.setattr(device, "cuda_runtime", lambda: SimpleNamespace(cudaGetDeviceProperties=missing))
        with pytest.raises(BackendMissingError, match=r"no GPU can be used here: Failed to dlopen libcuda\.so\.1: ins"):
            Build(bundle, RTX)
    tensorrt_of(monkeypatch, "10.16.1")
    with pytest.raises(BackendMissingError, match=r"install or update the NVIDIA driver$"):
        Build(bundle, "tensorrt")
    with pytest.raises(ParameterError, match=r"--device sm86: TensorRT builds for the GPU that it runs on"):
        Build(bundle, "tensorrt", "sm86")


def test_what_does_not_fit_on_this_gpu_is_refused_before_it_is_built(
    small: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(small)
    fake_gpu(monkeypatch)
    work = Build(bundle, RTX)
    entry = bundle.manifest.engines[0]
    memory = work.examine(entry)
    model = bundle.target
    assert memory.kv == kv_bytes(model, model.layers, 2, model.capacity)
    hidden, kv, mlp = 128, 64, 128
    products = model.layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * mlp)
    least = 2 * (products + 2 * model.padded_vocab_size * hidden)
    assert least < memory.weights < 1.2 * least
    fake_gpu(monkeypatch, free=memory.total - 1)
    with pytest.raises(MemoryBudgetError, match=rf"{entry.name} would need .* of 8192 MiB are free: .*--max-batch"):
        work.examine(entry)
    fake_gpu(monkeypatch, free=memory.total - 1, integrated=True)  # where the file cache counts as used
    assert work.examine(entry) == memory
    both = together([memory, memory])
    assert (both.weights, both.kv, both.activations) == (2 * memory.weights, memory.kv, memory.activations)


def test_tensorrt_builds_for_this_gpu_by_name_and_keeps_its_timing_cache(
    small: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu(monkeypatch)
    tensorrt_of(monkeypatch, "10.16.1")
    bundle = open_bundle(small)
    work = Build(bundle, "tensorrt")
    with pytest.warns(DeprecationWarning, match="Timing cache"):  # of TensorRT-RTX, which plays TensorRT here
        built = [work.build(entry) for entry in bundle.manifest.engines]
    assert {b.plan.key.gpu_name for b in built} == {"NVIDIA RTX A2000, 26 multiprocessors"}
    assert {b.plan.key.compute_capability for b in built} == {("sm86",)}
    (timing,) = (cache_directory(small) / FOLDER).glob("timing-*.cache")
    assert timing.stat().st_size
    here = this_device("tensorrt")
    for one in built:
        assert find_plan(bundle, one.entry, here) == one.plan
    with pytest.raises(KvrelayError, match=r"what is stored is for tensorrt 10\.16\.1"):
        find_plan(bundle, built[0].entry, this_device(RTX))
    fake_gpu(monkeypatch, multiprocessors=12)  # a smaller GPU of the same name, as the modules of one Jetson are
    with pytest.raises(PlanError, match=r"12 multiprocessors\); what is stored is for NVIDIA RTX A2000, 26 multi"):
        find_plan(bundle, built[0].entry, this_device("tensorrt"))

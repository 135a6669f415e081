"""Every name of TensorRT and CUDA that the runtime uses exists in the bindings of the versions that it says it runs on.

The bindings are real; the libraries that they load are placeholders, compiled here, since no GPU is needed to list
names. The four wheels of TensorRT have 1.1 to 1.3 MB each, CUDA's 8 MB, those of the older cuda-python 26 MB.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import kvrelay
import pytest
from fake_cuda import FakeCuda

RUNTIME = Path(kvrelay.__file__).parent
FILES = sorted([*(RUNTIME / "trt").glob("*.py"), *(RUNTIME / "cuda").glob("*.py"), *RUNTIME.glob("gpu.py")])
PROGRAM = Path(__file__).with_name("names_used.py")

# JetPack 6.2, 7.0 and 7.2, and desktops.
VERSIONS = {
    "10.3": "tensorrt_cu12_bindings==10.3.0",
    "10.13": "tensorrt_cu12_bindings==10.13.*",
    "10.16": "tensorrt_cu13_bindings==10.16.*",
    "11.4": "tensorrt_cu13_bindings==11.4.*",
}
CUDA = ("cuda-bindings==13.*", "cuda-pathfinder==1.*")
OLD_CUDA = ("cuda-python==12.6.*",)

# Names that not every version has: the file, the guard that it must contain, and what that guards.
GUARDED = {
    "contexts.py": (
        'if not hasattr(library, "CudaGraphStrategy"):',
        {
            "CudaGraphStrategy",
            "DynamicShapesKernelSpecializationStrategy",
            "create_runtime_config",
            "cuda_graph_strategy",
            "dynamic_shapes_kernel_specialization_strategy",
        },
    ),
    "engine_check.py": ('if not hasattr(engine, "get_aliased_input_tensor"):', {"get_aliased_input_tensor"}),
    "build.py": (
        'if self.device.backend == "tensorrt-rtx":',
        {"ComputeCapability", "num_compute_capabilities", "set_compute_capability"},
    ),
    "device.py": ('if backend == "tensorrt-rtx":', {"ComputeCapability"}),
    "network_view.py": (
        "kind = getattr(trt.LayerType, name, None)",
        {"IAttentionOutputLayer", "IKVCacheUpdateLayer", "KVCacheMode", "attention", "cache_mode"},
    ),
}
SYMBOLS = (
    "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getBuilderPluginRegistry",
    "getNvOnnxParserVersion", "getPluginRegistry", "initLibNvInferPlugins",
)  # fmt: skip


@pytest.fixture(scope="session")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that unpacks wheels into a folder, and skips where no package can be had."""
    kept: dict[tuple[str, ...], Path] = {}

    def unpack(*packages: str) -> Path:
        if packages not in kept:
            folder = tmp_path_factory.mktemp("wheels")
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            done = subprocess.run([*download, "--dest", str(folder), *packages], capture_output=True, text=True)
            if done.returncode:
                if "No matching distribution" in done.stderr and "from versions: none" not in done.stderr:
                    pytest.fail(f"{packages} exist no more: {done.stderr}")
                pytest.skip(f"{', '.join(packages)} cannot be downloaded here")
            for wheel in folder.glob("*.whl"):
                zipfile.ZipFile(wheel).extractall(folder)
            kept[packages] = folder
        return kept[packages]

    return unpack


def with_placeholders(folder: Path) -> Path:
    """Compile the libraries that the bindings load, beside them: functions that are never called."""
    bindings = folder / "tensorrt_bindings"
    major = re.search(r'__version__ = "(\d+)', (bindings / "__init__.py").read_text())
    assert major is not None
    source = folder / "placeholders.c"
    source.write_text("".join(f"void* {name}(void) {{ return 0; }}\n" for name in SYMBOLS))
    for name in ("nvinfer", "nvinfer_plugin", "nvonnxparser"):
        library = bindings / f"lib{name}.so.{major.group(1)}"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return folder


def names_used(module: str, cuda: str, *folders: Path) -> dict[str, Any]:
    """What ``names_used.py`` prints about one version."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, str(PROGRAM), module, cuda, *map(str, FILES)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def unguarded(missing: list[str]) -> list[str]:
    """The missing names that no guard keeps from being used."""
    return [name for name in missing if name.split(".")[-1] not in GUARDED.get(name.split(":")[0], ("", set()))[1]]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_exists_or_is_guarded(downloads: Any, version: str) -> None:
    folder = with_placeholders(downloads(VERSIONS[version]))
    found = names_used("tensorrt_bindings", "cuda.bindings.runtime", folder, downloads(*CUDA))
    assert found["version"].startswith(version)
    assert found["unknown"] == [], "names on things of unknown type: add the receiver to names_used.RECEIVERS"
    assert unguarded(found["missing"]) == []
    assert len(found["used"]) > 150
    for name in ("IExecutionContext.execute_async_v3", "runtime.cudaGraphLaunch", "INetworkDefinition.add_topk"):
        assert name in found["used"], "the names are not found any more"


def test_what_is_guarded_is_guarded_in_these_words_and_exists_somewhere(downloads: Any) -> None:
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("tensorrt-rtx is not installed: its names cannot be looked up")
    found = names_used("tensorrt_rtx", "cuda.bindings.runtime", downloads(*CUDA))
    assert found["missing"] == found["unknown"] == []
    used = {name.split(".")[-1] for name in found["used"]}
    for file, (guard, names) in GUARDED.items():
        assert guard in (RUNTIME / "trt" / file).read_text()
        assert names <= used, f"{file} does not use {names - used}"


@pytest.mark.full
def test_the_older_cuda_python_has_the_names_too(downloads: Any) -> None:
    folder = with_placeholders(downloads(VERSIONS["10.3"]))
    found = names_used("tensorrt_bindings", "cuda.cudart", folder, downloads(*OLD_CUDA))
    assert unguarded(found["missing"]) == []
    assert "cudart.cudaGraphLaunch" in found["used"]


def test_a_wrong_name_would_be_found(downloads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trt").mkdir()
    file = tmp_path / "trt" / "wrong.py"
    file.write_text(
        "def f(trt, builder, engine, cuda):\n"
        "    network = builder.create_network(0)\n"
        "    network.add_shape(None).get_outputs(0)\n"
        "    engine.create_context()\n"
        "    cuda.cudaMallocs(5)\n"
        "    getattr(cuda, 'cudaFrees')(5)\n"
        "    trt.DataType.FLOAT99\n"
        "    something.execute_async_v3(0)\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "FILES", [file])
    folder = with_placeholders(downloads(VERSIONS["11.4"]))
    found = names_used("tensorrt_bindings", "cuda.bindings.runtime", folder, downloads(*CUDA))
    assert [name.split(": ")[1] for name in found["missing"]] == [
        "DataType.FLOAT99",
        "ICudaEngine.create_context",
        "IShapeLayer.get_outputs",
        "cudaFrees",
        "runtime.cudaMallocs",
    ]
    assert found["unknown"] == ["wrong.py: something.execute_async_v3"]


def test_the_fake_takes_the_arguments_of_the_real_calls(downloads: Any) -> None:
    program = "import json, cuda.bindings.runtime as r; print(json.dumps({n: getattr(r, n).__doc__ for n in dir(r)}))"
    environment = {**os.environ, "PYTHONPATH": str(downloads(*CUDA))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    real = json.loads(done.stdout)
    calls = {name: c for name, c in vars(FakeCuda).items() if name.startswith("cuda") and inspect.isfunction(c)}
    assert len(calls) > 20
    for name, call in calls.items():
        arguments = re.match(rf"{name}\((.*)\)", real[name].splitlines()[0])
        assert arguments is not None, name
        wanted = [part for part in arguments.group(1).split(",") if part.strip()]
        assert len(wanted) == len(inspect.signature(call).parameters) - 1, name

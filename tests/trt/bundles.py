"""What tests do to bundles, and the fakes that stand in for a GPU and for TensorRT's own module."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import pytest
from kvrelay.bundle import file_sha256
from kvrelay.trt import device

RTX = "tensorrt-rtx"


def part_of(bundle: Path, copy: Path, names: Sequence[str]) -> Path:
    """Copy a bundle with the named engines alone."""
    shutil.copytree(bundle, copy)
    edit_manifest(copy, lambda m: m.update(engines=[e for e in m["engines"] if e["name"] in names]))
    return copy


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    file = bundle / "manifest.json"
    manifest = json.loads(file.read_text())
    edit(manifest)
    file.write_text(json.dumps(manifest))


def edit_graph(bundle: Path, name: str, edit: Callable[[onnx.GraphProto], None]) -> None:
    """Change the graph of an engine, and its hash in the manifest."""
    file = bundle / f"{name}.onnx"
    model = onnx.load(file, load_external_data=False)
    edit(model.graph)
    file.write_bytes(model.SerializeToString())

    def rehash(manifest: dict[str, Any]) -> None:
        (entry,) = [e for e in manifest["engines"] if e["name"] == name]
        entry["file"].update(bytes=file.stat().st_size, sha256=file_sha256(file))

    edit_manifest(bundle, rehash)


def nodes(graph: onnx.GraphProto, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.op_type == op_type]


class _CudaError(IntEnum):
    cudaSuccess = 0
    cudaErrorNoDevice = 100


def fake_gpu(
    patch: pytest.MonkeyPatch, *, free: int = 2**33, integrated: bool = False, error: int = 0, multiprocessors: int = 26
) -> None:
    """Let kvrelay see an RTX A2000 with 8 GiB, or a CUDA call that fails."""
    properties = SimpleNamespace(
        major=8,
        minor=6,
        name=b"NVIDIA RTX A2000\0\0",
        integrated=int(integrated),
        multiProcessorCount=multiprocessors,
    )
    cuda = SimpleNamespace(
        cudaError_t=_CudaError,
        cudaGetDeviceProperties=lambda _: (_CudaError(error), properties),
        cudaMemGetInfo=lambda: (_CudaError(error), free, 2**33),
    )
    patch.setattr(device, "cuda_runtime", lambda: cuda)


def tensorrt_of(patch: pytest.MonkeyPatch, version: str, *, without: Sequence[str] = ()) -> None:
    """Let TensorRT-RTX play TensorRT ``version``, which lacks some names of its module."""
    real = pytest.importorskip("tensorrt_rtx")
    module = ModuleType("tensorrt")
    module.__dict__.update({k: v for k, v in vars(real).items() if k not in without and not k.startswith("__")})
    module.__version__ = version  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "tensorrt", module)

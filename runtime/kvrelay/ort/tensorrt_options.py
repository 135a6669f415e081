"""Options of ONNX Runtime's TensorRT provider: engines and timings kept in the box's cache, shapes of dynamic axes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..manifest import EngineEntry, ModelEntry
from ..trt.profiles import profiles_of

__all__ = ["tensorrt_engine_folder", "tensorrt_options"]


def tensorrt_engine_folder(entry: EngineEntry, cache: Path) -> Path:
    """Return the folder of an engine's compiled forms: by the graph's hash, so that none serves another graph."""
    return cache / "ort-tensorrt" / entry.file.sha256[:32]


def tensorrt_options(entry: EngineEntry, model: ModelEntry, max_batch: int, cache: Path) -> dict[str, str]:
    """Return the provider's options for one engine. The provider itself keys its files by GPU and TensorRT."""
    folder = tensorrt_engine_folder(entry, cache)
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(folder),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(folder.parent),
        # The graph's own types rule: without this its float16 products would run as float32.
        "trt_fp16_enable": str(int(entry.activations == "float16")),
    }
    profiles = profiles_of(entry, model, max_batch)
    if profiles[0].name != "static":
        # One profile over all: the provider keeps a set of shapes for each pass of a session, not for each binding.
        shapes = [profile.shapes(entry, model) for profile in profiles]
        least = {name: tuple(map(min, *(s[name][0] for s in shapes))) for name in shapes[0]}
        usual = {name: shapes[0][name][1] for name in shapes[0]}
        most = {name: tuple(map(max, *(s[name][2] for s in shapes))) for name in shapes[0]}
        for kind, sizes in (("min", least), ("opt", usual), ("max", most)):
            options[f"trt_profile_{kind}_shapes"] = _written(sizes)
    return options


def _written(sizes: Mapping[str, tuple[int, ...]]) -> str:
    """Return shapes in the form that the provider reads: ``name:2x3,name:4``."""
    return ",".join(f"{name}:{'x'.join(map(str, size))}" for name, size in sizes.items())

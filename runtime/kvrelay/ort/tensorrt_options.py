"""Options of ONNX Runtime's TensorRT provider: engines and timings kept in the box's cache, shapes of dynamic axes."""

from __future__ import annotations

from pathlib import Path

from .. import contract
from ..manifest import EngineEntry, ModelEntry

__all__ = ["tensorrt_engine_folder", "tensorrt_options"]

# Rows and tokens of a pass that one optimisation profile covers, of engines with dynamic axes.
_MOST_ROWS = 8
_MOST_TOKENS = 64


def tensorrt_engine_folder(entry: EngineEntry, cache: Path) -> Path:
    """Return the folder of an engine's compiled forms: by the graph's hash, so that none serves another graph."""
    return cache / "ort-tensorrt" / entry.file.sha256[:32]


def tensorrt_options(entry: EngineEntry, model: ModelEntry, cache: Path) -> dict[str, str]:
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
    if entry.batch is None or entry.sequence is None:
        smallest, usual, largest = ((1, 1), (1, 1), (_MOST_ROWS, entry.sequence or _MOST_TOKENS))
        for name, (batch, width) in (("min", smallest), ("opt", usual), ("max", largest)):
            options[f"trt_profile_{name}_shapes"] = _shapes(entry, model, batch, width)
    return options


def _shapes(entry: EngineEntry, model: ModelEntry, batch: int, width: int) -> str:
    """Return the shapes of all inputs in the form that the provider reads: ``name:2x3,name:4``."""
    cached = (batch, model.kv_heads, model.capacity, model.head_dim)
    sizes: dict[str, tuple[int, ...]] = {
        contract.INPUT_IDS: (batch, width),
        contract.WRITE_INDEX: (batch,),
        contract.LOGIT_ROWS: (batch, entry.rows or min(width, 16)),
        **dict.fromkeys(contract.past_names(entry.kv_layers), cached),
    }
    return ",".join(f"{name}:{'x'.join(map(str, size))}" for name, size in sizes.items())

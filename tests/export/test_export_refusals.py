"""What cannot be exported faithfully is refused by the config key that stands in the way."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from kvrelay_export.errors import ExportError
from kvrelay_export.exporter import ExportOptions, export_bundle
from kvrelay_export.source import load_checkpoint
from tiny import build_model, save_model


def saved(folder: Path, family: str = "llama", drop: tuple[str, ...] = (), **changes: Any) -> str:
    """Save a tiny model and change its config.json."""
    save_model(folder, build_model(family))
    file = folder / "config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k not in drop}
    file.write_text(json.dumps({**config, **changes}))
    return str(folder)


def refused(source: str, *parts: str) -> None:
    with pytest.raises(ExportError) as caught:
        load_checkpoint(source)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "gpt_neox"])
def test_another_model_type_is_refused(tmp_path: Path, model_type: str) -> None:
    refused(saved(tmp_path, model_type=model_type), f"model_type='{model_type}'", "llama, qwen2, qwen3")


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"sliding_window": 16}, "sliding_window=16"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, "sliding_window=16"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types='sliding_attention'"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("llama", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar=256"),
        ("llama", {"attention_chunk_size": 32}, "attention_chunk_size=32"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor=0.25",
        ),
        (
            "llama",
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
            "quantization_config='bitsandbytes'",
        ),
    ],
)
def test_a_feature_that_would_be_dropped_is_refused_by_key(
    tmp_path: Path, family: str, changes: dict[str, Any], named: str
) -> None:
    refused(saved(tmp_path, family, **changes), f"config key {named}")


SPELLINGS = {
    "rope_parameters": lambda rope: {"rope_parameters": {"rope_type": rope.pop("type"), "rope_theta": 1e4, **rope}},
    "rope_scaling and rope_type": lambda rope: {"rope_scaling": {"rope_type": rope.pop("type"), **rope}},
    "rope_scaling and type": lambda rope: {"rope_scaling": rope},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("rope_type", ["foo", "dynamic", "longrope"])
def test_a_rotation_that_is_unknown_or_changes_with_the_length_is_refused(
    tmp_path: Path, rope_type: str, spelling: str
) -> None:
    rope = {"type": rope_type, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    source = saved(tmp_path, drop=("rope_parameters",), **SPELLINGS[spelling](rope))
    refused(source, f"rope_type='{rope_type}'", "default, linear, llama3, yarn")


def test_a_context_over_the_model_s_limit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    options = ExportOptions(source, tmp_path / "bundle", drafts=(), context=513)
    with pytest.raises(ExportError, match=r"--context 513 is over max_position_embeddings 512 of model"):
        export_bundle(options)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precisions": ()}, "no target precision"),
        ({"drafts": ("medusa",)}, "draft 'medusa' is unknown"),
        ({"verify": ((1, 1),)}, "verify shape 1x1"),
        ({"verify": ((4, 8),)}, "at least one of batch 1"),
        ({"prefill": 1}, "prefill chunk 1"),
        ({"context": 0}, "context 0"),
        ({"dialect": "onnx"}, "dialect 'onnx' is unknown: ort, standard, decomposed"),
        ({"dialect": "standard", "drafts": ("int8-dynamic",)}, "int8-dynamic is not part of the standard dialect"),
        ({"dialect": "standard", "draft_kv": "float16", "drafts": ("int4",)}, "part of the ort dialect only"),
        ({"dialect": "standard", "draft_kv": "float16", "drafts": ()}, "part of the ort dialect only"),
        ({"precisions": ("fp16",)}, "fp16 is not part of the ort dialect; it has fp32, int8, int4, int8-dynamic; "),
        ({"precisions": ("fp16",)}, "--dialect standard or decomposed has it"),
        ({"dialect": "decomposed", "precisions": ("int4",)}, "int4 is not part of the decomposed dialect; it has fp32"),
        ({"dialect": "decomposed", "drafts": ("int8",)}, "int8 is not part of the decomposed dialect"),
        ({"activations": "float16"}, "--activations float16: it is for int8 and int4 weights in the standard dialect"),
        (
            {"dialect": "standard", "precisions": ("fp16",), "activations": "float32"},
            "--activations float32: it is for",
        ),
        ({"drafts": ("skip",), "skip": ("attention.0", "mlp.2")}, "'mlp.2' is no sublayer"),
        ({"drafts": ("skip",), "skip": ("mlp.1", "mlp.1")}, "named twice"),
        ({"drafts": ("skip",), "skip": ("attention.0", "attention.1", "mlp.0", "mlp.1")}, "leaves no draft"),
        ({"drafts": ("skip",), "skip": ()}, "names no sublayer"),
        ({"drafts": ("skip",)}, "no skip list is stored"),
    ],
)
def test_options_that_make_no_bundle_are_refused_before_anything_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("kvrelay_export.exporter.trace", lambda *_: pytest.fail("traced"))
    source = saved(tmp_path / "model")
    options: dict[str, Any] = {"drafts": (), "context": 64, "verify": ((1, 2),), "precisions": ("fp32",), **changes}
    with pytest.raises(ExportError, match=re.escape(message)):
        export_bundle(ExportOptions(source, tmp_path / "bundle", **options))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]

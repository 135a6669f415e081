"""Which checkpoints the exporter supports. Everything else is refused by the config key that stands in the way."""

from __future__ import annotations

from typing import Any

from .errors import ExportError

__all__ = ["FAMILIES", "check_config"]

FAMILIES = ("llama", "qwen2", "qwen3")
# Rotations whose tables depend on the position alone; `dynamic` and `longrope` change with the sequence length.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Features that the families above lack but a config may ask for: exported without them, a model degenerates silently.
_REFUSED_WHEN_SET = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_chunk_size",
    "num_experts",
    "num_local_experts",
    "no_rope_layers",
)


def check_config(config: Any, *, gguf: bool) -> None:
    """Refuse what cannot be exported faithfully.

    Raises:
        ExportError: names the config key and its value.
    """

    def refuse(key: str, value: Any, supported: str) -> None:
        raise ExportError(f"config key {key}={value!r} is not supported; supported: {supported}")

    if config.model_type not in FAMILIES:
        refuse("model_type", config.model_type, ", ".join(FAMILIES))
    for key in _REFUSED_WHEN_SET:
        if getattr(config, key, None):
            refuse(key, getattr(config, key), "unset")
    if getattr(config, "use_sliding_window", False) or (
        getattr(config, "sliding_window", None) and config.model_type == "llama"
    ):
        refuse("sliding_window", getattr(config, "sliding_window", True), "full attention")
    for kind in getattr(config, "layer_types", None) or []:
        if kind != "full_attention":
            refuse("layer_types", kind, "full_attention")
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        refuse("rope_parameters.rope_type", rope_type, ", ".join(_ROPE_TYPES))
    for rotated in (rope.get("partial_rotary_factor"), getattr(config, "partial_rotary_factor", None)):
        if rotated not in (None, 1.0):
            refuse("partial_rotary_factor", rotated, "1.0")
    quantization = getattr(config, "quantization_config", None)
    if quantization and not gguf:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else type(quantization).__name__
        refuse("quantization_config", method, "unquantised weights or GGUF")

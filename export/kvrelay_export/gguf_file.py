"""What a GGUF file says beyond what transformers reads from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGUFReader, dequantize, get_tensor_name_map

from .errors import ExportError

__all__ = ["GgufFile"]

_ROPE_FREQS = "rope_freqs.weight"
# Set to something, these change what a layer computes, and nothing here would apply them.
_REFUSED_WHEN_SET = ("expert_count", "attention.sliding_window", "attention.scale", "logit_scale", "rope.scale_linear")


class GgufFile:
    """The metadata and tensor names of a GGUF file.

    Raises:
        ExportError: the file is not GGUF, or cut off.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        try:
            self._reader = GGUFReader(path)
        except Exception as error:  # gguf raises whatever numpy does on bytes that make no sense
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ExportError(f"{path} is no GGUF file, or truncated: {reason}") from None
        self._arch = str(self.read("general.architecture"))

    def read(self, key: str) -> Any:
        """Return the value of ``key``, or None."""
        field = self._reader.fields.get(key)
        return field.contents() if field is not None else None

    def correct_config(self, config: Any) -> None:
        """Write to ``config`` what transformers drops: head size, linear RoPE scaling, biases.

        Raises:
            ExportError: the file asks for something that cannot be exported faithfully; names the key.
        """
        names = {t.name for t in self._reader.tensors}
        for key in _REFUSED_WHEN_SET:
            if self._model(key):
                raise ExportError(f"{self.name}: {self._arch}.{key}={self._model(key)!r} is not supported")
        default = config.hidden_size // config.num_attention_heads
        head_dim = self._model("attention.key_length") or self._model("rope.dimension_count") or default
        rotated = self._model("rope.dimension_count") or head_dim
        if rotated != head_dim:
            raise ExportError(
                f"{self.name}: {self._arch}.rope.dimension_count={rotated} is not the head size {head_dim}: "
                "partial rotation is not supported"
            )
        if head_dim != getattr(config, "head_dim", default):
            config.head_dim = head_dim
        scaling = self._model("rope.scaling.type") or "none"
        if scaling == "linear":
            factor = float(self._model("rope.scaling.factor"))
            config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": factor}
        elif scaling != "none":
            raise ExportError(
                f"{self.name}: {self._arch}.rope.scaling.type={scaling!r} is not supported in a GGUF file (none and "
                "linear are); export from the model's Hugging Face directory instead"
            )
        for key, tensor in (("attention_bias", "blk.0.attn_output.bias"), ("mlp_bias", "blk.0.ffn_down.bias")):
            if tensor in names and hasattr(config, key):
                setattr(config, key, True)

    def _model(self, key: str) -> Any:
        return self.read(f"{self._arch}.{key}")

    def correct_model(self, model: Any) -> None:
        """Apply the file's own RoPE frequencies to ``model``, and make sure that it took every tensor.

        Raises:
            ExportError: a tensor of the file has no place in the model.
        """
        arch = next(a for a, name in MODEL_ARCH_NAMES.items() if name == self._arch)
        places = get_tensor_name_map(arch, model.config.num_hidden_layers)
        taken = {_ROPE_FREQS}
        for key in model.state_dict():
            stem, _, kind = key.rpartition(".")
            taken.add(f"{places.get_name(stem)}.{kind}")
        tensors = {t.name: t for t in self._reader.tensors}
        left = sorted(set(tensors) - taken)
        if left:
            some = ", ".join(left[:4])
            raise ExportError(f"{self.name}: {len(left)} tensor(s) have no place in {self._arch}: {some}")
        if _ROPE_FREQS in tensors:
            # How GGUF spells llama3 scaling: each frequency of the rotation is divided by a number of its own.
            stored = tensors[_ROPE_FREQS]
            factors = np.array(dequantize(stored.data, stored.tensor_type), np.float32).reshape(-1)
            rotary = model.model.rotary_emb
            if factors.shape != tuple(rotary.inv_freq.shape):
                raise ExportError(
                    f"{self.name}: {_ROPE_FREQS} has {factors.size} values, heads have {rotary.inv_freq.numel()} pairs"
                )
            rotary.inv_freq = rotary.inv_freq / torch.from_numpy(factors)
            rotary.original_inv_freq = rotary.inv_freq.clone()
            model.config.rope_parameters = {**model.config.rope_parameters, "frequency_divisors": factors.tolist()}

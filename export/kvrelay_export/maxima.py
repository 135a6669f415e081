"""How large activations become: what decides whether a model can be computed in float16.

ONNX Runtime on a CPU computes float16 graphs in float32 between casts, so the numeric check that ends an export never
sees an overflow. It is bounded instead by what torch computes in float32 over the same text.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from .errors import CheckError
from .half import LARGEST

__all__ = ["Maxima", "recording"]

_ATTENTION = "kvrelay_maxima"
_LAYER = re.compile(r"model\.layers\.(\d+)\.?(.*)")


@dataclass(slots=True)
class Maxima:
    """The largest magnitude that each layer computed, and where; the final norm and the head come last."""

    values: list[float] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def see(self, layer: int, place: str, tensor: object) -> None:
        """Take a tensor into account that was computed at ``place`` of ``layer``."""
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return
        largest = float(tensor.abs().max())
        if math.isnan(largest) or largest > self.values[layer]:  # nothing is over a NaN
            self.values[layer], self.places[layer] = largest, place

    def summary(self) -> str:
        """Say where the largest is, and how large each layer's is."""
        at = max(range(len(self.values)), key=lambda i: self.values[i])
        return (
            f"largest {self.values[at]:.4g} in {self._where(at)}, float16 holds {LARGEST:.0f}; by layer, norm and head "
            f"last: {' '.join(f'{v:.3g}' for v in self.values)}"
        )

    def require_half(self, precision: str) -> None:
        """Refuse what float16 cannot hold.

        Raises:
            CheckError: names the layers and the way out.
        """
        over = [i for i, value in enumerate(self.values) if not value <= LARGEST]
        if over:
            where = ", ".join(f"{self.values[i]:.6g} in {self._where(i)}" for i in over[:4])
            raise CheckError(
                f"{precision} engines would overflow: activations reach {where}, float16 holds {LARGEST:.0f}; export "
                "with --precisions fp32, or int8 and int4 with --activations float32. Nothing was published"
            )

    def _where(self, layer: int) -> str:
        return f"layer {layer} ({self.places[layer]})" if layer < len(self.values) - 1 else self.places[layer]


@contextlib.contextmanager
def recording(model: PreTrainedModel) -> Iterator[Maxima]:
    """Record what ``model`` computes in float32 inside the context: what enters and leaves its modules, and scores."""
    layers = model.config.num_hidden_layers
    maxima = Maxima([0.0] * (layers + 1), [""] * (layers + 1))
    saved = model.config._attn_implementation
    sdpa = AttentionInterface()["sdpa"]

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **options: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        # Hidden scores too: a graph computes them before it hides them.
        scores = scaling * query @ key.repeat_interleave(groups, dim=1).transpose(2, 3)
        for place, tensor in (("rotated queries", query), ("rotated keys", key), ("attention scores", scores)):
            maxima.see(module.layer_idx, place, tensor)
        return sdpa(module, query, key, value, mask, scaling=scaling, **options)

    def hook(layer: int, place: str) -> Any:
        def look(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            for tensor in (*inputs, *(output if isinstance(output, tuple) else (output,))):
                maxima.see(layer, place, tensor)

        return look

    handles = []
    for name, module in model.named_modules():
        match = _LAYER.fullmatch(name)
        if match is not None:
            handles.append(module.register_forward_hook(hook(int(match[1]), match[2] or "residual stream")))
        elif name in ("model.norm", "lm_head"):
            handles.append(module.register_forward_hook(hook(layers, name)))
    AttentionInterface.register(_ATTENTION, attention)
    AttentionMaskInterface.register(_ATTENTION, AttentionMaskInterface()["sdpa"])
    try:
        model.config._attn_implementation = _ATTENTION
        yield maxima
    finally:
        model.config._attn_implementation = saved
        for handle in handles:
            handle.remove()

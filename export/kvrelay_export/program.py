"""Trace a Hugging Face module once into a program that every dialect is lowered from.

The program is ordinary ONNX (opset 23) plus two operators of the domain ``kvrelay`` that exist only between tracing
and lowering:

``CachedAttention(q, k, v, past_key, past_value, write_index, cos, sin) -> (out, present_key, present_value)``
    q ``[B, S, Hq*D]``, k and v ``[B, S, Hkv*D]`` before rotation, caches ``[B, Hkv, Lmax, D]``, cos and sin
    ``[Lmax, D/2]``. Row b is rotated to and written at ``write_index[b] .. + S - 1``, then attends causally.
``Branch(x) -> x``
    Marks what a sublayer adds to the residual stream, so that a layer-skipping draft can drop it by name.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from kvrelay import contract
from optimum.utils import NormalizedConfigManager
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

__all__ = ["DOMAIN", "Geometry", "trace"]

DOMAIN = "kvrelay"
_ATTENTION = "kvrelay_trace"


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes that the KV cache of a model has."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int

    @classmethod
    def of(cls, model: PreTrainedModel, capacity: int) -> Geometry:
        sizes = NormalizedConfigManager.get_normalized_config_class(model.config.model_type)(model.config)
        # head_dim is a config value of its own: hidden_size / heads is wrong for Qwen3.
        head_dim = getattr(model.config, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
        return cls(sizes.num_layers, sizes.num_attention_heads, sizes.num_key_value_heads, head_dim, capacity)


class _TraceCache:
    """Stands where transformers expects a cache; the attention function below does the writing."""

    is_compileable = True

    def __init__(self, past: list[tuple[torch.Tensor, torch.Tensor]], write_index: torch.Tensor) -> None:
        self.past = past
        self.write_index = write_index
        self.present: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class _Traced(nn.Module):
    """The engine contract around a causal language model."""

    def __init__(self, model: PreTrainedModel, geometry: Geometry) -> None:
        super().__init__()
        self.model = model
        self.geometry = geometry
        positions = torch.arange(geometry.capacity)[None]
        with torch.no_grad():
            cos, sin = model.model.rotary_emb(torch.zeros(1), positions)
        half = geometry.head_dim // 2
        # Tables from the model's own module carry every scaling (linear, llama3, yarn) and its attention factor.
        self.register_buffer("cos", cos[0, :, :half].float().contiguous())
        self.register_buffer("sin", sin[0, :, :half].float().contiguous())
        self.cache: _TraceCache | None = None

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        assert self.cache is not None
        g = self.geometry
        batch, _, sequence, _ = query.shape
        index = module.layer_idx
        past_key, past_value = self.cache.past[index]
        out, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::CachedAttention",
            (
                query.transpose(1, 2).reshape(batch, sequence, g.heads * g.head_dim),
                key.transpose(1, 2).reshape(batch, sequence, g.kv_heads * g.head_dim),
                value.transpose(1, 2).reshape(batch, sequence, g.kv_heads * g.head_dim),
                past_key,
                past_value,
                self.cache.write_index,
                self.cos,
                self.sin,
            ),
            {"heads": g.heads, "kv_heads": g.kv_heads, "scale": float(scaling), "layer": index},
            dtypes=(query.dtype, past_key.dtype, past_value.dtype),
            shapes=((batch, sequence, g.heads * g.head_dim), past_key.shape, past_value.shape),
            version=1,
        )
        self.cache.present[index] = (present_key, present_value)
        return out

    def forward(
        self, input_ids: torch.Tensor, write_index: torch.Tensor, logit_rows: torch.Tensor, past: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        pairs = list(zip(past[0::2], past[1::2], strict=True))
        self.cache = _TraceCache(pairs, write_index)
        positions = write_index[:, None] + torch.arange(input_ids.shape[1])[None]
        hidden = self.model.model(
            input_ids=input_ids, position_ids=positions, cache=self.cache, use_cache=True
        ).last_hidden_state
        index = logit_rows[:, :, None].expand(-1, -1, hidden.shape[-1])
        logits = self.model.lm_head(torch.gather(hidden, 1, index)).float()
        present = [t for i in range(self.geometry.layers) for t in self.cache.present[i]]
        self.cache = None
        return (logits, *present)


def _rms_norm(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.onnx.ops.symbolic(
        "RMSNormalization",
        (x, module.weight),
        {"axis": -1, "epsilon": float(module.variance_epsilon)},
        dtype=x.dtype,
        shape=x.shape,
        version=23,
    )


def _mark(layer: int, kind: str) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        marked = torch.onnx.ops.symbolic(
            f"{DOMAIN}::Branch", (x,), {"layer": layer, "kind": kind}, dtype=x.dtype, shape=x.shape, version=1
        )
        return (marked, *output[1:]) if isinstance(output, tuple) else marked

    return hook


@contextlib.contextmanager
def _traceable(traced: _Traced) -> Iterator[None]:
    """Swap norms, rotation and attention of the module for operators of the program, and put them back."""
    model = traced.model
    handles = []
    modeling = __import__(type(model).__module__, fromlist=["apply_rotary_pos_emb"])
    rotate = modeling.apply_rotary_pos_emb
    saved_attention = model.config._attn_implementation
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        return traced.attend(module, query, key, value, scaling), None

    AttentionInterface.register(_ATTENTION, attention)
    AttentionMaskInterface.register(_ATTENTION, lambda *_, **__: None)
    try:
        model.config._attn_implementation = _ATTENTION
        modeling.apply_rotary_pos_emb = lambda q, k, *_, **__: (q, k)
        for norm in norms:
            norm.forward = _rms_norm.__get__(norm)
        for index, layer in enumerate(model.model.layers):
            handles.append(layer.self_attn.register_forward_hook(_mark(index, contract.ATTENTION)))
            handles.append(layer.mlp.register_forward_hook(_mark(index, contract.MLP)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for norm in norms:
            del norm.forward
        modeling.apply_rotary_pos_emb = rotate
        model.config._attn_implementation = saved_attention


def trace(model: PreTrainedModel, geometry: Geometry, shape: tuple[int, int] | None) -> ir.Model:
    """Trace ``model`` into a program.

    Args:
        model: a causal language model of a supported family, fp32, in eval mode.
        geometry: sizes of its KV cache.
        shape: fixed ``(B, S)``, or None for dynamic batch and sequence axes.

    Returns:
        The program; its inputs and outputs carry the names of :mod:`kvrelay.contract`.
    """
    traced = _Traced(model, geometry).eval()
    g = geometry
    # Sizes above 1 that are all different: torch.export specialises axes of size 0 and 1, and merges equal ones.
    batch, sequence, rows = (3, 5, 4) if shape is None else (shape[0], shape[1], shape[1])
    past = [torch.zeros(batch, g.kv_heads, g.capacity, g.head_dim) for _ in range(2 * g.layers)]
    args = (
        torch.zeros(batch, sequence, dtype=torch.int64),
        torch.zeros(batch, dtype=torch.int64),
        torch.zeros(batch, rows, dtype=torch.int64),
        past,
    )
    dynamic: Any = None
    if shape is None:
        b, s, r = (torch.export.Dim(n) for n in (contract.BATCH, contract.SEQUENCE, contract.ROWS))
        dynamic = {
            "input_ids": {0: b, 1: s},
            "write_index": {0: b},
            "logit_rows": {0: b, 1: r},
            "past": [{0: b} for _ in past],
        }
    with _traceable(traced), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        exported = torch.onnx.export(
            traced,
            args,
            dynamo=True,
            verbose=False,
            opset_version=23,
            dynamic_shapes=dynamic,
            input_names=contract.input_names(range(g.layers)),
            output_names=contract.output_names(range(g.layers)),
            optimize=True,
        )
    assert exported is not None
    return exported.model

"""A parsed network's layers, as far as kvrelay asks about them.

TensorRT's Python layers show what is particular to their kind once they are told their class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Attention", "CacheUpdate", "attentions", "cache_updates", "layers", "producers", "source"]


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention: the layer that takes its inputs, and the library's object with its settings."""

    name: str
    handle: Any
    inputs: tuple[Any, ...]  # query, key, value, mask if there is one
    dtype: Any

    @property
    def causal(self) -> bool:
        return bool(self.handle.causal)


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    """A KV-cache-update layer: tensors at its ends."""

    name: str
    cache: Any
    update: Any
    write_index: Any
    output: Any
    linear: bool


def layers(network: Any) -> Iterator[Any]:
    """Yield the layers of ``network`` in order."""
    return (network.get_layer(i) for i in range(network.num_layers))


def _of_type(trt: Any, network: Any, name: str) -> Iterator[Any]:
    kind = getattr(trt.LayerType, name, None)  # before 10.15 there is no such layer
    return (layer for layer in layers(network) if kind is not None and layer.type == kind)


def cache_updates(trt: Any, network: Any) -> list[CacheUpdate]:
    """Return the KV-cache-update layers of ``network``."""
    found = []
    for layer in _of_type(trt, network, "KV_CACHE_UPDATE"):
        layer.__class__ = trt.IKVCacheUpdateLayer
        cache, update, write_index = (layer.get_input(i) for i in range(3))
        linear = layer.cache_mode == trt.KVCacheMode.LINEAR
        found.append(CacheUpdate(layer.name, cache, update, write_index, layer.get_output(0), linear))
    return found


def attentions(trt: Any, network: Any) -> list[Attention]:
    """Return the fused attentions of ``network``."""
    inputs = [
        tuple(layer.get_input(i) for i in range(layer.num_inputs))
        for layer in _of_type(trt, network, "ATTENTION_INPUT")
    ]
    found = []
    for layer, given in zip(_of_type(trt, network, "ATTENTION_OUTPUT"), inputs, strict=True):
        layer.__class__ = trt.IAttentionOutputLayer
        found.append(Attention(layer.attention.name, layer.attention, given, layer.get_output(0).dtype))
    return found


def producers(network: Any) -> dict[str, Any]:
    """Return the layer that makes each tensor, by the tensor's name."""
    return {layer.get_output(k).name: layer for layer in layers(network) for k in range(layer.num_outputs)}


def source(made_by: dict[str, Any], tensor: Any, stop: set[str]) -> str | None:
    """Follow first inputs from ``tensor`` back to a tensor named in ``stop``; None if there is none on the way."""
    while tensor is not None:
        if tensor.name in stop:
            return str(tensor.name)
        layer = made_by.get(tensor.name)
        tensor = layer.get_input(0) if layer is not None and layer.num_inputs else None
    return None

"""Whether a parsed network is what the engine contract and its dialect promise.

A parser may take a graph and mean something else by it (causal masks, dropped inputs); the result would be wrong
without a word. Here the network itself is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import contract
from ..manifest import EngineEntry, ModelEntry
from .network_view import attentions, cache_updates, layers, producers, source

__all__ = ["check_network"]


def check_network(trt: Any, network: Any, entry: EngineEntry, model: ModelEntry) -> list[str]:
    """Return what is wrong with ``network``, in words; nothing if all is well."""
    faults = list(_ends(trt, network, entry, model))
    if faults:
        return faults
    if contract.updates_in_place(entry.dialect):
        faults = [*_cache_updates(trt, network, entry), *_attentions(trt, network, entry, model)]
    return [*faults, *_sums(trt, network)]


def _ends(trt: Any, network: Any, entry: EngineEntry, model: ModelEntry) -> Iterator[str]:
    """Compare names, dtypes and the sizes that never change with the manifest."""
    kv = trt.float16 if entry.kv_dtype == "float16" else trt.float32
    cache = ((entry.batch, model.kv_heads, model.capacity, model.head_dim), kv)
    wanted_inputs = {
        contract.INPUT_IDS: ((entry.batch, entry.sequence), trt.int64),
        contract.WRITE_INDEX: ((entry.batch,), trt.int64),
        contract.LOGIT_ROWS: ((entry.batch, entry.rows), trt.int64),
        **dict.fromkeys(contract.past_names(entry.kv_layers), cache),
    }
    made: tuple[tuple[int | None, ...], Any] = cache
    if not contract.updates_in_place(entry.dialect):
        made = ((entry.batch, model.kv_heads, entry.sequence, model.head_dim), kv)
    wanted_outputs = {
        **dict.fromkeys(contract.output_names(entry.kv_layers, entry.dialect), made),
        contract.LOGITS: ((entry.batch, entry.rows, model.padded_vocab_size), trt.float32),
    }
    for kind, count, get, wanted in (
        ("input", network.num_inputs, network.get_input, wanted_inputs),
        ("output", network.num_outputs, network.get_output, wanted_outputs),
    ):
        found = {get(i).name: get(i) for i in range(count)}
        for name in sorted(set(wanted) ^ set(found)):
            yield f"{kind} {name} is {'missing' if name in wanted else 'not of the contract'}"
        for name in set(wanted) & set(found):
            shape = tuple(-1 if size is None else size for size in wanted[name][0])
            if tuple(found[name].shape) != shape or found[name].dtype != wanted[name][1]:
                yield (
                    f"{kind} {name} is {found[name].dtype.name} {tuple(found[name].shape)}, "
                    f"the manifest says {wanted[name][1].name} {shape}"
                )


def _cache_updates(trt: Any, network: Any, entry: EngineEntry) -> Iterator[str]:
    """Every cache tensor: one update in place, a network input and output at its ends, at `write_index`."""
    made_by = producers(network)
    updates = {update.cache.name: update for update in cache_updates(trt, network)}
    pairs = zip(contract.past_names(entry.kv_layers), contract.present_names(entry.kv_layers), strict=True)
    for past, present in pairs:
        update = updates.pop(past, None)
        if update is None:
            yield f"{past} is not updated in place: no KV-cache-update layer takes it"
        elif update.output.name != present:
            yield f"{update.name} updates {past} but gives {update.output.name}, not the output {present}"
        elif not update.linear:
            yield f"{update.name} does not write {past} linearly"
        elif source(made_by, update.write_index, {contract.WRITE_INDEX}) is None:
            yield f"{update.name} does not write {past} at {contract.WRITE_INDEX}"
    yield from (f"{update.name} updates {name}, which is no cache tensor" for name, update in updates.items())


def _attentions(trt: Any, network: Any, entry: EngineEntry, model: ModelEntry) -> Iterator[str]:
    """Every layer: one attention over its updated cache, behind an explicit mask and nothing else."""
    found = attentions(trt, network)
    if len(found) != len(entry.kv_layers):
        yield f"it has {len(found)} attentions for {len(entry.kv_layers)} layers with a cache"
        return
    made_by = producers(network)
    presents = contract.present_names(entry.kv_layers)
    for i, attention in enumerate(found):
        if attention.causal:
            yield f"{attention.name} is causal, which is wrong behind a preallocated cache"
            continue
        mask = attention.inputs[3] if len(attention.inputs) > 3 else None
        if mask is None:
            yield f"{attention.name} has no mask: it would see entries that are not valid"
        elif mask.dtype != trt.bool or mask.shape[-1] != model.capacity:
            yield f"the mask of {attention.name} is {mask.dtype.name} {tuple(mask.shape)}, not bool over the capacity"
        for tensor, present in zip(attention.inputs[1:3], presents[2 * i : 2 * i + 2], strict=True):
            if source(made_by, tensor, set(presents)) != present:
                yield f"{attention.name} does not read {present}"


def _sums(trt: Any, network: Any) -> Iterator[str]:
    """Norms add up squares, which leave float16 above 255: they must do so in float32."""
    for layer in layers(network):
        if layer.type == trt.LayerType.REDUCE and layer.get_input(0).dtype == trt.float16:
            yield f"{layer.name} adds up in float16, where the squares of a norm overflow"

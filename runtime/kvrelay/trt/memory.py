"""What a plan will need of the GPU's memory, reckoned on its network before it is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MemoryBudgetError
from ..kv import kv_bytes
from ..manifest import EngineEntry, ModelEntry
from .network_view import attentions, layers
from .profiles import Profile

__all__ = ["Memory", "predict_memory", "refuse_if_too_large", "together"]

_BITS = {"FLOAT": 32, "HALF": 16, "BF16": 16, "INT8": 8, "UINT8": 8, "BOOL": 8, "INT4": 4, "INT32": 32, "INT64": 64}
_KV_ITEMSIZE = {"float32": 4, "float16": 2}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the GPU."""

    weights: int
    kv: int  # of as many rows as the engine takes; engines of one target share it
    activations: int  # a bound: as if no layers were fused; engines that run one after the other share them

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations

    def __str__(self) -> str:
        parts = [("weights", self.weights), ("KV", self.kv), ("activations", self.activations)]
        listed = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in parts)
        return f"{self.total / 2**20:.0f} MiB ({listed})"


def predict_memory(
    trt: Any, network: Any, entry: EngineEntry, model: ModelEntry, profiles: tuple[Profile, ...]
) -> Memory:
    """Return what ``network`` needs at the largest shape of its profiles."""
    rows = max(profile.batch[2] for profile in profiles)
    return Memory(
        weights=sum(_bytes(layer.get_output(0), 1, 1) for layer in layers(network) if _is(trt, layer, "CONSTANT")),
        kv=kv_bytes(model, len(entry.kv_layers), _KV_ITEMSIZE[entry.kv_dtype], model.capacity * rows),
        activations=max(_activations(trt, network, model, profile) for profile in profiles),
    )


def together(parts: Sequence[Memory]) -> Memory:
    """Return what engines need that are loaded at once: each plan holds weights of its own, the rest is shared."""
    return Memory(
        weights=sum(part.weights for part in parts),
        kv=max(part.kv for part in parts),
        activations=max(part.activations for part in parts),
    )


def refuse_if_too_large(engine: str, memory: Memory, free: int, total: int) -> None:
    """Compare a prediction with a GPU.

    Raises:
        MemoryBudgetError: it does not fit; names the figures.
    """
    if memory.total > free:
        raise MemoryBudgetError(
            f"{engine} would need {memory} of the GPU's memory, {free / 2**20:.0f} of {total / 2**20:.0f} MiB are "
            "free: free memory, build with a smaller --max-batch, or export with a smaller --context or int4 weights"
        )


def _activations(trt: Any, network: Any, model: ModelEntry, profile: Profile) -> int:
    """The most bytes that are live at once when layers run one by one in the network's order."""
    batch, sequence, rows = (axis[2] for axis in (profile.batch, profile.sequence, profile.rows))
    order = list(layers(network))
    constant: set[str] = set()
    size: dict[str, int] = {}
    born: dict[str, int] = {}  # by tensor: the layer that makes it
    dies: dict[str, int] = {}  # and the last one that takes it
    for when, layer in enumerate(order):
        inputs = [t.name for i in range(layer.num_inputs) if (t := layer.get_input(i)) is not None]
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        dies.update(dict.fromkeys(inputs, when))
        if _is(trt, layer, "CONSTANT") or (_is(trt, layer, "SHUFFLE") and inputs[0] in constant):
            constant.update(t.name for t in outputs)  # a weight, or a weight seen in another shape
        elif not _is(trt, layer, "KV_CACHE_UPDATE"):  # which works in place
            for tensor in outputs:
                of_rows = len(tensor.shape) == 3 and tensor.shape[-1] == model.padded_vocab_size
                born[tensor.name] = when
                size[tensor.name] = _bytes(tensor, batch, rows if of_rows else sequence)
    # Scores of attention that is not fused, in and out of the softmax.
    unfused = [a for a in attentions(trt, network) if a.dtype == trt.float32]
    scores = 2 * batch * model.heads * sequence * model.capacity * 4 if unfused else 0
    change = [0] * (len(order) + 1)
    for name, start in born.items():
        change[start] += size[name]
        change[max(start, dies.get(name, len(order) - 1)) + 1] -= size[name]
    most = live = 0
    for step in change:
        live += step
        most = max(most, live)
    return most + scores


def _is(trt: Any, layer: Any, kind: str) -> bool:
    return bool(layer.type == getattr(trt.LayerType, kind, None))


def _bytes(tensor: Any, batch: int, sequence: int) -> int:
    """Bytes of ``tensor`` if its unknown sizes are at most B and S."""
    items, unknown = 1, 0
    for size in tensor.shape:
        items *= max(size, 1)
        unknown += size < 0
    # No tensor of these graphs has more than the axes B and S; one that has one of them has the larger.
    items *= {0: 1, 1: max(batch, sequence)}.get(unknown, batch * sequence)
    return -(-items * _BITS.get(tensor.dtype.name, 32) // 8)

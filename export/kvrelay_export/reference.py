"""The torch side of the export's numeric check: real text, and the model with an engine's own weights."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import numpy as np
import torch
from kvrelay import contract
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel

from .quantize import dequantize_blocks, quantize_blocks, quantize_columns

__all__ = ["TEXTS", "reference_ids", "reference_logits", "skipping"]

# Different kinds of text: a fault that one kind hides shows in another.
TEXTS = (
    """The harbour at Lisbon was quiet when the ferry came in. A dozen passengers stood on the deck, holding their
coats against the wind, and watched the yellow trams climb the hill behind the customs house. Nobody spoke. The
captain, who had made the crossing four thousand times, still looked at the river as if it might surprise him. "It
never does the same thing twice," he told the boy beside him, "and that is why I stay awake." The boy nodded and
wrote the sentence down in a small notebook, together with the date, the tide and the name of the ship. Years later
he would find it again in a box of letters and wonder whether the captain had meant the river, the weather, or the
people who crossed it every morning and went home every night without ever asking how deep the water was.""",
    """def merge(left, right):
    \"\"\"Merge two sorted lists into one sorted list.\"\"\"
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    result.extend(left[i:])
    result.extend(right[j:])
    return result


def sort(items):
    \"\"\"Sort a list with merge sort, in O(n log n) time.\"\"\"
    if len(items) <= 1:
        return items
    middle = len(items) // 2
    return merge(sort(items[:middle]), sort(items[middle:]))


if __name__ == "__main__":
    print(sort([5, 2, 9, 1, 5, 6, 3, 8]))
    print(sort(["pear", "apple", "fig", "cherry", "banana"]))""",
    """{"orders": [{"id": 1001, "customer": {"name": "Ada Byron", "city": "London"}, "items": [{"sku": "A-17",
"quantity": 2, "price": 19.99}, {"sku": "B-03", "quantity": 1, "price": 249.0}], "status": "shipped"}, {"id": 1002,
"customer": {"name": "Grace Murray", "city": "New York"}, "items": [{"sku": "C-88", "quantity": 12, "price": 0.75}],
"status": "pending"}, {"id": 1003, "customer": {"name": "Karel Capek", "city": "Prague"}, "items": [{"sku": "R-20",
"quantity": 1, "price": 99.5}], "status": "returned"}], "total": 3, "currency": "EUR", "page": {"next": null}}""",
    """Here is how to make a simple vegetable soup. 1. Chop two onions, three carrots and a stick of celery. 2. Heat
two tablespoons of olive oil in a large pot and cook the onions until they are soft. 3. Add the carrots, the celery
and a teaspoon of salt, and stir for five minutes. 4. Pour in one and a half litres of water or stock and bring it to
the boil. 5. Add 200 grams of lentils and simmer for thirty minutes. 6. Taste, add pepper and lemon juice, and serve
with bread. Le potage est meilleur le lendemain, disait ma grand-mère. Die Suppe schmeckt am nächsten Tag besser.""",
)


def reference_ids(tokenizer: Tokenizer, length: int, vocab_size: int) -> np.ndarray:
    """Return the texts as int64 ids ``[4, length]``, repeated where a text is shorter."""
    rows = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids or [0]
        rows.append(np.resize(np.array(ids, np.int64), length))
    return np.stack(rows) % vocab_size


@contextlib.contextmanager
def skipping(model: PreTrainedModel, skip: Collection[str]) -> Iterator[None]:
    """Leave the named sublayers out of ``model``'s residual stream inside the context."""
    hooks = []

    def silence(_module: nn.Module, _args: object, output: object) -> object:
        if isinstance(output, tuple):
            return (torch.zeros_like(output[0]), *output[1:])
        return torch.zeros_like(output)

    try:
        for name in skip:
            kind, _, index = name.partition(".")
            layer = model.model.layers[int(index)]
            module = layer.self_attn if kind == contract.ATTENTION else layer.mlp
            hooks.append(module.register_forward_hook(silence))
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _weights_of(model: PreTrainedModel, precision: str, activations: str) -> Iterator[None]:
    """Give every module the weights that an engine of ``precision`` has, computed with in float32."""
    saved: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                product = isinstance(module, nn.Linear) and name == "weight"
                rounded = _rounded(parameter, precision, activations) if product else parameter
                if activations == "float16":
                    rounded = rounded.half().float()
                if rounded is not parameter:
                    saved.append((module, name, parameter))
                    setattr(module, name, nn.Parameter(rounded, requires_grad=False))
        yield
    finally:
        for module, name, parameter in saved:
            setattr(module, name, parameter)


def _rounded(weight: torch.Tensor, precision: str, activations: str) -> torch.Tensor:
    if precision in ("fp32", "fp16"):
        return weight
    transposed = weight.detach().numpy().T
    if precision == "int8-dynamic":
        values, scale = quantize_columns(transposed)
        return torch.from_numpy((values.astype(np.float32) * scale).T.copy())
    quantized = quantize_blocks(transposed, int(precision.removeprefix("int")), scale_dtype=activations)
    return torch.from_numpy(dequantize_blocks(quantized).T.copy())


def reference_logits(
    model: PreTrainedModel,
    ids: np.ndarray,
    precision: str = "fp32",
    skip: Collection[str] = (),
    activations: str = "float32",
) -> np.ndarray:
    """Return torch's float32 logits ``[rows, T, V]`` for ``ids`` ``[rows, T]``, with an engine's own weights."""
    with _weights_of(model, precision, activations), skipping(model, skip), torch.no_grad():
        return model(torch.from_numpy(ids), use_cache=False).logits.float().numpy()

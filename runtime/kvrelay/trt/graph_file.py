"""What TensorRT's parser takes silently and gets wrong is looked for in the ONNX file itself, without the onnx package.

Attention drops its input ``nonpad_kv_seqlen`` without a trace in the network, and aligns ``is_causal`` to the upper
left corner of a cache that is longer than the pass. Past and present tensors are refused, which is said here clearly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import PlanError
from ..wire import fields, number_of

__all__ = ["attention_faults"]

# Field numbers of onnx.proto3.
_MODEL_GRAPH = 7
_GRAPH_NODE = 1
_INPUT, _OUTPUT, _NAME, _OP_TYPE, _ATTRIBUTE = 1, 2, 3, 4, 5
_ATTRIBUTE_NAME, _ATTRIBUTE_INT = 1, 3

# Inputs of Attention by position.
_PAST_KEY, _PAST_VALUE, _KEY_LENGTHS = 4, 5, 6


@dataclass(slots=True)
class _Node:
    """A node: empty names stand for optional inputs and outputs that are left out."""

    op_type: str = ""
    name: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    integers: dict[str, int] = field(default_factory=dict)  # attributes


def attention_faults(graph: Path) -> list[str]:
    """Return what is wrong with the Attention nodes of the ONNX file ``graph``, in words.

    Raises:
        PlanError: the file is not an ONNX model.
    """
    try:
        nodes = list(_nodes(graph.read_bytes()))
    except (ValueError, UnicodeDecodeError) as error:
        raise PlanError(f"{graph} is not an ONNX model: {error}") from None
    return [f"node {n.name} (Attention): {fault}" for n in nodes if n.op_type == "Attention" for fault in _faults(n)]


def _faults(node: _Node) -> Iterator[str]:
    def has(names: list[str], position: int) -> bool:
        return len(names) > position and bool(names[position])

    if node.integers.get("is_causal", 0):
        yield "is_causal is set, which TensorRT aligns to the upper left, wrong behind a preallocated cache"
    if has(node.inputs, _KEY_LENGTHS):
        yield "the input nonpad_kv_seqlen is used, which TensorRT drops without a word"
    if has(node.inputs, _PAST_KEY) or has(node.inputs, _PAST_VALUE) or any(node.outputs[1:]):
        yield "it takes past or gives present tensors, which TensorRT refuses: TensorScatter updates the cache"


def _nodes(model: bytes) -> Iterator[_Node]:
    for number, _, graph in fields(model):
        if number == _MODEL_GRAPH:
            yield from (_node(payload) for found, _, payload in fields(graph) if found == _GRAPH_NODE)


def _node(message: bytes) -> _Node:
    node = _Node()
    for number, _, payload in fields(message):
        if number == _INPUT:
            node.inputs.append(payload.decode())
        elif number == _OUTPUT:
            node.outputs.append(payload.decode())
        elif number == _NAME:
            node.name = payload.decode()
        elif number == _OP_TYPE:
            node.op_type = payload.decode()
        elif number == _ATTRIBUTE:
            attribute = {n: (whole, part) for n, whole, part in fields(payload)}
            if _ATTRIBUTE_INT in attribute:
                node.integers[attribute[_ATTRIBUTE_NAME][1].decode()] = number_of(attribute[_ATTRIBUTE_INT][0])
    return node

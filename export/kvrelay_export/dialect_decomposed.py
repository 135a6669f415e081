"""Lower a program to the `decomposed` dialect: opset 17 alone, for TensorRT 10.3, which cannot update a cache in place.

An engine gives the entries of its own pass, which the backend writes to the cache. For reading it puts them into a copy
of the cache, each at its own place: sums over keys then have one order wherever in a window a token sits, which `exact`
needs. Keeping past and pass apart would save the copy and lose that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from kvrelay import contract

from .graph import constant, replace

__all__ = ["OPSET", "lower_decomposed"]

OPSET = 17
_IR_VERSION = 8  # of the ONNX release that brought opset 17
# Hides a score: exp() of it is zero beside any real one, and added to one it is still a number of its dtype.
_HIDDEN = {"float16": -30000.0, "float32": -1e30}


@dataclass(frozen=True, slots=True)
class _Pass:
    """What all layers share: computed once from ``write_index`` and the width of the pass."""

    cos: ir.Value  # [B, 1, S, D/2]
    sin: ir.Value
    places: ir.Value  # [B, Hkv, S, 3]: where in the cache the entries of the pass belong
    hide: ir.Value  # [B, 1, G*S, Lmax], added to scores; G query heads for each KV head


class _Builder:
    """Makes nodes one after the other."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.nodes: list[ir.Node] = []

    def __call__(self, op: str, *inputs: ir.Value | None, **attributes: object) -> ir.Value:
        node = ir.node(op, list(inputs), attributes)  # type: ignore[arg-type]
        self.nodes.append(node)
        return node.outputs[0]

    def ints(self, *numbers: int) -> ir.Value:
        return constant(self.graph, "kvrelay.ints." + "_".join(map(str, numbers)), np.array(numbers, np.int64))

    def scalar(self, number: float, dtype: np.dtype) -> ir.Value:
        return constant(self.graph, f"kvrelay.{dtype.name}.{number:.9g}", np.array(number, dtype))


def lower_decomposed(model: ir.Model) -> None:
    """Rewrite ``model`` in place; its activations may be float32 or float16."""
    graph = model.graph
    model.opset_imports[""] = OPSET
    model.ir_version = _IR_VERSION
    shared: _Pass | None = None
    for node in list(graph):
        if node.op_type == "CachedAttention":
            shared = shared or _shared(graph, node)
            _lower_attention(graph, node, shared)
        elif node.op_type == "RMSNormalization":
            _lower_norm(graph, node)


def _dtype(value: ir.Value | None) -> np.dtype:
    assert value is not None and value.dtype is not None
    return value.dtype.numpy()


def _shared(graph: ir.Graph, node: ir.Node) -> _Pass:
    add = _Builder(graph)
    ids = next(v for v in graph.inputs if v.name == contract.INPUT_IDS)
    write_index = next(v for v in graph.inputs if v.name == contract.WRITE_INDEX)
    past, cos, sin = node.inputs[3], node.inputs[6], node.inputs[7]
    assert past is not None and past.shape is not None
    heads, kv_heads = node.attributes["heads"].as_int(), node.attributes["kv_heads"].as_int()
    dtype = _dtype(past)
    zero, one = (constant(graph, f"kvrelay.scalar{i}", np.array(i, np.int64)) for i in (0, 1))
    entries = constant(graph, "kvrelay.entries", np.arange(int(past.shape[2]), dtype=np.int64))  # type: ignore[arg-type]
    kv_head = constant(graph, "kvrelay.kv_heads", np.arange(kv_heads, dtype=np.int64).reshape(1, -1, 1, 1))

    batch = add("Shape", ids, start=0, end=1)
    width = add("Shape", ids, start=1, end=2)
    offsets = add("Range", zero, add("Squeeze", width, add.ints(0)), one)
    positions = add("Add", add("Unsqueeze", write_index, add.ints(1)), offsets)  # [B, S]
    cos_rows, sin_rows = (add("Unsqueeze", add("Gather", table, positions), add.ints(1)) for table in (cos, sin))
    visible = add("LessOrEqual", entries, add("Unsqueeze", positions, add.ints(1, 3)))  # [B, 1, S, Lmax]
    hide = add("Where", visible, add.scalar(0.0, dtype), add.scalar(_HIDDEN[dtype.name], dtype))
    row = add("Range", zero, add("Squeeze", batch, add.ints(0)), one)
    full = add("Concat", batch, add.ints(kv_heads), width, add.ints(1), axis=0)
    axes = (add("Unsqueeze", row, add.ints(1, 2, 3)), kv_head, add("Unsqueeze", positions, add.ints(1, 3)))
    places = add("Concat", *(add("Expand", axis, full) for axis in axes), axis=3)
    if heads > kv_heads:
        hide = add("Tile", hide, add.ints(1, 1, heads // kv_heads, 1))
    graph.insert_before(graph[0], add.nodes)
    return _Pass(cos_rows, sin_rows, places, hide)


def _lower_attention(graph: ir.Graph, node: ir.Node, shared: _Pass) -> None:
    query, key, value, past_key, past_value, *_ = node.inputs
    heads, kv_heads = node.attributes["heads"].as_int(), node.attributes["kv_heads"].as_int()
    assert past_key is not None and past_key.shape is not None
    head_dim = past_key.shape[3]
    assert isinstance(head_dim, int)
    add = _Builder(graph)

    def by_head(x: ir.Value | None, count: int) -> ir.Value:
        return add("Transpose", add("Reshape", x, add.ints(0, 0, count, head_dim)), perm=[0, 2, 1, 3])

    def rotated(x: ir.Value) -> ir.Value:
        first = add("Slice", x, add.ints(0), add.ints(head_dim // 2), add.ints(3))
        second = add("Slice", x, add.ints(head_dim // 2), add.ints(head_dim), add.ints(3))
        left = add("Sub", add("Mul", first, shared.cos), add("Mul", second, shared.sin))
        right = add("Add", add("Mul", second, shared.cos), add("Mul", first, shared.sin))
        return add("Concat", left, right, axis=3)

    new_key, new_value = rotated(by_head(key, kv_heads)), by_head(value, kv_heads)
    keys = add("ScatterND", past_key, shared.places, new_key)
    values = add("ScatterND", past_value, shared.places, new_value)
    scaled = add("Mul", rotated(by_head(query, heads)), add.scalar(node.attributes["scale"].as_float(), _dtype(query)))
    # The query heads of one KV head stand below each other, so that its keys and values are read once for all.
    stacked = add("Reshape", scaled, add.ints(0, kv_heads, -1, head_dim)) if heads > kv_heads else scaled
    scores = add("Add", add("MatMul", stacked, add("Transpose", keys, perm=[0, 1, 3, 2])), shared.hide)
    out = add("MatMul", add("Softmax", scores, axis=-1), values)  # [B, Hkv, G*S, D]
    unstacked = add("Reshape", out, add.ints(0, heads, -1, head_dim)) if heads > kv_heads else out
    joined = add("Reshape", add("Transpose", unstacked, perm=[0, 2, 1, 3]), add.ints(0, 0, heads * head_dim))
    layer = node.attributes["layer"].as_int()
    replace(node, add.nodes, [joined, new_key, new_value])
    ids = next(v for v in graph.inputs if v.name == contract.INPUT_IDS)
    assert ids.shape is not None
    for made, name in zip((new_key, new_value), contract.new_names([layer]), strict=True):
        made.name = name
        made.shape = ir.Shape([ids.shape[0], kv_heads, ids.shape[1], head_dim])


def _lower_norm(graph: ir.Graph, node: ir.Node) -> None:
    """Squares leave float16 above 255, so the norm is computed in float32 whatever the activations are."""
    x, gamma = node.inputs
    dtype = _dtype(x)
    wide = np.dtype(np.float32)
    add = _Builder(graph)
    exact = add("Cast", x, to=ir.DataType.FLOAT) if dtype != wide else x
    mean = add("ReduceMean", add("Mul", exact, exact), axes=[-1], keepdims=1)
    size = add("Sqrt", add("Add", mean, add.scalar(node.attributes["epsilon"].as_float(), wide)))
    normed = add("Div", exact, size)
    if dtype != wide:
        normed = add("Cast", normed, to=ir.DataType.FLOAT16)
    replace(node, add.nodes, [add("Mul", normed, gamma)])

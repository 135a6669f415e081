"""Lower a program to the `standard` dialect: ONNX opset 24 alone, the form that TensorRT 10.15 and later accept.

The cache is updated by TensorScatter and read whole by Attention behind an explicit boolean mask. `is_causal` and
`nonpad_kv_seqlen` are never used: TensorRT misplaces the one and drops the other.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from kvrelay import contract

from .graph import constant, replace, weight_of
from .quantize import BLOCK, quantize_blocks

__all__ = ["OPSET", "lower_standard", "quantize_standard"]

OPSET = 24


def lower_standard(model: ir.Model) -> None:
    """Rewrite ``model`` in place; its activations may be float32 or float16, its weights already quantised."""
    graph = model.graph
    model.opset_imports[""] = OPSET
    attention = [n for n in graph if n.op_type == "CachedAttention"]
    if not attention:
        return
    positions, mask = _positions_and_mask(graph, attention[0])
    for node in attention:
        _lower_attention(graph, node, positions, mask)


def _positions_and_mask(graph: ir.Graph, node: ir.Node) -> tuple[ir.Value, ir.Value]:
    """Insert the positions ``[B, S]`` of the pass and the mask ``[B, 1, S, Lmax]`` of what each may see."""
    ids = next(v for v in graph.inputs if v.name == contract.INPUT_IDS)
    write_index = next(v for v in graph.inputs if v.name == contract.WRITE_INDEX)
    past = node.inputs[3]
    assert past is not None and past.shape is not None
    entries = constant(graph, "kvrelay.entries", np.arange(int(past.shape[2]), dtype=np.int64).reshape(1, 1, 1, -1))  # type: ignore[arg-type]
    zero = constant(graph, "kvrelay.zero", np.array(0, np.int64))
    step = constant(graph, "kvrelay.step", np.array(1, np.int64))
    axis1 = constant(graph, "kvrelay.axis1", np.array([1], np.int64))
    axes13 = constant(graph, "kvrelay.axes13", np.array([1, 3], np.int64))
    width = ir.node("Shape", [ids], {"start": 1, "end": 2})
    scalar = ir.node("Squeeze", [width.outputs[0]])
    offsets = ir.node("Range", [zero, scalar.outputs[0], step])
    start = ir.node("Unsqueeze", [write_index, axis1])
    positions = ir.node("Add", [start.outputs[0], offsets.outputs[0]])
    rows = ir.node("Unsqueeze", [positions.outputs[0], axes13])
    mask = ir.node("LessOrEqual", [entries, rows.outputs[0]])
    graph.insert_before(graph[0], [width, scalar, offsets, start, positions, rows, mask])
    return positions.outputs[0], mask.outputs[0]


def _lower_attention(graph: ir.Graph, node: ir.Node, positions: ir.Value, mask: ir.Value) -> None:
    query, key, value, past_key, past_value, write_index, cos, sin = node.inputs
    heads, kv_heads = node.attributes["heads"].as_int(), node.attributes["kv_heads"].as_int()
    nodes: list[ir.Node] = []

    def add(op: str, inputs: list[ir.Value | None], attributes: dict[str, object] | None = None) -> ir.Value:
        made = ir.node(op, inputs, attributes or {})  # type: ignore[arg-type]
        nodes.append(made)
        return made.outputs[0]

    def by_head(x: ir.Value | None, count: int) -> ir.Value:
        shape = constant(graph, f"kvrelay.heads{count}", np.array([0, 0, count, -1], np.int64))
        return add("Transpose", [add("Reshape", [x, shape])], {"perm": [0, 2, 1, 3]})

    rotated_q = add("RotaryEmbedding", [by_head(query, heads), cos, sin, positions])
    rotated_k = add("RotaryEmbedding", [by_head(key, kv_heads), cos, sin, positions])
    present_key = add("TensorScatter", [past_key, rotated_k, write_index], {"axis": 2})
    present_value = add("TensorScatter", [past_value, by_head(value, kv_heads), write_index], {"axis": 2})
    scale = node.attributes["scale"].as_float()
    out = add("Attention", [rotated_q, present_key, present_value, mask], {"scale": scale})
    flat = constant(graph, "kvrelay.flat", np.array([0, 0, -1], np.int64))
    joined = add("Reshape", [add("Transpose", [out], {"perm": [0, 2, 1, 3]}), flat])
    replace(node, nodes, [joined, present_key, present_value])


def quantize_standard(model: ir.Model, precision: str, scale_dtype: np.dtype) -> None:
    """Store every constant weight ``[K, N]`` as symmetric blocks along K behind a DequantizeLinear, in place.

    Args:
        model: the program, its other weights still float32.
        precision: int8 or int4.
        scale_dtype: of the activations; scales are rounded to it and stored in float32.

    Raises:
        ExportError: a weight cannot be cut into blocks.
    """
    graph = model.graph
    bits = int(precision.removeprefix("int"))
    dtype = ir.DataType.INT4 if bits == 4 else ir.DataType.INT8
    for node in list(graph):
        source = node.inputs[1] if node.op_type == "MatMul" else None
        transpose = source.producer() if source is not None else None
        if transpose is not None and transpose.op_type == "Transpose":
            source = transpose.inputs[0]
        weight = weight_of(source)
        if weight is None or source is None:
            continue
        quantized = quantize_blocks(
            weight.T if transpose is not None else weight, bits, source.name or "", scale_dtype=scale_dtype
        )
        values = np.ascontiguousarray(quantized.values.T)
        name = f"{source.name}.int{bits}_kn"
        stored = ir.val(name, const_value=_tensor(name, values, dtype))
        graph.register_initializer(stored)
        scales = constant(graph, f"{source.name}.int{bits}_scale_kn", np.ascontiguousarray(quantized.scales.T))
        weights = ir.node("DequantizeLinear", [stored, scales], {"axis": 0, "block_size": BLOCK})
        graph.insert_before(node, [weights])
        node.replace_input_with(1, weights.outputs[0])


def _tensor(name: str, values: np.ndarray, dtype: ir.DataType) -> ir.TensorProtocol:
    if dtype == ir.DataType.INT8:
        return ir.tensor(values, name=name)
    flat = values.reshape(-1)
    packed = (flat[0::2] & 0xF) | ((flat[1::2] & 0xF) << 4)
    return ir.PackedTensor(packed.astype(np.uint8), dtype, shape=ir.Shape(values.shape), name=name)

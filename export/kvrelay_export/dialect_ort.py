"""Lower a program to the `ort` dialect: the form for speed on ONNX Runtime.

GroupQueryAttention updates the cache in place and rotates by itself; norms are fused with the residual addition;
query, key and value come from one product where nothing stands between them and attention.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from kvrelay import contract

from .graph import constant, replace, weight_of
from .quantize import quantize_blocks, quantize_columns

__all__ = ["dequantize_ort", "lower_ort", "quantize_ort", "store_kv_as"]

_MS = "com.microsoft"
_ROTATED_MULTIPLE = 16  # GroupQueryAttention rotates heads of a multiple of this size only


def lower_ort(model: ir.Model, *, paired: bool = False) -> None:
    """Rewrite ``model`` in place, weights still float32.

    Args:
        model: the program.
        paired: for an engine of one token a row: attention sees each token twice, the second a pad behind it. It then
            takes the same code path as in passes of two tokens and more, whose bits differ from those of one, while
            all products keep their size.
    """
    graph = model.graph
    model.opset_imports[_MS] = 1
    lengths = _attention_lengths(graph, paired=paired)
    for node in list(graph):
        if node.op_type == "CachedAttention":
            _lower_attention(graph, node, lengths, paired=paired)
        elif node.op_type == "RMSNormalization":
            _lower_norm(node)
        elif node.op_type == "MatMul":
            _lower_head(node)


def _attention_lengths(graph: ir.Graph, *, paired: bool) -> list[ir.Value]:
    """Insert what GroupQueryAttention wants to know about lengths, computed once from ``write_index``."""
    ids = next(v for v in graph.inputs if v.name == contract.INPUT_IDS)
    write_index = next(v for v in graph.inputs if v.name == contract.WRITE_INDEX)
    one = constant(graph, "kvrelay.one", np.array([1], np.int64))
    width = ir.node("Shape", [ids], {"start": 1, "end": 2})
    first = [width]
    if paired:
        width = ir.node("Add", [width.outputs[0], one])
        first.append(width)
    batch = ir.node("Shape", [ids], {"start": 0, "end": 1})
    total = ir.node("Add", [write_index, width.outputs[0]])
    last = ir.node("Sub", [total.outputs[0], one])
    seqlens = ir.node("Cast", [last.outputs[0]], {"to": ir.DataType.INT32})
    longest = ir.node("ReduceMax", [total.outputs[0]], {"keepdims": 0})
    longest32 = ir.node("Cast", [longest.outputs[0]], {"to": ir.DataType.INT32})
    widths = ir.node("Expand", [width.outputs[0], batch.outputs[0]])
    widths32 = ir.node("Cast", [widths.outputs[0]], {"to": ir.DataType.INT32})
    nodes = [*first, batch, total, last, seqlens, longest, longest32, widths, widths32]
    graph.insert_before(graph[0], nodes)
    return [seqlens.outputs[0], longest32.outputs[0], widths32.outputs[0]]


def _positions(graph: ir.Graph) -> ir.Value:
    """Return the positions ``[B, S]`` of the pass, inserted on first use."""
    name = "kvrelay.positions"
    for node in graph:
        if node.outputs[0].name == name:
            return node.outputs[0]
    ids = next(v for v in graph.inputs if v.name == contract.INPUT_IDS)
    write_index = next(v for v in graph.inputs if v.name == contract.WRITE_INDEX)
    width = ir.node("Shape", [ids], {"start": 1, "end": 2})
    scalar = ir.node("Squeeze", [width.outputs[0]])
    zero, one = (constant(graph, f"kvrelay.scalar{i}", np.array(i, np.int64)) for i in (0, 1))
    offsets = ir.node("Range", [zero, scalar.outputs[0], one])
    start = ir.node("Unsqueeze", [write_index, constant(graph, "kvrelay.one", np.array([1], np.int64))])
    positions = ir.node("Add", [start.outputs[0], offsets.outputs[0]])
    positions.outputs[0].name = name
    graph.insert_before(graph[0], [width, scalar, offsets, start, positions])
    return positions.outputs[0]


def _lower_attention(graph: ir.Graph, node: ir.Node, lengths: list[ir.Value], *, paired: bool) -> None:
    query, key, value, past_key, past_value, _, cos, sin = node.inputs
    assert past_key is not None and past_key.shape is not None
    seqlens, longest, widths = lengths
    head_dim = past_key.shape[3]
    rotates = isinstance(head_dim, int) and head_dim % _ROTATED_MULTIPLE == 0
    if rotates:
        packed = _pack_projections(graph, node)
        inputs = [packed, None, None] if packed is not None else [query, key, value]
        tables = [cos, sin]
    else:
        positions = _positions(graph)
        rotations = [ir.node("RotaryEmbedding", [x, positions, cos, sin], domain=_MS) for x in (query, key)]
        graph.insert_before(node, rotations)
        inputs = [*(r.outputs[0] for r in rotations), value]
        tables = [None, None]
    if paired:
        twice = [ir.node("Concat", [x, x], {"axis": 1}) if x is not None else None for x in inputs]
        graph.insert_before(node, [n for n in twice if n is not None])
        inputs = [n.outputs[0] if n is not None else None for n in twice]
    attention = ir.node(
        "GroupQueryAttention",
        # Empty slots: position_ids, attention_bias, head_sink, k_scale, v_scale, q_norm, k_norm. `query_seqlens`
        # is what lets several rows of more than one token continue from different lengths.
        [*inputs, past_key, past_value, seqlens, longest, *tables, *[None] * 7, widths],
        {
            "num_heads": node.attributes["heads"].as_int(),
            "kv_num_heads": node.attributes["kv_heads"].as_int(),
            "scale": node.attributes["scale"].as_float(),
            "do_rotary": int(rotates),
        },
        domain=_MS,
        num_outputs=3,
    )
    if not paired:
        replace(node, [attention], attention.outputs)
        return
    zero, one = (constant(graph, f"kvrelay.at{i}", np.array([i], np.int64)) for i in (0, 1))
    first = ir.node("Slice", [attention.outputs[0], zero, one, one])
    replace(node, [attention, first], [first.outputs[0], *attention.outputs[1:]])


def _projection(value: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value | None] | None:
    """Split ``x @ W (+ b)`` into (x, W, b), or None if ``value`` is something else."""
    node = value.producer() if value is not None else None
    bias = None
    if node is not None and node.op_type == "Add" and weight_of(node.inputs[1]) is not None:
        bias = node.inputs[1]
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node is None or node.op_type != "MatMul" or weight_of(node.inputs[1]) is None:
        return None
    assert node.inputs[0] is not None and node.inputs[1] is not None
    return node.inputs[0], node.inputs[1], bias


def _pack_projections(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    found = [_projection(v) for v in node.inputs[:3]]
    parts = [p for p in found if p is not None]
    if len(parts) != 3 or len({id(p[0]) for p in parts}) != 1 or len({p[2] is None for p in parts}) != 1:
        return None
    name = (parts[0][1].name or "").replace("q_proj", "qkv_proj")
    weight = constant(graph, name, np.concatenate([weight_of(p[1]) for p in parts], axis=1))  # type: ignore[arg-type]
    product = ir.node("MatMul", [parts[0][0], weight])
    nodes = [product]
    if parts[0][2] is not None:
        stacked = np.concatenate([weight_of(p[2]) for p in parts])  # type: ignore[arg-type]
        bias = constant(graph, name.replace("weight_t", "bias"), stacked)
        nodes.append(ir.node("Add", [product.outputs[0], bias]))
    graph.insert_before(node, nodes)
    return nodes[-1].outputs[0]


def _lower_norm(node: ir.Node) -> None:
    x, gamma = node.inputs
    assert x is not None
    epsilon = {"epsilon": node.attributes["epsilon"].as_float()}
    add = x.producer()
    if add is not None and add.op_type == "Add" and all(weight_of(v) is None for v in add.inputs):
        fused = ir.node("SkipSimplifiedLayerNormalization", [*add.inputs, gamma], epsilon, domain=_MS, num_outputs=4)
        total = fused.outputs[3]
        total.shape, total.type = x.shape, x.type
        replace(node, [fused], fused.outputs[:1])
        ir.convenience.replace_all_uses_with(x, total)
        add.graph.remove(add, safe=True)  # type: ignore[union-attr]
    else:
        norm = ir.node("SimplifiedLayerNormalization", [x, gamma], {**epsilon, "axis": -1, "stash_type": 1})
        replace(node, [norm], norm.outputs)


def _lower_head(node: ir.Node) -> None:
    """A tied head reads the embedding through a Transpose; the fused product reads it as it lies."""
    transpose = node.inputs[1].producer() if node.inputs[1] is not None else None
    if transpose is not None and transpose.op_type == "Transpose" and weight_of(transpose.inputs[0]) is not None:
        fused = ir.node("FusedMatMul", [node.inputs[0], transpose.inputs[0]], {"transB": 1}, domain=_MS)
        replace(node, [fused], fused.outputs)


def quantize_ort(model: ir.Model, precision: str) -> None:
    """Quantise every product with a constant weight, the head included, in place."""
    graph = model.graph
    for node in list(graph):
        weight = weight_of(node.inputs[1]) if node.op_type in ("MatMul", "FusedMatMul") else None
        if weight is None:
            continue
        if node.op_type == "FusedMatMul":
            weight = weight.T
        source = node.inputs[1]
        assert source is not None and source.name
        if precision == "int8-dynamic":
            values, scale = quantize_columns(weight)
            # Stored unsigned: where a CPU lacks VNNI, onnxruntime multiplies by signed weights in sums of 16 bits,
            # which overflow without a word. Unsigned ones are widened first (and cost a tenth more there).
            inputs = [
                node.inputs[0],
                constant(graph, f"{source.name}.uint8", (values.astype(np.int16) + 128).astype(np.uint8)),
                constant(graph, f"{source.name}.int8_scale", scale),
                constant(graph, "kvrelay.uint8_zero", np.array(128, np.uint8)),
            ]
            new = ir.node("DynamicQuantizeMatMul", inputs, domain=_MS)
        else:
            new = _block_product(graph, node, source.name, weight, int(precision.removeprefix("int")))
        replace(node, [new], new.outputs)


def _block_product(graph: ir.Graph, node: ir.Node, name: str, weight: np.ndarray, bits: int) -> ir.Node:
    quantized = quantize_blocks(weight, bits, name)
    n, k = quantized.values.shape
    unsigned = (quantized.values.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    blocks = unsigned.reshape(n, k // 32, 32)
    if bits == 4:
        blocks = blocks[..., 0::2] | (blocks[..., 1::2] << 4)
    inputs = [
        node.inputs[0],
        constant(graph, f"{name}.int{bits}", np.ascontiguousarray(blocks)),
        constant(graph, f"{name}.int{bits}_scale", quantized.scales),
    ]
    # accuracy_level 4: activations are quantised to int8 in blocks of a row, so no row depends on another.
    attributes = {"K": k, "N": n, "bits": bits, "block_size": 32, "accuracy_level": 4}
    return ir.node("MatMulNBits", inputs, attributes, domain=_MS)


def dequantize_ort(model: ir.Model) -> None:
    """Put float products in the place of quantised ones, over the numbers that are in the graph, in place."""
    graph = model.graph
    for node in list(graph):
        if node.op_type == "DynamicQuantizeMatMul":
            values, scale = (weight_of(v) for v in node.inputs[1:3])
            assert values is not None and scale is not None
            weight = (values.astype(np.float32) - 128) * scale
        elif node.op_type == "MatMulNBits":
            stored, scale = (weight_of(v) for v in node.inputs[1:3])
            assert stored is not None and scale is not None
            bits = node.attributes["bits"].as_int()
            if bits == 4:
                stored = np.stack([stored & 0xF, stored >> 4], axis=-1).reshape(*stored.shape[:2], -1)
            values = stored.astype(np.float32) - 2 ** (bits - 1)
            weight = (values * scale.reshape(*values.shape[:2], 1)).reshape(len(values), -1).T
        else:
            continue
        source = node.inputs[1]
        assert source is not None
        name = f"{source.name}.float"
        product = ir.node("MatMul", [node.inputs[0], constant(graph, name, np.ascontiguousarray(weight))])
        replace(node, [product], product.outputs)


def store_kv_as(model: ir.Model, dtype: ir.DataType) -> None:
    """Keep the cache in ``dtype`` while everything else stays float32: attention runs between two casts."""
    graph = model.graph
    for value in (*graph.inputs, *graph.outputs):
        if value.name and value.name.startswith(("past_", "present_")):
            value.type = ir.TensorType(dtype)  # a new one: the program that this graph is a copy of shares the old
    for node in list(graph):
        if node.op_type != "GroupQueryAttention":
            continue
        for index in (0, 1, 2, 7, 8):  # query, key, value, cos_cache, sin_cache
            source = node.inputs[index]
            if source is not None:
                cast = ir.node("Cast", [source], {"to": dtype})
                graph.insert_before(node, [cast])
                node.replace_input_with(index, cast.outputs[0])
        (out, *_) = node.outputs
        back = ir.node("Cast", [out], {"to": ir.DataType.FLOAT})
        ir.convenience.replace_all_uses_with(out, back.outputs[0])
        back.replace_input_with(0, out)
        back.outputs[0].shape = out.shape
        out.type = ir.TensorType(dtype)
        graph.insert_after(node, [back])

"""Small editing steps on a program, shared by the dialects."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir
from kvrelay import contract
from onnx_ir import convenience
from onnx_ir.passes.common import RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

__all__ = [
    "cancel_reshapes",
    "constant",
    "drop_sublayers",
    "fix_shape",
    "name_weights",
    "pair_logit_row",
    "prune",
    "replace",
    "weight_of",
]


def constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Return the initializer ``name`` of ``graph``, registered on first use."""
    if name in graph.initializers:
        return graph.initializers[name]
    value = ir.val(name, const_value=ir.tensor(array, name=name))
    graph.register_initializer(value)
    return value


def weight_of(value: ir.Value | None) -> np.ndarray | None:
    """Return the array of an initializer, or None for a computed value."""
    if value is None or value.const_value is None:
        return None
    return value.const_value.numpy()


def replace(node: ir.Node, new: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> None:
    """Put ``new`` in the place of ``node``; ``outputs`` take over its values, graph outputs and names included."""
    graph = node.graph
    assert graph is not None
    names = [v.name for v in node.outputs]
    for old, value in zip(node.outputs, outputs, strict=True):
        value.shape, value.type = old.shape, old.type
    graph.insert_before(node, new)
    convenience.replace_all_uses_with(node.outputs, outputs, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    for name, value in zip(names, outputs, strict=True):
        value.name = name


def prune(model: ir.Model) -> None:
    """Remove what no output needs, trace metadata included."""
    RemoveUnusedNodesPass()(model)
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    RemoveUnusedOpsetsPass()(model)


def name_weights(model: ir.Model) -> None:
    """Name each folded weight after the module that owns it: tracing leaves ``val_24`` and the like."""
    graph = model.graph
    for node in list(graph):
        scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
        if node.op_type not in ("MatMul", "Gemm") or scopes is None:
            continue
        weight = node.inputs[1]
        if weight is not None and weight.const_value is not None and weight.name and weight.name.startswith("val_"):
            owner = ast.literal_eval(scopes)[-2]
            del graph.initializers[weight.name]
            weight.name = f"{owner.removeprefix('model.')}.weight_t"
            weight.const_value.name = weight.name
            graph.register_initializer(weight)


def drop_sublayers(model: ir.Model, skip: Collection[str]) -> None:
    """Remove the sublayers named in ``skip`` ("attention.3", "mlp.17"), with the cache tensors they owned."""
    for node in list(model.graph):
        if node.op_type != "Branch":
            continue
        (branch,), (marked,) = node.inputs, node.outputs
        assert branch is not None
        name = f"{node.attributes['kind'].as_string()}.{node.attributes['layer'].as_int()}"
        if name in skip:
            (add,) = marked.consumers()
            residual = next(v for v in add.inputs if v is not marked)
            assert add.op_type == "Add" and residual is not None
            convenience.replace_all_uses_with(add.outputs[0], residual)
            model.graph.remove(add, safe=True)
        else:
            convenience.replace_all_uses_with(marked, branch)
        model.graph.remove(node, safe=True)
    dropped = [int(name.split(".")[1]) for name in skip if name.startswith(contract.ATTENTION)]
    gone = {*contract.past_names(dropped), *contract.present_names(dropped)}
    for values in (model.graph.outputs, model.graph.inputs):
        kept = [v for v in values if v.name not in gone]
        values.clear()
        values.extend(kept)
        if values is model.graph.outputs:
            # Nodes of a dropped sublayer still hold its inputs until they are gone.
            RemoveUnusedNodesPass()(model)


def cancel_reshapes(model: ir.Model) -> None:
    """Replace a Reshape chain that ends in the shape it began with by its source."""

    def last_two(value: ir.Value) -> tuple[int | None, object]:
        shape = value.shape
        return (None, None) if shape is None else (len(shape), shape[-1])

    for node in list(model.graph):
        if node.op_type != "Reshape":
            continue
        source = node.inputs[0]
        assert source is not None
        while True:
            producer = source.producer()
            if producer is None or producer.op_type != "Reshape" or producer.inputs[0] is None:
                break
            source = producer.inputs[0]
        rank, last = last_two(node.outputs[0])
        if rank == 3 and isinstance(last, int) and last_two(source) == (rank, last):
            convenience.replace_all_uses_with(node.outputs[0], source)
            model.graph.remove(node, safe=True)


def fix_shape(model: ir.Model, batch: int | None, sequence: int, rows: int) -> ir.Model:
    """Return a copy of a dynamic engine with every axis fixed, the batch only if one is given."""
    fixed = model.clone()
    sizes = {contract.BATCH: batch or contract.BATCH, contract.SEQUENCE: sequence, contract.ROWS: rows}
    for value in (*fixed.graph.inputs, *fixed.graph.outputs):
        assert value.shape is not None
        value.shape = ir.Shape([d if isinstance(d, int) else sizes[str(d.value)] for d in value.shape])
    for node in fixed.graph:
        for value in node.outputs:
            if value not in fixed.graph.outputs:
                value.shape = None
    return fixed


def pair_logit_row(model: ir.Model) -> None:
    """Show the head its one row of an engine with one logit row twice, and drop the second result, in place.

    A product of one row adds up in another order than one of several on some CPUs (seen: int4 on AVX2). With two rows
    the pass gives the bits of the passes that want more logits, and lies in their shape class.
    """
    graph = model.graph
    (chosen,) = (n for n in graph if n.op_type == "GatherElements")
    twice = ir.node("Concat", [chosen.outputs[0], chosen.outputs[0]], {"axis": 1})
    convenience.replace_all_uses_with(chosen.outputs[0], twice.outputs[0])
    for index in (0, 1):
        twice.replace_input_with(index, chosen.outputs[0])
    graph.insert_after(chosen, [twice])
    logits = next(v for v in graph.outputs if v.name == contract.LOGITS)
    head = logits.producer()
    assert head is not None
    bounds = [constant(graph, f"kvrelay.at{i}", np.array([i], np.int64)) for i in (0, 1)]
    first = ir.node("Slice", [logits, *bounds, bounds[1]])
    first.outputs[0].shape, first.outputs[0].type = logits.shape, logits.type
    logits.name, logits.shape = "kvrelay.logits_twice", None
    first.outputs[0].name = contract.LOGITS
    graph.insert_after(head, [first])
    graph.outputs[[o.name for o in graph.outputs].index("kvrelay.logits_twice")] = first.outputs[0]

"""What a graph of each portable dialect may hold: checked on every graph that is made.

The backends that these dialects are for drop or misread some of the rest without an error.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir

from .dialect_decomposed import OPSET as DECOMPOSED_OPSET
from .dialect_standard import OPSET as STANDARD_OPSET
from .errors import ExportError

__all__ = ["check_form"]

_OPSETS = {"standard": STANDARD_OPSET, "decomposed": DECOMPOSED_OPSET}


def check_form(model: ir.Model, dialect: str) -> None:
    """Refuse a graph that holds what its dialect must not; the `ort` dialect has no such rules.

    Raises:
        ExportError: names the node or tensor and the rule.
    """
    if dialect not in _OPSETS:
        return
    found = [*_operator_faults(model, _OPSETS[dialect]), *_value_faults(model)]
    if dialect == "standard":
        found += [fault for node in model.graph for fault in _standard_faults(node)]
    if found:
        raise ExportError(f"the {dialect} dialect does not allow: {'; '.join(found[:4])}")


def _operator_faults(model: ir.Model, opset: int) -> Iterator[str]:
    if dict(model.opset_imports) != {"": opset}:
        yield f"operator sets {dict(model.opset_imports)}, it is opset {opset} of ONNX alone"
    for node in model.graph:
        if node.domain or not onnx.defs.has(node.op_type, opset, ""):
            yield f"{_name(node)}, which is not in opset {opset} of ONNX"
            continue
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        for attribute in node.attributes:
            if attribute not in schema.attributes:
                yield f"{attribute} of {_name(node)}, which opset {opset} does not have"
        if not schema.min_input <= len(node.inputs) <= schema.max_input:
            yield f"{len(node.inputs)} inputs of {_name(node)}"


def _value_faults(model: ir.Model) -> Iterator[str]:
    for value in model.graph.inputs:
        sizes = list(value.shape or ())[1:] if value.name and value.name.startswith("past_") else []
        if not all(isinstance(size, int) for size in sizes):
            yield f"a dynamic capacity in {value.name} {value.shape}"
    for name, tensor in _constants(model):
        array = tensor.numpy()
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            yield f"an infinity or NaN in the constant {name}"


def _constants(model: ir.Model) -> Iterator[tuple[str, ir.TensorProtocol]]:
    for name, value in model.graph.initializers.items():
        # Weights come from a checkpoint and are compared with torch; what lowering adds is small.
        if value.const_value is not None and value.const_value.size <= 4096:
            yield name, value.const_value
    for node in model.graph:
        if node.op_type == "Constant" and "value" in node.attributes:
            yield node.outputs[0].name or "", node.attributes["value"].as_tensor()


def _standard_faults(node: ir.Node) -> Iterator[str]:
    if node.op_type == "Attention":
        for attribute in set(node.attributes) - {"scale"}:
            yield f"{attribute} of {_name(node)}"
        if any(v is not None for v in node.inputs[4:]):
            yield f"past keys or nonpad_kv_seqlen of {_name(node)}"
        if len(node.outputs) != 1:
            yield f"present outputs of {_name(node)}"
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        if mask is None or mask.producer() is None or mask.producer().op_type != "LessOrEqual":  # type: ignore[union-attr]
            yield f"{_name(node)} without the explicit boolean mask"
    elif node.op_type == "TensorScatter":
        past, present = node.inputs[0], node.outputs[0]
        if set(node.attributes) != {"axis"} or node.attributes["axis"].as_int() != 2:
            yield f"attributes {sorted(node.attributes)} of {_name(node)}, it is axis 2 alone"
        if past is None or not past.is_graph_input() or not present.is_graph_output():
            yield f"{_name(node)} that does not lead from a cache input to a cache output"
        elif (present.name or "") != (past.name or "").replace("past_", "present_", 1):
            yield f"{_name(node)} from {past.name} to {present.name}"
    elif node.op_type == "DequantizeLinear":
        scale = node.inputs[1]
        if scale is None or scale.const_value is None or not (scale.const_value.numpy() > 0).all():
            yield f"scales of {_name(node)} that are not all positive"
        if len(node.inputs) > 2:
            yield f"a zero point of {_name(node)}"


def _name(node: ir.Node) -> str:
    return f"{node.op_type} {node.name or node.outputs[0].name!r}"

"""Half precision: a program whose weights, activations and cache are float16 and whose logits are float32."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from kvrelay import contract

from .errors import ExportError

__all__ = ["LARGEST", "SMALLEST", "to_half"]

LARGEST = float(np.finfo(np.float16).max)  # 65504
SMALLEST = float(np.finfo(np.float16).smallest_subnormal)


def to_half(model: ir.Model) -> None:
    """Make ``model`` float16 in place, before it is lowered to a dialect.

    Raises:
        ExportError: a weight is outside the range of float16; names it.
    """
    graph = model.graph
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype == ir.DataType.FLOAT:
            value.const_value = ir.tensor(_rounded(tensor.numpy(), value.name or ""), name=value.name)
            value.type = ir.TensorType(ir.DataType.FLOAT16)
    for node in graph:
        for value in node.outputs:
            _retype(value)
        to = node.attributes.get("to")
        if node.op_type == "Cast" and to is not None and to.as_int() == ir.DataType.FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT16)
    for value in graph.inputs:
        _retype(value)
    _give_float32(graph)


def _rounded(array: np.ndarray, name: str) -> np.ndarray:
    largest = float(np.abs(array).max(initial=0.0))
    if not largest <= LARGEST:
        raise ExportError(
            f"{name.removesuffix('.weight_t')} holds {largest:.6g}, over the {LARGEST:.0f} of float16; use "
            "--precisions fp32, or --activations float32 for int8 and int4"
        )
    return array.astype(np.float16)


def _retype(value: ir.Value) -> None:
    # A new type: the program that this one is a copy of shares the old.
    if value.dtype == ir.DataType.FLOAT:
        value.type = ir.TensorType(ir.DataType.FLOAT16)


def _give_float32(graph: ir.Graph) -> None:
    index, logits = next((i, v) for i, v in enumerate(graph.outputs) if v.name == contract.LOGITS)
    cast = ir.node("Cast", [logits], {"to": ir.DataType.FLOAT})
    wide = cast.outputs[0]
    wide.shape, wide.type = logits.shape, ir.TensorType(ir.DataType.FLOAT)
    logits.name = f"{contract.LOGITS}.float16"
    wide.name = contract.LOGITS
    graph.append(cast)
    graph.outputs[index] = wide

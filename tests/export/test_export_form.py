"""Graphs of the portable dialects hold nothing that a backend drops or misreads, and one that does is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from kvrelay import contract
from kvrelay_export.errors import ExportError
from kvrelay_export.form import check_form
from kvrelay_export.graph import constant, fix_shape
from tracing import Program

STANDARD = [
    ("fp32", "float32"),
    ("fp16", "float16"),
    ("int8", "float32"),
    ("int4", "float32"),
    ("int8", "float16"),
    ("int4", "float16"),
]


@pytest.fixture(scope="module")
def llama(program: Callable[..., Program]) -> Program:
    return program("llama")


def constants(model: ir.Model) -> Iterator[np.ndarray]:
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        yield value.const_value.numpy()
    for node in model.graph:
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR:
                yield attribute.as_tensor().numpy()


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize(("precision", "activations"), STANDARD)
def test_standard_holds_nothing_that_tensorrt_drops_or_misreads(
    program: Callable[..., Program], family: str, precision: str, activations: str
) -> None:
    model = program(family).graph("standard", precision, activations=activations)
    assert dict(model.opset_imports) == {"": 24}
    for node in model.graph:
        assert not node.domain
        if node.op_type == "Attention":
            assert set(node.attributes) == {"scale"}  # no is_causal, no softcap, no softmax_precision
            assert len(node.inputs) == 4  # no past, no nonpad_kv_seqlen
            assert len(node.outputs) == 1  # no present, no scores
            mask = node.inputs[3].producer()  # type: ignore[union-attr]
            assert mask is not None
            assert mask.op_type == "LessOrEqual"
        elif node.op_type == "TensorScatter":
            assert "mode" not in node.attributes
            assert [isinstance(size, int) for size in node.inputs[0].shape] == [False, True, True, True]  # type: ignore[union-attr]
    assert all(np.isfinite(array).all() for array in constants(model) if array.dtype.kind == "f")


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_decomposed_is_valid_opset_17_with_new_entries_as_outputs(
    program: Callable[..., Program], family: str, precision: str
) -> None:
    traced = program(family)
    model = traced.graph("decomposed", precision, activations="float16" if precision == "fp16" else "float32")
    assert dict(model.opset_imports) == {"": 17}
    for node in model.graph:
        assert not node.domain
        assert onnx.defs.get_schema(node.op_type, 17).since_version <= 17
    for graph in (model, fix_shape(model, 2, 8, 8)):
        onnx.checker.check_model(ir.serde.serialize_model(graph), full_check=True)
    assert [v.name for v in model.graph.outputs] == contract.output_names(range(2), "decomposed")
    sizes = {str(v.name): [d if isinstance(d, int) else str(d.value) for d in v.shape] for v in model.graph.outputs}  # type: ignore[union-attr]
    g = traced.entry
    for name in contract.new_names(range(2)):
        assert sizes[name] == ["batch", g.kv_heads, "sequence", g.head_dim]
    assert all(np.isfinite(array).all() for array in constants(model) if array.dtype.kind == "f")


# --- graphs made wrong on purpose -------------------------------------------------------------------------------------


def find(model: ir.Model, op: str) -> ir.Node:
    return next(n for n in model.graph if n.op_type == op)


def causal(model: ir.Model) -> None:
    find(model, "Attention").attributes["is_causal"] = ir.AttrInt64("is_causal", 1)


def key_lengths(model: ir.Model) -> None:
    write_index = next(v for v in model.graph.inputs if v.name == contract.WRITE_INDEX)
    node = find(model, "Attention")
    new = ir.node("Attention", [*node.inputs, None, None, write_index], {"scale": 0.25}, num_outputs=1)
    swap(model, node, new)


def present_outputs(model: ir.Model) -> None:
    node = find(model, "Attention")
    past = [v for v in model.graph.inputs if (v.name or "").endswith((".0",))]
    swap(model, node, ir.node("Attention", [*node.inputs, *past], {"scale": 0.25}, num_outputs=3))


def swap(model: ir.Model, node: ir.Node, new: ir.Node) -> None:
    model.graph.insert_before(node, [new])
    ir.convenience.replace_all_uses_with(node.outputs[0], new.outputs[0])
    model.graph.remove(node, safe=True)


def float_mask(model: ir.Model) -> None:
    node = find(model, "Attention")
    zero = constant(model.graph, "open", np.zeros((1, 1, 1, 1), np.float32))
    node.replace_input_with(3, zero)


def infinity(model: ir.Model) -> None:
    constant(model.graph, "hidden", np.array([-np.inf], np.float32))


def infinity_in_a_node(model: ir.Model) -> None:
    tensor = ir.tensor(np.array([np.inf], np.float32))
    model.graph.insert_before(model.graph[0], [ir.node("Constant", [], {"value": tensor})])


def dynamic_capacity(model: ir.Model) -> None:
    past = next(v for v in model.graph.inputs if v.name == "past_key.1")
    past.shape = ir.Shape(["batch", 2, "capacity", 16])


def circular(model: ir.Model) -> None:
    find(model, "TensorScatter").attributes["mode"] = ir.AttrString("mode", "circular")


def a_cache_that_leads_nowhere(model: ir.Model) -> None:
    outputs = [v for v in model.graph.outputs if v.name != "present_value.1"]
    model.graph.outputs.clear()
    model.graph.outputs.extend(outputs)


def zero_scale(model: ir.Model) -> None:
    scale = find(model, "DequantizeLinear").inputs[1]
    assert scale is not None
    assert scale.const_value is not None
    scale.const_value = ir.tensor(np.zeros_like(scale.const_value.numpy()), name=scale.name)


def zero_point(model: ir.Model) -> None:
    node = find(model, "DequantizeLinear")
    scale = node.inputs[1].const_value.numpy()  # type: ignore[union-attr]
    point = constant(model.graph, "point", np.zeros(scale.shape, np.int8))
    new = ir.node("DequantizeLinear", [*node.inputs, point], {"axis": 0, "block_size": 32})
    swap(model, node, new)


def foreign_operator(model: ir.Model) -> None:
    find(model, "Sigmoid").domain = "com.microsoft"


FAULTS = {
    causal: "is_causal of Attention",
    key_lengths: "past keys or nonpad_kv_seqlen of Attention",
    present_outputs: "present outputs of Attention",
    float_mask: "without the explicit boolean mask",
    infinity: "an infinity or NaN in the constant hidden",
    infinity_in_a_node: "an infinity or NaN in the constant",
    dynamic_capacity: "a dynamic capacity in past_key.1",
    circular: r"attributes \['axis', 'mode'\] of TensorScatter",
    a_cache_that_leads_nowhere: "does not lead from a cache input to a cache output",
    zero_scale: "scales of DequantizeLinear .* that are not all positive",
    zero_point: "a zero point of DequantizeLinear",
    foreign_operator: "Sigmoid .*, which is not in opset 24 of ONNX",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_standard_graph_made_wrong_on_purpose_is_refused(llama: Program, fault: Callable[[ir.Model], None]) -> None:
    model = llama.graph("standard", "int8")
    fault(model)
    with pytest.raises(ExportError, match=f"the standard dialect does not allow: .*{FAULTS[fault]}"):
        check_form(model, "standard")


def newer_operator(model: ir.Model) -> None:
    node = find(model, "Sigmoid")
    swap(model, node, ir.node("Swish", list(node.inputs)))


def newer_attribute(model: ir.Model) -> None:
    find(model, "Reshape").attributes["allowone"] = ir.AttrInt64("allowone", 1)


def newer_input(model: ir.Model) -> None:
    node = find(model, "ReduceMean")
    axes = constant(model.graph, "axes", np.array([-1], np.int64))
    swap(model, node, ir.node("ReduceMean", [*node.inputs, axes], {"keepdims": 1}))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (newer_operator, "Swish .*, which is not in opset 17 of ONNX"),
        (newer_attribute, "allowone of Reshape .*, which opset 17 does not have"),
        (newer_input, "2 inputs of ReduceMean"),
        (dynamic_capacity, "a dynamic capacity in past_key.1"),
        (infinity, "an infinity or NaN in the constant hidden"),
    ],
)
def test_a_decomposed_graph_that_opset_17_does_not_cover_is_refused(
    llama: Program, fault: Callable[[ir.Model], None], message: str
) -> None:
    model = llama.graph("decomposed")
    fault(model)
    with pytest.raises(ExportError, match=f"the decomposed dialect does not allow: .*{message}"):
        check_form(model, "decomposed")

"""The check that ends an export finds graphs that compute something else, at every precision."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from kvrelay import contract
from kvrelay.manifest import Check
from kvrelay_export.check import CHECK_LENGTH, check_engine, compare_twins
from kvrelay_export.errors import CheckError
from kvrelay_export.graph import constant, fix_shape
from kvrelay_export.program import Geometry, trace
from kvrelay_export.reference import reference_logits
from tracing import Program

PRECISIONS = ("fp32", "int8", "int4", "int8-dynamic")
SHAPES = (None, (1, 8))
# Every precision with dynamic axes; at a fixed shape the tightest and the loosest.
CASES = [*((p, None) for p in PRECISIONS), ("fp32", (1, 8)), ("int8-dynamic", (1, 8))]


@pytest.fixture(scope="module")
def llama(program: Callable[..., Program]) -> Program:
    return program("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(4, 260, (4, CHECK_LENGTH))


@pytest.fixture(scope="module")
def references(llama: Program, ids: np.ndarray) -> dict[str, np.ndarray]:
    return {p: reference_logits(llama.model, ids, p) for p in PRECISIONS}


Checked = Callable[[ir.Model, str, tuple[int, int] | None], Check]


@pytest.fixture
def checked(llama: Program, ids: np.ndarray, references: dict[str, np.ndarray]) -> Checked:
    def check(graph: ir.Model, precision: str, shape: tuple[int, int] | None) -> Check:
        path = llama.save(graph if shape is None else fix_shape(graph, *shape, shape[1]))
        entry = llama.engine_entry(path, precision, shape=shape).model_copy(update={"name": "the-engine"})
        return check_engine(entry, path, llama.entry, ids, references[precision], references["fp32"])

    return check


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_faithful_engine_passes(
    llama: Program, checked: Checked, precision: str, shape: tuple[int, int] | None
) -> None:
    check = checked(llama.graph("ort", precision), precision, shape)
    assert check.top1 > 0.85
    assert check.tokens > 100


def without_last_mlp(llama: Program, precision: str) -> ir.Model:
    return llama.graph("ort", precision, skip=("mlp.3",))


def without_first_attention(llama: Program, precision: str) -> ir.Model:
    """The sublayer is cut, its cache passes through untouched."""
    graph = llama.graph("ort", precision)
    node = next(n for n in graph.graph if n.op_type == "GroupQueryAttention")
    (out_projection,) = node.outputs[0].consumers()
    (add,) = out_projection.outputs[0].consumers()
    index = list(add.inputs).index(out_projection.outputs[0])
    zero = constant(graph.graph, "zero", np.zeros((1, 1, 1), np.float32))
    expand = ir.node("Mul", [out_projection.outputs[0], zero])
    graph.graph.insert_before(add, [expand])
    add.replace_input_with(index, expand.outputs[0])
    return graph


def shifted_by_one(llama: Program, precision: str) -> ir.Model:
    graph = llama.graph("ort", precision)
    write_index = next(v for v in graph.graph.inputs if v.name == contract.WRITE_INDEX)
    consumers = list(write_index.uses())
    late = ir.node("Add", [write_index, constant(graph.graph, "shift", np.array([1], np.int64))])
    for use in consumers:
        use.node.replace_input_with(use.idx, late.outputs[0])
    graph.graph.insert_before(graph.graph[0], [late])
    return graph


def swapped_tables(llama: Program, precision: str) -> ir.Model:
    graph = llama.graph("ort", precision)
    for node in graph.graph:
        if node.op_type == "GroupQueryAttention":
            cos, sin = node.inputs[7], node.inputs[8]
            node.replace_input_with(7, sin)
            node.replace_input_with(8, cos)
    return graph


def unscaled_scores(llama: Program, precision: str) -> ir.Model:
    graph = llama.graph("ort", precision)
    node = next(n for n in graph.graph if n.op_type == "GroupQueryAttention")
    node.attributes["scale"] = ir.AttrFloat32("scale", 1.0)
    return graph


FAULTS = (without_last_mlp, without_first_attention, shifted_by_one, swapped_tables, unscaled_scores)


@pytest.mark.parametrize(("precision", "shape"), CASES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_graph_fails_and_the_error_names_engine_and_position(
    llama: Program,
    checked: Checked,
    fault: Callable[[Program, str], ir.Model],
    precision: str,
    shape: tuple[int, int] | None,
) -> None:
    with pytest.raises(CheckError, match=r"engine the-engine.* text \d position \d+") as caught:
        checked(fault(llama, precision), precision, shape)
    assert re.search(r"agreement 0\.\d+|difference \d", str(caught.value))


def test_logits_that_are_not_numbers_fail(llama: Program, checked: Checked) -> None:
    graph = llama.graph("ort")
    (logits,) = (v for v in graph.graph.outputs if v.name == contract.LOGITS)
    node = logits.producer()
    assert node is not None
    broken = constant(graph.graph, "broken", np.full(1, np.nan, np.float32))
    scaled = ir.node("Mul", [node.inputs[0], broken])
    graph.graph.insert_before(node, [scaled])
    node.replace_input_with(0, scaled.outputs[0])
    with pytest.raises(CheckError, match=r"the-engine.*not finite"):
        checked(graph, "fp32", None)


@pytest.mark.parametrize("dialect", ["ort", "standard"])
def test_a_statically_traced_graph_and_its_fixed_twin_are_bit_identical(
    program: Callable[..., Program], ids: np.ndarray, dialect: str
) -> None:
    traced = program("llama")
    static = Program(
        traced.model, traced.entry, trace(traced.model, Geometry.of(traced.model, 256), (1, 4)), traced.folder
    )
    for precision in ("fp32", "int4"):
        a = traced.save(static.graph(dialect, precision))
        b = traced.save(fix_shape(traced.graph(dialect, precision), 1, 4, 4))
        entry = traced.engine_entry(b, precision, dialect=dialect, shape=(1, 4))
        compare_twins(entry, a, b, traced.entry, ids[:1])


def test_twins_that_differ_are_told_apart_with_the_position(program: Callable[..., Program], ids: np.ndarray) -> None:
    traced = program("llama")
    graph = traced.graph("ort")
    a = traced.save(fix_shape(graph, 1, 4, 4))
    table = next(n for n in graph.graph if n.op_type == "GroupQueryAttention").inputs[7]
    assert table is not None
    assert table.const_value is not None
    bent = table.const_value.numpy().copy()
    bent[21] *= 1.001
    table.const_value = ir.tensor(bent, name=table.name)
    b = traced.save(fix_shape(graph, 1, 4, 4))
    entry = traced.engine_entry(b, "fp32", shape=(1, 4))
    with pytest.raises(CheckError, match=f"engine {entry.name}.* text 0 position 21 "):
        compare_twins(entry, a, b, traced.entry, ids[:1])

"""The dialects: which operators they use, and that they compute the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from kvrelay.ort.threads import load_session
from tiny import build_model
from tracing import Program, hf_logits, random_ids, trace_program

BIASED = {
    "qwen2": ("qwen2", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
}


@pytest.fixture(scope="module")
def llama(program: Callable[..., Program]) -> Program:
    return program("llama")


def operators(graph: ir.Model) -> Counter[str]:
    return Counter(n.op_type if not n.domain else f"{n.domain}.{n.op_type}" for n in graph.graph)


@pytest.mark.parametrize("dialect", ["ort", "standard", "decomposed"])
@pytest.mark.parametrize("model", BIASED)
def test_biases_arrive_in_every_dialect(program: Callable[..., Program], model: str, dialect: str) -> None:
    family, config = BIASED[model]
    traced = program(family, **config)
    biases = [name for name, _ in traced.model.named_parameters() if name.endswith("bias")]
    assert len(biases) == (14 if family == "llama" else 6)
    ids = random_ids(traced.model, 2, 40)
    np.testing.assert_allclose(traced.logits(traced.engine(dialect), ids), hf_logits(traced.model, ids), atol=3e-5)


@pytest.mark.parametrize("dialect", ["ort", "standard", "decomposed"])
def test_a_tied_head_is_stored_once_and_computes_the_same(program: Callable[..., Program], dialect: str) -> None:
    traced = program("llama", tie_word_embeddings=True)
    graph = traced.graph(dialect)
    large = [v for v in graph.graph.initializers.values() if v.const_value.size == 320 * 64]  # type: ignore[union-attr]
    assert len(large) == 1
    ids = random_ids(traced.model, 2, 40)
    for precision, limit in (("fp32", 2e-5), *([("int8", 0.2)] if dialect != "decomposed" else [])):
        difference = traced.logits(traced.engine(dialect, precision), ids) - hf_logits(traced.model, ids)
        assert np.abs(difference).max() < limit


def test_scores_of_any_size_are_hidden(tmp_path: Path) -> None:
    model = build_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            for product in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                product.weight.mul_(300)
    traced = trace_program(model, tmp_path)
    ids = random_ids(model, 2, 40)
    wanted = traced.logits(traced.engine("standard"), ids)
    np.testing.assert_allclose(traced.logits(traced.engine("decomposed"), ids), wanted, atol=1e-3)


# --- standard ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_standard_is_opset_24_of_onnx_alone(llama: Program, precision: str) -> None:
    graph = llama.graph("standard", precision)
    assert dict(graph.opset_imports) == {"": 24}
    assert {n.domain for n in graph.graph} == {""}
    assert not graph.functions


def test_standard_scatters_each_cache_once_and_attends_behind_an_explicit_mask(llama: Program) -> None:
    graph = llama.graph("standard")
    count = operators(graph)
    assert count["TensorScatter"] == 4
    assert count["Attention"] == 2
    scatters = [n for n in graph.graph if n.op_type == "TensorScatter"]
    assert sorted(str(n.inputs[0].name) for n in scatters) == [  # type: ignore[union-attr]
        "past_key.0", "past_key.1", "past_value.0", "past_value.1",
    ]  # fmt: skip
    for node in scatters:
        assert str(node.outputs[0].name) == str(node.inputs[0].name).replace("past", "present")  # type: ignore[union-attr]
        assert node.attributes["axis"].as_int() == 2
        assert "mode" not in node.attributes
    for node in (n for n in graph.graph if n.op_type == "Attention"):
        assert set(node.attributes) == {"scale"}  # no is_causal, no softcap
        assert len(node.inputs) == 4  # no past, no nonpad_kv_seqlen
        assert len(node.outputs) == 1
        assert node.inputs[3].producer().op_type == "LessOrEqual"  # type: ignore[union-attr]
        assert {node.inputs[i].producer().op_type for i in (1, 2)} == {"TensorScatter"}  # type: ignore[union-attr]


def test_standard_masks_with_booleans_of_capacity_width(llama: Program) -> None:
    graph = llama.graph("standard")
    mask = next(n for n in graph.graph if n.op_type == "Attention").inputs[3]
    assert mask is not None
    node = mask.producer()
    assert node is not None
    entries = node.inputs[0].const_value.numpy()  # type: ignore[union-attr]
    np.testing.assert_array_equal(entries.reshape(-1), np.arange(llama.entry.capacity))


def test_standard_has_no_literal_infinity(llama: Program) -> None:
    for value in llama.graph("standard").graph.initializers.values():
        array = value.const_value.numpy()  # type: ignore[union-attr]
        assert array.dtype.kind != "f" or np.isfinite(array).all(), value.name


def optimised(file: Path) -> Counter[str]:
    """Operators of ``file`` after ONNX Runtime's own optimisation."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(file.with_suffix(".optimised"))
    load_session(file, options)
    return operators(ir.load(file.with_suffix(".optimised")))


def test_standard_int4_is_symmetric_block_dequantizelinear_that_onnx_runtime_fuses(llama: Program) -> None:
    graph = llama.graph("standard", "int4")
    nodes = [n for n in graph.graph if n.op_type == "DequantizeLinear"]
    assert len(nodes) == 2 * 7 + 1
    for node in nodes:
        values, scales = (v.const_value for v in node.inputs)  # type: ignore[union-attr]
        assert values.dtype == ir.DataType.INT4  # type: ignore[union-attr]
        assert len(node.inputs) == 2  # no zero point
        assert node.attributes["axis"].as_int() == 0
        assert node.attributes["block_size"].as_int() == 32
        assert scales.shape[0] * 32 == values.shape[0]  # type: ignore[union-attr]
        assert (scales.numpy() > 0).all()  # type: ignore[union-attr]
    count = optimised(llama.save(graph))
    assert count["com.microsoft.MatMulNBits"] == len(nodes)
    assert not count["DequantizeLinear"]


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_both_dialects_pick_the_same_tokens(llama: Program, precision: str) -> None:
    """int8 and int4 kernels may round activations differently, so that only near ties may differ."""
    ids = random_ids(llama.model, 3, 60)
    ort, standard = (llama.logits(llama.engine(d, precision), ids) for d in ("ort", "standard"))
    differ = ort.argmax(-1) != standard.argmax(-1)
    if precision == "fp32":
        np.testing.assert_allclose(ort, standard, atol=2e-5)
        assert not differ.any()
    noise = np.abs(ort - standard).max()
    top2 = np.sort(ort, axis=-1)[..., -2:]
    assert (top2[differ][:, 1] - top2[differ][:, 0] <= 2 * noise).all()
    assert differ.mean() < 0.05


# --- ort --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "config"), [("llama", {}), ("qwen2", {})])
def test_ort_packs_query_key_and_value_into_one_product(
    program: Callable[..., Program], family: str, config: dict[str, bool]
) -> None:
    traced = program(family, **config)
    graph = traced.graph("ort")
    for node in (n for n in graph.graph if n.op_type == "GroupQueryAttention"):
        assert node.inputs[1] is None
        assert node.inputs[2] is None
        product = node.inputs[0].producer()  # type: ignore[union-attr]
        if family == "qwen2":
            assert product.op_type == "Add"  # type: ignore[union-attr]
            product = product.inputs[0].producer()  # type: ignore[union-attr]
        assert product.op_type == "MatMul"  # type: ignore[union-attr]
        assert product.inputs[1].shape == [64, 4 * 16 + 2 * 2 * 16]  # type: ignore[union-attr]
    assert operators(graph)["MatMul"] == 2 * (1 + 1 + 3) + 1


def test_ort_does_not_pack_where_a_norm_stands_in_between(program: Callable[..., Program]) -> None:
    graph = program("qwen3", head_dim=32).graph("ort")
    for node in (n for n in graph.graph if n.op_type == "GroupQueryAttention"):
        assert node.inputs[1] is not None
        assert node.inputs[2] is not None
    assert operators(graph)["MatMul"] == 2 * (3 + 1 + 3) + 1


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_packed_graph_equals_the_unpacked_one(
    program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch, family: str, precision: str
) -> None:
    traced = program(family)
    ids = random_ids(traced.model, 2, 40)
    packed = traced.logits(traced.engine("ort", precision), ids)
    monkeypatch.setattr("kvrelay_export.dialect_ort._pack_projections", lambda *_: None)
    graph = traced.graph("ort", precision)
    assert all(n.inputs[1] is not None for n in graph.graph if n.op_type == "GroupQueryAttention")
    np.testing.assert_allclose(traced.logits(traced.load(graph, precision), ids), packed, atol=2e-5)


def test_ort_fuses_norms_and_leaves_no_operator_of_the_trace(llama: Program) -> None:
    count = operators(llama.graph("ort"))
    assert not [name for name in count if name.startswith("kvrelay.")]
    assert count["com.microsoft.SkipSimplifiedLayerNormalization"] == 4
    assert count["SimplifiedLayerNormalization"] == 1
    assert not count["RMSNormalization"]


def test_every_quantised_product_of_ort_has_the_kernel_of_its_precision(llama: Program) -> None:
    products = 2 * (1 + 1 + 2 + 1) + 1
    for precision, name in (
        ("int4", "MatMulNBits"),
        ("int8", "MatMulNBits"),
        ("int8-dynamic", "DynamicQuantizeMatMul"),
    ):
        count = operators(llama.graph("ort", precision))
        assert count[f"com.microsoft.{name}"] == products
        assert not count["MatMul"]


def test_lowering_leaves_the_program_as_it_is(llama: Program) -> None:
    before = ir.serde.serialize_model(llama.program).SerializeToString(deterministic=True)
    half = {"activations": "float16"}
    for dialect, precision, options in (
        ("ort", "int4", {"kv_dtype": "float16"}),
        ("ort", "int4", {"skip": ("mlp.0",)}),
        ("standard", "int4", half),
        ("standard", "fp16", half),
        ("decomposed", "fp16", half),
    ):
        llama.graph(dialect, precision, **options)
    assert ir.serde.serialize_model(llama.program).SerializeToString(deterministic=True) == before

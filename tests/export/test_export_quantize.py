"""Properties of weight quantisation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from kvrelay.ort.threads import load_session
from kvrelay_export.dialect_ort import dequantize_ort, quantize_ort
from kvrelay_export.errors import ExportError
from kvrelay_export.quantize import BLOCK, dequantize_blocks, quantize_blocks, quantize_columns
from tiny import build_model
from tracing import Program, trace_program


def weights(multiple: int) -> st.SearchStrategy[np.ndarray]:
    finite = st.floats(-1e4, 1e4, width=32)
    sizes = st.tuples(st.integers(1, 4), st.integers(1, 4))
    return sizes.flatmap(lambda s: arrays.arrays(np.float32, (s[0] * multiple, s[1]), elements=finite))


def largest_of_blocks(weight: np.ndarray) -> np.ndarray:
    """The largest magnitude of each block, spread over it: ``[K, N]``."""
    k, n = weight.shape
    return np.abs(weight).reshape(k // BLOCK, BLOCK, n).max(axis=1, keepdims=True).repeat(BLOCK, axis=1).reshape(k, n)


@settings(deadline=None, max_examples=60)
@given(weight=weights(BLOCK), bits=st.sampled_from([4, 8]))
def test_blocks_stay_in_range_with_positive_scales_and_a_bounded_error(weight: np.ndarray, bits: int) -> None:
    quantized = quantize_blocks(weight, bits)
    k, n = weight.shape
    high = 2 ** (bits - 1) - 1
    assert quantized.values.shape == (n, k)
    assert quantized.scales.shape == (n, k // BLOCK)
    assert quantized.values.min() >= -high - 1
    assert quantized.values.max() <= high
    assert (quantized.scales > 0).all()
    error = np.abs(dequantize_blocks(quantized) - weight)
    largest = largest_of_blocks(weight)
    if bits == 8:
        assert (error <= largest / high * 0.5001 + 1e-11).all()
    else:
        # Blocks may be clipped a little where that lowers their squared error, never above plain rounding.
        plain = np.clip(np.rint(weight / (largest / high + 1e-30)), -high - 1, high) * (largest / high) - weight
        by_block = [np.square(e, dtype=np.float64).reshape(k // BLOCK, BLOCK, n).sum(axis=1) for e in (error, plain)]
        noise = 1e-11 * BLOCK * np.square(largest, dtype=np.float64)[::BLOCK]
        noise += BLOCK * 1e-11**2  # scales have a least value: a block far below it becomes zeros
        assert (by_block[0] <= by_block[1] * 1.001 + noise).all()
        assert (error <= largest * 0.2001 + 1e-11).all()


def test_int4_blocks_are_never_worse_than_plain_rounding_and_mostly_better() -> None:
    weight = np.random.default_rng(0).standard_normal((20 * BLOCK, 50)).astype(np.float32)
    scale = largest_of_blocks(weight) / 7
    plain = np.rint(weight / scale) * scale
    ours = dequantize_blocks(quantize_blocks(weight, 4))
    by_block = [np.square(w - weight).reshape(20, BLOCK, 50).sum(axis=1) for w in (ours, plain)]
    assert (by_block[0] <= by_block[1] * 1.0001).all()
    assert (by_block[0] < by_block[1] * 0.9999).mean() > 0.5


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.integers(1, 4),
    scale=st.floats(2.0**-20, 2.0**20, width=32),
    bits=st.sampled_from([4, 8]),
)
def test_a_weight_on_the_grid_survives_the_round_trip(seed: int, blocks: int, scale: float, bits: int) -> None:
    high = 2 ** (bits - 1) - 1
    values = np.random.default_rng(seed).integers(-high, high + 1, (blocks, BLOCK, 3))
    values[:, 0] = high  # each block uses its whole range
    weight = (values * scale).astype(np.float32).reshape(-1, 3)
    quantized = quantize_blocks(weight, bits)
    np.testing.assert_array_equal(quantized.values.T, values.reshape(-1, 3))
    np.testing.assert_allclose(dequantize_blocks(quantized), weight, rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(weight=weights(1))
def test_columns_have_positive_scales_and_an_error_of_half_a_step(weight: np.ndarray) -> None:
    values, scale = quantize_columns(weight)
    assert (scale > 0).all()
    assert np.abs(values.astype(int)).max() <= 127
    assert (np.abs(values * scale - weight) <= scale * 0.5001).all()


def test_a_zero_weight_stays_zero() -> None:
    zero = np.zeros((64, 3), np.float32)
    for bits in (4, 8):
        np.testing.assert_array_equal(dequantize_blocks(quantize_blocks(zero, bits)), zero)
    np.testing.assert_array_equal(quantize_columns(zero)[0], zero)


@pytest.mark.parametrize("k", [1, 31, 33, 100])
def test_a_width_that_is_no_multiple_of_the_block_is_refused_with_the_name(k: int) -> None:
    with pytest.raises(ExportError, match=rf"layers\.3\.mlp\.down_proj cannot be stored as int4: its input width {k}"):
        quantize_blocks(np.ones((k, 2), np.float32), 4, "layers.3.mlp.down_proj.weight_t")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = build_model(num_hidden_layers=1, intermediate_size=100)
    return trace_program(model, tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize("dialect", ["ort", "standard"])
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_a_model_with_such_a_layer_is_refused_with_the_layer_s_name(odd: Any, dialect: str, precision: str) -> None:
    with pytest.raises(ExportError, match=r"layers\.0\.mlp\.down_proj cannot be stored as int\d: its input width 100 "):
        odd.graph(dialect, precision)


def test_int8_dynamic_takes_any_width(odd: Any) -> None:
    odd.graph("ort", "int8-dynamic")


@pytest.mark.parametrize("precision", ["int4", "int8", "int8-dynamic"])
def test_the_packed_integers_of_a_graph_are_those_of_the_quantiser(
    program: Callable[..., Program], precision: str
) -> None:
    """Low nibble first, offset by half the range: what MatMulNBits reads."""
    traced = program("llama")
    graph = traced.graph("ort", precision)
    dequantize_ort(graph)
    stored = graph.graph.initializers
    weight = traced.model.lm_head.weight.detach().numpy().T
    if precision == "int8-dynamic":
        values, scale = quantize_columns(weight)
        expected = values * scale
    else:
        expected = dequantize_blocks(quantize_blocks(weight, int(precision[3:])))
    (found,) = (v.const_value.numpy() for name, v in stored.items() if "lm_head" in name and name.endswith(".float"))  # type: ignore[union-attr]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rows", [1, 5])
def test_int8_dynamic_does_not_overflow_where_all_values_are_large(tmp_path: Path, rows: int) -> None:
    """Two products of 255 x 127 do not fit into 16 bits: on a CPU without VNNI signed weights give a wrong sum."""
    weight = np.random.default_rng(0).uniform(0.9, 1.0, (64, 48)).astype(np.float32)
    x = ir.val("x", ir.DataType.FLOAT, ["rows", 64])
    stored = ir.val("w", const_value=ir.tensor(weight, name="w"))
    product = ir.node("MatMul", [x, stored])
    product.outputs[0].name = "y"
    product.outputs[0].dtype, product.outputs[0].shape = ir.DataType.FLOAT, ir.Shape(["rows", 48])
    graph = ir.Graph(
        [x], product.outputs, nodes=[product], initializers=[stored], opset_imports={"": 23, "com.microsoft": 1}
    )
    model = ir.Model(graph, ir_version=10)
    quantize_ort(model, "int8-dynamic")
    ir.save(model, tmp_path / "product.onnx")
    values = np.random.default_rng(1).uniform(0.9, 1.0, (rows, 64)).astype(np.float32)
    (found,) = load_session(tmp_path / "product.onnx", onnxruntime.SessionOptions()).run(None, {"x": values})
    np.testing.assert_allclose(found, values @ weight, rtol=0.01)

"""float16: what the graphs hold, that they compute what torch does, and that an overflow is found before it happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from kvrelay import contract
from kvrelay.bundle import open_bundle
from kvrelay.manifest import Check
from kvrelay_export import exporter
from kvrelay_export.check import CHECK_LENGTH, check_engine
from kvrelay_export.errors import CheckError, ExportError
from kvrelay_export.graph import constant
from kvrelay_export.half import to_half
from kvrelay_export.maxima import recording
from kvrelay_export.options import ExportOptions
from kvrelay_export.reference import reference_logits
from tiny import build_model, save_model
from traces import traced_once
from tracing import Program

FORMS = [("standard", "fp16"), ("standard", "int8"), ("standard", "int4"), ("decomposed", "fp16")]
HALF: dict[str, Any] = {"activations": "float16"}


@pytest.fixture(scope="module")
def llama(program: Callable[..., Program]) -> Program:
    return program("llama", num_hidden_layers=4)  # as the checks' tests trace it


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(4, 260, (4, CHECK_LENGTH))


@pytest.fixture(scope="module")
def references(llama: Program, ids: np.ndarray) -> dict[str, np.ndarray]:
    names = {precision for _, precision in FORMS}
    return {p: reference_logits(llama.model, ids, p, activations="float16") for p in names}


# --- what the graphs hold ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dialect", "precision"), FORMS)
def test_weights_activations_and_cache_are_float16_and_logits_float32(
    llama: Program, dialect: str, precision: str
) -> None:
    graph = llama.graph(dialect, precision, **HALF).graph
    (logits,) = (v for v in graph.outputs if v.name == contract.LOGITS)
    cast = logits.producer()
    assert logits.dtype == ir.DataType.FLOAT
    assert cast is not None
    assert cast.op_type == "Cast"
    for value in (*graph.inputs, *graph.outputs):
        if (value.name or "").startswith(("past_", "present_", "new_")):
            assert value.dtype == ir.DataType.FLOAT16, value.name
    wide = {name for name, v in graph.initializers.items() if v.const_value.dtype == ir.DataType.FLOAT}  # type: ignore[union-attr]
    # Squares of norms would leave float16: `decomposed` computes them in float32.
    assert len(wide) == (1 if dialect == "decomposed" else 0)
    casts = [n for n in graph if n.op_type == "Cast" and n.attributes["to"].as_int() == ir.DataType.FLOAT]
    assert len(casts) == (1 + 9 if dialect == "decomposed" else 1)


@pytest.mark.parametrize("activations", ["float32", "float16"])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_scales_are_positive_and_of_the_activations_dtype(llama: Program, precision: str, activations: str) -> None:
    graph = llama.graph("standard", precision, activations=activations).graph
    nodes = [n for n in graph if n.op_type == "DequantizeLinear"]
    assert len(nodes) == 4 * 7 + 1
    for node in nodes:
        scale = node.inputs[1].const_value.numpy()  # type: ignore[union-attr]
        assert scale.dtype == np.dtype(activations)
        assert (scale > 0).all()
        assert len(node.inputs) == 2


def test_a_weight_of_nearly_nothing_keeps_a_positive_scale(llama: Program) -> None:
    program = llama.program.clone()
    weight = next(v for name, v in program.graph.initializers.items() if v.shape == (64, 320))  # the head
    weight.const_value = ir.tensor(np.full((64, 320), 1e-9, np.float32), name=weight.name)
    graph = replace(llama, program=program).graph("standard", "int4", **HALF).graph
    scales = [n.inputs[1].const_value.numpy() for n in graph if n.op_type == "DequantizeLinear"]  # type: ignore[union-attr]
    assert min(s.min() for s in scales) == np.finfo(np.float16).smallest_subnormal


def test_a_weight_over_the_range_of_float16_is_refused_by_name(llama: Program) -> None:
    program = llama.program.clone()
    weight = next(v for name, v in program.graph.initializers.items() if name.endswith("embed_tokens.weight"))
    weight.const_value = ir.tensor(np.full((320, 64), 7e4, np.float32), name=weight.name)
    with pytest.raises(ExportError, match=r"embed_tokens.* holds 70000, over the 65504 of float16"):
        to_half(program)


# --- what they compute ------------------------------------------------------------------------------------------------


def checked(llama: Program, graph: ir.Model, dialect: str, precision: str, ids: np.ndarray, same: np.ndarray) -> Check:
    path = llama.save(graph)
    entry = llama.engine_entry(path, precision, dialect=dialect, **HALF).model_copy(update={"name": "the-engine"})
    return check_engine(entry, path, llama.entry, ids, same, same)


@pytest.mark.parametrize(("dialect", "precision"), FORMS)
def test_a_faithful_engine_passes_its_check(
    llama: Program, ids: np.ndarray, references: dict[str, np.ndarray], dialect: str, precision: str
) -> None:
    graph = llama.graph(dialect, precision, **HALF)
    check = checked(llama, graph, dialect, precision, ids, references[precision])
    assert check.top1 > 0.9
    assert check.tokens > 100


def without_last_mlp(llama: Program, dialect: str, precision: str) -> ir.Model:
    return llama.graph(dialect, precision, skip=("mlp.3",), **HALF)


def shifted_by_one(llama: Program, dialect: str, precision: str) -> ir.Model:
    graph = llama.graph(dialect, precision, **HALF)
    write_index = next(v for v in graph.graph.inputs if v.name == contract.WRITE_INDEX)
    uses = list(write_index.uses())
    late = ir.node("Add", [write_index, constant(graph.graph, "shift", np.array([1], np.int64))])
    for use in uses:
        use.node.replace_input_with(use.idx, late.outputs[0])
    graph.graph.insert_before(graph.graph[0], [late])
    return graph


@pytest.mark.parametrize("fault", [without_last_mlp, shifted_by_one])
@pytest.mark.parametrize(("dialect", "precision"), [("standard", "fp16"), ("standard", "int4"), ("decomposed", "fp16")])
def test_a_faulty_graph_fails_and_the_error_names_engine_and_position(
    llama: Program,
    ids: np.ndarray,
    references: dict[str, np.ndarray],
    dialect: str,
    precision: str,
    fault: Callable[[Program, str, str], ir.Model],
) -> None:
    with pytest.raises(CheckError, match=r"engine the-engine.* text \d position \d+"):
        checked(llama, fault(llama, dialect, precision), dialect, precision, ids, references[precision])


# --- overflow ---------------------------------------------------------------------------------------------------------


def test_recorded_maxima_are_those_of_the_layers_tensors(ids: np.ndarray) -> None:
    model = build_model("qwen3")
    seen: dict[int, float] = {}

    def look(layer: int) -> Any:
        def hook(_module: Any, inputs: Any, output: Any) -> None:
            for tensor in (inputs[0], output):
                seen[layer] = max(seen.get(layer, 0.0), float(tensor.abs().max()))

        return hook

    handles = [
        module.register_forward_hook(look(layer))
        for layer, block in enumerate(model.model.layers)
        for module in (block.mlp.gate_proj, block.mlp.down_proj, block.self_attn.q_proj, block.self_attn.o_proj)
    ]
    with recording(model) as maxima:
        logits = reference_logits(model, ids)
    for handle in handles:
        handle.remove()
    np.testing.assert_allclose(logits, reference_logits(model, ids), atol=1e-5)
    assert len(maxima.values) == 3
    assert all(maxima.values[layer] >= value for layer, value in seen.items())
    assert maxima.values[2] >= np.abs(logits).max()
    with torch.no_grad():
        streams = model(torch.from_numpy(ids), output_hidden_states=True).hidden_states
    assert maxima.values[0] >= float(streams[1].abs().max())
    maxima.require_half("fp16")


OVERFLOWS = {
    "layers.1.mlp.down_proj": r"in layer 1 \(mlp",
    "layers.0.self_attn.v_proj": r"in layer 0 \(self_attn",
    "lm_head": r"in lm_head",
}


@pytest.mark.parametrize("grown", OVERFLOWS)
def test_an_activation_over_the_range_of_float16_is_refused_with_its_place(ids: np.ndarray, grown: str) -> None:
    model = build_model("llama")
    module = model.get_submodule(grown if grown == "lm_head" else f"model.{grown}")
    with torch.no_grad():
        module.weight *= 1e5
    with recording(model) as maxima:
        reference_logits(model, ids)
    with pytest.raises(CheckError, match=f"fp16 engines would overflow: .*{OVERFLOWS[grown]}.* float16 holds 65504"):
        maxima.require_half("fp16")


def test_scores_count_though_no_module_gives_them(ids: np.ndarray) -> None:
    model = build_model("llama")
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            getattr(model.model.layers[1].self_attn, name).weight *= 400
    with recording(model) as maxima:
        reference_logits(model, ids)
    with pytest.raises(CheckError, match=r"in layer 1 \(attention scores\)"):
        maxima.require_half("fp16")


@pytest.mark.parametrize("dialect", ["standard", "decomposed"])
def test_an_export_records_the_maxima_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str
) -> None:
    monkeypatch.setattr(exporter, "trace", traced_once)
    options = ExportOptions(
        str(save_model(tmp_path / "model", build_model(num_hidden_layers=1))),
        tmp_path / "bundle",
        dialect=dialect,  # type: ignore[arg-type]
        precisions=("fp16", "fp32"),
        drafts=(),
        verify=((1, 2),),
        prefill=16,
        context=64,
    )
    lines: list[str] = []
    bundle = open_bundle(exporter.export_bundle(options, lines.append))
    for engine in bundle.manifest.engines:
        assert engine.check is not None
        half = engine.precision == "fp16"
        assert (engine.activations, engine.kv_dtype) == (("float16",) * 2 if half else ("float32",) * 2)
        assert len(engine.check.activation_maxima) == (2 if half else 0)
        assert all(0.1 < value < 100 for value in engine.check.activation_maxima)
    (told,) = (line for line in lines if line.startswith("checked fp16 activations"))
    assert "float16 holds 65504; by layer, norm and head last: " in told

    loud = build_model(num_hidden_layers=1)
    with torch.no_grad():
        loud.model.layers[0].mlp.down_proj.weight *= 1e5
    refused = replace(options, source=str(save_model(tmp_path / "loud", loud)), output=tmp_path / "refused")
    with pytest.raises(CheckError, match=r"layer 0 \(.*float16 holds 65504; export with --precisions fp32"):
        exporter.export_bundle(refused)
    assert not (tmp_path / "refused").exists()

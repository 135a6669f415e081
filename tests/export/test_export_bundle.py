"""The bundle as a whole: shapes, names and shared weights of the engines in it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from kvrelay.bundle import Bundle, open_bundle
from kvrelay.kv import KVCache
from kvrelay.manifest import EngineEntry
from kvrelay.ort import OrtEngine
from tiny import build_model
from tracing import hf_logits, random_ids, step

Range = tuple[int, int]


@pytest.fixture(scope="module")
def bundle(llama_bundle: Path) -> Bundle:
    return open_bundle(llama_bundle)


@pytest.fixture(scope="module")
def graphs(bundle: Bundle) -> dict[str, ir.Model]:
    return {e.name: ir.load(bundle.path / e.file.path) for e in bundle.manifest.engines}


def stored(graph: ir.Model) -> set[Range]:
    """Places in the weights file that a graph's tensors point to."""
    tensors = (v.const_value for v in graph.graph.initializers.values())
    return {(t.offset or 0, t.length or 0) for t in tensors if isinstance(t, ir.ExternalTensor)}


def find(bundle: Bundle, name: str) -> EngineEntry:
    return next(e for e in bundle.manifest.engines if e.name == name)


def test_axes_of_fixed_engines_are_numbers_and_of_dynamic_ones_names(
    bundle: Bundle, graphs: dict[str, ir.Model]
) -> None:
    for engine in bundle.manifest.engines:
        inputs = {str(v.name): list(v.shape or ()) for v in graphs[engine.name].graph.inputs}
        axes = [inputs["input_ids"], inputs["logit_rows"]]
        if engine.role in ("verify", "prefill"):
            assert axes == [[engine.batch, engine.sequence], [engine.batch, engine.rows]]
            assert all(isinstance(size, int) for shape in inputs.values() for size in shape)
        elif engine.role == "step":
            assert [[str(size) for size in shape] for shape in axes] == [["batch", "1"], ["batch", "1"]]
        else:
            assert [[str(size) for size in shape] for shape in axes] == [["batch", "sequence"], ["batch", "rows"]]
        model = bundle.manifest.models[engine.model]
        for name, (_, *rest) in inputs.items():
            if name.startswith("past_"):
                assert rest == [model.kv_heads, model.capacity, model.head_dim]


def test_all_engines_of_a_precision_point_to_the_same_weights(bundle: Bundle, graphs: dict[str, ir.Model]) -> None:
    for precision in ("fp32", "int4"):
        decode = stored(graphs[f"{precision}-decode"])
        for engine in bundle.engines(precision=precision):
            if engine.role in ("verify", "prefill", "step"):
                assert stored(graphs[engine.name]) == decode, engine.name


def test_the_step_engine_shows_each_token_to_attention_twice_and_keeps_its_products(
    bundle: Bundle, graphs: dict[str, ir.Model]
) -> None:
    for precision in ("fp32", "int4"):
        step, decode = graphs[f"{precision}-step"].graph, graphs[f"{precision}-decode"].graph
        attentions = [n for n in step if n.op_type == "GroupQueryAttention"]
        assert len(attentions) == bundle.target.layers
        for attention in attentions:
            doubled = [v.producer() for v in attention.inputs[:3] if v is not None]
            assert all(n is not None and n.op_type == "Concat" for n in doubled)
            assert [n.op_type for n in attention.outputs[0].consumers()] == ["Slice"]
        counts = [Counter(n.op_type for n in graph if "MatMul" in n.op_type) for graph in (step, decode)]
        assert counts[0] == counts[1]


def test_a_skipping_draft_adds_nothing_to_the_weights_file(bundle: Bundle, graphs: dict[str, ir.Model]) -> None:
    for precision in ("fp32", "int4"):
        draft, decode = (stored(graphs[f"{precision}-{kind}"]) for kind in ("draft-skip", "decode"))
        assert draft < decode


def test_the_weights_file_holds_each_content_once_and_nothing_else(bundle: Bundle, graphs: dict[str, ir.Model]) -> None:
    data = (bundle.path / bundle.manifest.weights.path).read_bytes()
    ranges = sorted(set().union(*(stored(graph) for graph in graphs.values())))
    contents = [data[offset : offset + length] for offset, length in ranges]
    assert len(set(contents)) == len(contents)
    end = 0
    for offset, length in ranges:
        assert offset % 64 == 0
        assert end <= offset < end + 64  # no overlap, no gap but for alignment
        end = offset + length
    assert end == len(data)


def test_graph_files_stay_small(bundle: Bundle) -> None:
    for engine in bundle.manifest.engines:
        assert engine.file.bytes < 100_000, engine.name


@pytest.mark.parametrize(
    ("name", "config"),
    [("stranger", {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32})],
)
def test_a_draft_model_of_other_sizes_computes_what_hugging_face_does(
    bundle: Bundle, name: str, config: dict[str, int]
) -> None:
    entry = next(e for e in bundle.manifest.engines if e.draft == name)
    model = build_model("llama", seed=7, **config)
    engine = OrtEngine(entry, bundle.path / entry.file.path, prepared=False)
    cache = KVCache(bundle.manifest.models[name], entry.kv_layers)
    assert [t.shape for t in cache.tensors.values()] == [(1, 1, bundle.target.capacity, 32)] * 2
    ids = random_ids(model, 1, 30)
    np.testing.assert_allclose(step(engine, cache, ids, [0]), hf_logits(model, ids), atol=2e-5)


def test_a_skipped_attention_is_not_among_the_layers_of_its_draft(bundle: Bundle) -> None:
    draft = find(bundle, "fp32-draft-skip")
    skipped = {int(name.removeprefix("attention.")) for name in draft.skip}
    assert skipped
    assert draft.kv_layers == [i for i in range(bundle.target.layers) if i not in skipped]
    assert draft.draft == "skip"


def test_manifest_names_sizes_limits_and_origin(bundle: Bundle) -> None:
    target = bundle.target
    assert (target.family, target.hidden, target.heads) == ("llama", 64, 4)
    assert (target.kv_heads, target.head_dim) == (2, 16)
    assert (target.vocab_size, target.padded_vocab_size) == (260, 320)
    assert target.rope["rope_type"] == "default"
    assert target.rope["rope_theta"] == 10000.0
    # Room for the widest pass behind the last token of the context.
    widest = max(e.sequence or 0 for e in bundle.manifest.engines)
    assert target.capacity >= target.context + widest
    assert target.source == "checkpoint"
    assert set(bundle.manifest.tools) == {"torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime"}

"""Networks that the library makes of graphs: right ones pass our check, wrong ones are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from bundles import edit_graph, nodes, part_of
from kvrelay import contract
from kvrelay.bundle import Bundle, open_bundle
from kvrelay.errors import PlanError
from kvrelay.manifest import EngineEntry
from kvrelay.trt.network import Log, parse_network
from kvrelay.trt.network_check import check_network
from kvrelay.trt.network_view import attentions, cache_updates
from onnx import helper, numpy_helper

trt: Any = pytest.importorskip("tensorrt_rtx")

ENGINE = "fp16-verify-2x4"


def engine(bundle: Bundle, name: str) -> EngineEntry:
    return next(e for e in bundle.manifest.engines if e.name == name)


def parsed(bundle: Path, name: str = ENGINE) -> Any:
    """The network of an engine, checked."""
    opened, log = open_bundle(bundle), Log()
    entry = engine(opened, name)
    builder = trt.Builder(log.logger(trt))
    return parse_network(trt, builder, log, bundle / entry.file.path, entry, opened.target).network


def tensors(network: Any) -> dict[str, Any]:
    both = [network.get_input(i) for i in range(network.num_inputs)]
    both += [network.get_output(i) for i in range(network.num_outputs)]
    return {tensor.name: tensor for tensor in both}


@pytest.fixture
def wrong(standard_bundle: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the bundle whose verify engine was changed."""

    def make(edit: Callable[[onnx.GraphProto], None]) -> Path:
        bundle = part_of(standard_bundle, tmp_path / "wrong", [ENGINE])
        edit_graph(bundle, ENGINE, edit)
        return bundle

    return make


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4", "fp32"])
@pytest.mark.parametrize("role", ["decode", "verify-1x2", "verify-2x4", "prefill-1x16", "draft-skip"])
def test_every_cache_tensor_is_updated_in_place_between_a_network_input_and_output(
    standard_bundle: Path, precision: str, role: str
) -> None:
    name = f"{precision}-{role}"
    entry = engine(open_bundle(standard_bundle), name)
    network = parsed(standard_bundle, name)
    updates = {(u.cache.name, u.output.name) for u in cache_updates(trt, network)}
    layers = entry.kv_layers
    assert updates == set(zip(contract.past_names(layers), contract.present_names(layers), strict=True))
    assert len(cache_updates(trt, network)) == len(updates) > 0
    ends = set(tensors(network))
    assert ends == {
        *contract.input_names(layers),
        *contract.output_names(layers, "standard"),
        contract.TOP_VALUES,
        contract.TOP_IDS,
        contract.LOG_SUM,
    }


def test_float32_attention_is_marked_decomposable_and_no_other(standard_bundle: Path) -> None:
    def marks(name: str) -> set[bool]:
        return {bool(a.handle.decomposable) for a in attentions(trt, parsed(standard_bundle, name))}

    assert marks("fp32-decode") == {True}
    assert marks("fp16-decode") == marks("int4-decode") == {False}


def test_the_largest_logits_of_known_ids_are_outputs(standard_bundle: Path, decomposed_bundle: Path) -> None:
    for bundle, name, batch, rows in (
        (standard_bundle, ENGINE, 2, 4),
        (standard_bundle, "int4-decode", -1, -1),
        (decomposed_bundle, "fp16-verify-1x2", 1, 2),
    ):
        found = tensors(parsed(bundle, name))
        values, ids = found[contract.TOP_VALUES], found[contract.TOP_IDS]
        assert (values.dtype, ids.dtype) == (trt.float32, trt.int32)
        assert tuple(values.shape) == tuple(ids.shape) == (batch, rows, contract.TOP)
        assert (found[contract.LOG_SUM].dtype, tuple(found[contract.LOG_SUM].shape)) == (trt.float32, (batch, rows))
        assert found[contract.LOGITS].shape[-1] > open_bundle(bundle).target.vocab_size


def test_a_decomposed_engine_gives_the_entries_of_its_pass(decomposed_bundle: Path) -> None:
    network = parsed(decomposed_bundle, "fp16-verify-1x2")
    found = tensors(network)
    assert tuple(found["new_key.1"].shape) == (1, 2, 2, 32)
    assert "present_key.0" not in found
    assert not cache_updates(trt, network)


def causal(graph: onnx.GraphProto) -> None:
    for node in nodes(graph, "Attention"):
        node.attribute.append(helper.make_attribute("is_causal", 1))
        del node.input[3]


def causal_beside_a_mask(graph: onnx.GraphProto) -> None:
    nodes(graph, "Attention")[0].attribute.append(helper.make_attribute("is_causal", 1))


def key_lengths(graph: onnx.GraphProto) -> None:
    for node in nodes(graph, "Attention"):
        node.input[3] = ""
        node.input.extend(["", "", contract.WRITE_INDEX])


def key_lengths_beside_a_mask(graph: onnx.GraphProto) -> None:
    nodes(graph, "Attention")[0].input.extend(["", "", contract.WRITE_INDEX])


def past_and_present(graph: onnx.GraphProto) -> None:
    attention = nodes(graph, "Attention")[0]
    for position, scatter in enumerate(nodes(graph, "TensorScatter")[:2], 1):
        attention.input[position] = scatter.input[1]
        attention.input.append(scatter.input[0])
        attention.output.append(scatter.output[0])
        graph.node.remove(scatter)


def no_mask(graph: onnx.GraphProto) -> None:
    del nodes(graph, "Attention")[1].input[3]


def stale_keys(graph: onnx.GraphProto) -> None:
    nodes(graph, "Attention")[0].input[1] = "past_key.0"


def exchanged_caches(graph: onnx.GraphProto) -> None:
    key, value = nodes(graph, "TensorScatter")[:2]
    key.input[0], value.input[0] = value.input[0], key.input[0]


def always_from_the_start(graph: onnx.GraphProto) -> None:
    nodes(graph, "TensorScatter")[0].input[2] = ""


def a_copy_behind_the_update(graph: onnx.GraphProto) -> None:
    scatter = nodes(graph, "TensorScatter")[0]
    (output,) = scatter.output
    for node in graph.node:
        node.input[:] = ["updated" if name == output else name for name in node.input]
    scatter.output[0] = "updated"
    graph.node.insert(list(graph.node).index(scatter) + 1, helper.make_node("Identity", ["updated"], [output]))


def one_more_input(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("kv_length", onnx.TensorProto.INT64, [2]))


def circular_update(graph: onnx.GraphProto) -> None:
    nodes(graph, "TensorScatter")[0].attribute.append(helper.make_attribute("mode", "circular"))


def soft_cap(graph: onnx.GraphProto) -> None:
    nodes(graph, "Attention")[0].attribute.append(helper.make_attribute("softcap", 3.0))


def unknown_operator(graph: onnx.GraphProto) -> None:
    graph.node[-1].op_type = "Nonsense"


def another_size(graph: onnx.GraphProto) -> None:
    for value in graph.input:
        if value.name == contract.LOGIT_ROWS:
            value.type.tensor_type.shape.dim[1].dim_value = 3


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (causal, ["(Attention): is_causal is set", "upper left"]),
        (causal_beside_a_mask, ["(Attention): is_causal is set"]),
        (key_lengths, ["(Attention): the input nonpad_kv_seqlen is used", "drops"]),
        (key_lengths_beside_a_mask, ["(Attention): the input nonpad_kv_seqlen is used"]),
        (past_and_present, ["(Attention): it takes past or gives present tensors", "TensorScatter"]),
        (no_mask, ["has no mask"]),
        (stale_keys, ["does not read present_key.0"]),
        (exchanged_caches, ["updates past_key.0 but gives present_value.0"]),
        (always_from_the_start, ["does not write past_key.0 at write_index"]),
        (a_copy_behind_the_update, ["updates past_key.0 but gives updated, not the output present_key.0"]),
        (one_more_input, ["input kv_length is not of the contract"]),
        (circular_update, ["node ", "(TensorScatter)", "circular"]),
        (soft_cap, ["node ", "(Attention)", "softcap"]),
        (unknown_operator, ["node ", "(Nonsense)"]),
        (another_size, ["input logit_rows is INT64 (2, 3), the manifest says INT64 (2, 4)"]),
    ],
)
def test_a_graph_made_wrong_is_refused_by_the_name_of_what_is_wrong(
    wrong: Callable[..., Path], edit: Callable[[onnx.GraphProto], None], words: list[str]
) -> None:
    with pytest.raises(PlanError) as caught:
        parsed(wrong(edit))
    message = str(caught.value)
    assert message.startswith(f"{ENGINE}: ") and "\n" not in message
    for word in words:
        assert word in message


def raw(bundle: Path) -> list[str]:
    """What the check says of the network alone, whatever the graph's file shows."""
    opened, log = open_bundle(bundle), Log()
    builder = trt.Builder(log.logger(trt))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    assert trt.OnnxParser(network, builder.logger).parse_from_file(str(bundle / f"{ENGINE}.onnx"))
    return check_network(trt, network, engine(opened, ENGINE), opened.target)


def test_the_network_itself_shows_causal_attention_and_missing_masks(wrong: Callable[..., Path]) -> None:
    assert any("is causal" in fault for fault in raw(wrong(causal)))


def test_the_network_itself_shows_that_key_lengths_were_dropped(wrong: Callable[..., Path]) -> None:
    assert any("has no mask" in fault for fault in raw(wrong(key_lengths)))


def test_norms_that_add_up_squares_in_float16_are_refused(wrong: Callable[..., Path]) -> None:
    def half_norms(graph: onnx.GraphProto) -> None:
        for node in nodes(graph, "RMSNormalization"):
            del node.attribute[:]
            node.attribute.extend([helper.make_attribute("stash_type", int(onnx.TensorProto.FLOAT16))])

    with pytest.raises(PlanError, match="adds up in float16"):
        parsed(wrong(half_norms))


def test_an_input_that_the_library_drops_is_named_as_the_library_does(wrong: Callable[..., Path]) -> None:
    def fixed_rows(graph: onnx.GraphProto) -> None:
        rows = numpy_helper.from_array(np.tile(np.arange(4), (2, 1)), "rows")
        graph.initializer.append(rows)
        for node in graph.node:
            node.input[:] = ["rows" if name == contract.LOGIT_ROWS else name for name in node.input]

    bundle = wrong(fixed_rows)
    opened, log = open_bundle(bundle), Log()
    builder = trt.Builder(log.logger(trt))
    entry = engine(opened, ENGINE)
    made = parse_network(trt, builder, log, bundle / entry.file.path, entry, opened.target)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM86, 0)
    assert builder.build_serialized_network(made.network, config)
    with pytest.raises(PlanError, match=rf"{ENGINE}: .*Unused Input: {contract.LOGIT_ROWS}"):
        log.refuse_unused(ENGINE)


def test_what_is_no_onnx_file_is_refused_before_it_is_parsed(standard_bundle: Path, tmp_path: Path) -> None:
    opened, log = open_bundle(standard_bundle), Log()
    for content in (b"not a model at all", b"\x3a\xff\xff\xff\x7f"):
        (tmp_path / "x.onnx").write_bytes(content)
        with pytest.raises(PlanError, match=r"x\.onnx is not an ONNX model"):
            parse_network(
                trt, trt.Builder(log.logger(trt)), log, tmp_path / "x.onnx", engine(opened, ENGINE), opened.target
            )

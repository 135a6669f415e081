"""Redirecting external data leaves an ONNX model what it was."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvrelay.ort.external_data import ExternalData, redirect
from onnx import TensorProto, helper

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
entries = st.dictionaries(st.sampled_from(["offset", "length", "checksum", "prepacked_0"]), names, max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> TensorProto:
    tensor = TensorProto(name=draw(names), dims=draw(st.lists(st.integers(0, 2**40), max_size=3)))
    tensor.data_type = TensorProto.FLOAT
    tensor.doc_string = draw(names)
    if draw(st.booleans()):
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": draw(names), **draw(entries)}.items():
            tensor.external_data.add(key=key, value=value)
    elif draw(st.booleans()):
        tensor.raw_data = draw(st.binary(max_size=300))
    else:
        tensor.float_data.extend(draw(st.lists(st.floats(width=32, allow_nan=False), max_size=40)))
    return tensor


@st.composite
def models(draw: st.DrawFn) -> onnx.ModelProto:
    node = helper.make_node(
        "Op", draw(st.lists(names, max_size=3)), ["y"], name=draw(names), scale=draw(st.floats(width=32)), ints=[1, -1]
    )
    node.attribute.append(helper.make_attribute("value", draw(tensors())))
    graph = helper.make_graph([node], draw(names), [], [], initializer=draw(st.lists(tensors(), max_size=4)))
    model = helper.make_model(graph, producer_name=draw(names), ir_version=draw(st.integers(1, 2**40)))
    if draw(st.booleans()):
        model.metadata_props.add(key="k" * draw(st.integers(0, 400)), value=draw(names))
    return model


@settings(max_examples=200)
@given(models())
def test_a_change_that_changes_nothing_keeps_the_model_equal(model: onnx.ModelProto) -> None:
    found = onnx.ModelProto.FromString(redirect(model.SerializeToString(), lambda entry: entry))
    assert found.SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)


@settings(max_examples=100)
@given(models(), names, st.integers(0, 2**63))
def test_only_the_external_data_of_initializers_changes(model: onnx.ModelProto, location: str, offset: int) -> None:
    def change(entry: ExternalData) -> ExternalData:
        return {**entry, "location": location, "offset": str(offset)}

    found = onnx.ModelProto.FromString(redirect(model.SerializeToString(), change))
    for tensor in model.graph.initializer:
        if tensor.external_data:
            wanted = change({e.key: e.value for e in tensor.external_data})
            del tensor.external_data[:]
            for key, value in wanted.items():
                tensor.external_data.add(key=key, value=value)
    assert found.SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)


def test_a_bundles_engine_keeps_equal_and_names_every_weight(llama_bundle: Path) -> None:
    data = (llama_bundle / "fp32-decode.onnx").read_bytes()
    seen: list[ExternalData] = []

    def look(entry: ExternalData) -> ExternalData:
        seen.append(entry)
        return entry

    found = onnx.ModelProto.FromString(redirect(data, look))
    assert found == onnx.ModelProto.FromString(data)
    assert len(seen) > 10
    assert {Path(entry["location"]).suffix for entry in seen} == {".bin"}


@settings(max_examples=200)
@given(st.binary(min_size=1, max_size=60))
def test_bytes_that_are_no_model_give_a_value_error_or_pass_through(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        redirect(data, lambda entry: entry)


def test_a_model_that_is_cut_off_is_an_error() -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [64], np.zeros(64, np.float32))
    data = helper.make_model(helper.make_graph([], "g", [], [], [weight])).SerializeToString()
    assert redirect(data, lambda entry: entry) == data
    for size in (len(data) - 1, len(data) // 2):
        with pytest.raises(ValueError, match="cut off"):
            redirect(data[:size], lambda entry: entry)

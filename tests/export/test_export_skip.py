"""Layer-skipping drafts, and the search for what can be skipped."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from kvrelay import contract
from kvrelay_export.errors import ExportError
from kvrelay_export.reference import reference_logits
from kvrelay_export.skip import parse_skip_list, search_skip
from tiny import build_model
from tracing import Program, hf_logits, random_ids

LAYERS = 4


def layers(*indices: int) -> tuple[str, ...]:
    return tuple(f"{kind}.{i}" for i in indices for kind in ("attention", "mlp"))


SKIPS = {
    "none": (),
    "last 1": layers(3),
    "last 3": layers(1, 2, 3),
    "middle 2": layers(1, 2),
    "attention alone": ("attention.0", "attention.2"),
    "mlp alone": ("mlp.1",),
    "all but one": ("attention.0", *layers(1, 2, 3)),
}


@pytest.fixture(scope="module")
def llama(program: Callable[..., Program]) -> Program:
    return program("llama", num_hidden_layers=LAYERS)


def hf_without(llama: Program, skip: tuple[str, ...], ids: np.ndarray) -> np.ndarray:
    """Hugging Face's logits of a copy whose skipped sublayers add nothing."""
    model = build_model("llama", num_hidden_layers=LAYERS)
    model.load_state_dict(llama.model.state_dict())
    with torch.no_grad():
        for name in skip:
            kind, index = name.split(".")
            layer = model.model.layers[int(index)]
            (layer.self_attn.o_proj if kind == "attention" else layer.mlp.down_proj).weight.zero_()
    return hf_logits(model, ids)


@pytest.mark.parametrize("dialect", ["ort", "standard", "decomposed"])
@pytest.mark.parametrize("skip", SKIPS.values(), ids=SKIPS.keys())
def test_a_skipping_draft_equals_the_model_without_those_sublayers(
    llama: Program, skip: tuple[str, ...], dialect: str
) -> None:
    ids = random_ids(llama.model, 2, 40)
    expected = hf_without(llama, skip, ids)
    np.testing.assert_allclose(llama.logits(llama.engine(dialect, skip=skip), ids), expected, atol=3e-5)
    np.testing.assert_allclose(reference_logits(llama.model, ids, skip=skip), expected, atol=3e-5)


@pytest.mark.parametrize("skip", SKIPS.values(), ids=SKIPS.keys())
def test_a_skipped_attention_takes_its_cache_along_and_nothing_else(llama: Program, skip: tuple[str, ...]) -> None:
    graph = llama.graph("ort", skip=skip)
    kept = [i for i in range(LAYERS) if f"attention.{i}" not in skip]
    assert [v.name for v in graph.graph.inputs] == contract.input_names(kept)
    assert [v.name for v in graph.graph.outputs] == contract.output_names(kept, "ort")


def test_the_weights_of_a_skipped_sublayer_leave_the_graph(llama: Program) -> None:
    names = " ".join(llama.graph("ort", skip=layers(3)).graph.initializers)
    assert "layers.2." in names
    assert "layers.3." not in names


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (layers(0, 1, 2, 3), "names every sublayer"),
        ((), "names no sublayer"),
        (("mlp.1", "attention.1", "mlp.1"), "named twice"),
        (("mlp.4",), r"'mlp\.4' is no sublayer .*attention\.0 to attention\.3 and mlp\.0 to mlp\.3"),
        (("attention.-1",), r"'attention\.-1' is no sublayer"),
        (("layer.1",), r"'layer\.1' is no sublayer"),
        (("attention",), "'attention' is no sublayer"),
    ],
)
def test_a_skip_list_that_makes_no_sense_is_refused(skip: tuple[str, ...], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        parse_skip_list(skip, LAYERS)


@pytest.mark.parametrize("dead", ["attention.2", "mlp.1"])
def test_the_search_finds_a_sublayer_that_adds_nothing_first(dead: str) -> None:
    model = build_model("llama", num_hidden_layers=LAYERS, scale=0.3)
    kind, index = dead.split(".")
    layer = model.model.layers[int(index)]
    with torch.no_grad():
        (layer.self_attn.o_proj if kind == "attention" else layer.mlp.down_proj).weight.zero_()
    ids = random_ids(model, 1, 64)
    lines: list[str] = []
    # A floor that only a sublayer without any effect keeps.
    assert search_skip(model, ids, floor=1.0, progress=lines.append) == [dead]
    assert any(line.endswith(f"{dead} alone keeps 1.000") for line in lines)


def test_the_search_finds_nothing_where_every_sublayer_matters() -> None:
    model = build_model("llama", num_hidden_layers=2, scale=0.3)
    assert search_skip(model, random_ids(model, 1, 64), floor=1.0) == []


def test_the_search_never_skips_everything() -> None:
    model = build_model("llama", num_hidden_layers=2)
    found = search_skip(model, random_ids(model, 1, 16), floor=0.0)
    assert len(found) == 3
    parse_skip_list(found, 2)

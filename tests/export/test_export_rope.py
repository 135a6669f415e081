"""Every supported scaling of the rotation is applied, however the config spells it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvrelay_export.source import load_checkpoint
from tiny import build_model, save_model
from tracing import Program, hf_logits, random_ids

ROPES: dict[str, dict[str, Any]] = {
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}
POSITIONS = [5, 40, 200]
THETA = 10000.0


def expected_frequencies(rope_type: str, pairs: int) -> tuple[np.ndarray, float]:
    """Frequencies and the factor on the tables, from the papers' formulas."""
    rope = ROPES[rope_type]
    dim = 2 * pairs
    base = THETA ** (-2 * np.arange(pairs) / dim)
    if rope_type == "linear":
        return base / rope["factor"], 1.0
    old = rope["original_max_position_embeddings"]
    if rope_type == "llama3":
        turns = old * base / (2 * math.pi)
        smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = np.clip(smooth, 0, 1)
        return base * (smooth + (1 - smooth) / rope["factor"]), 1.0

    def pair_of(turns: float) -> float:
        return dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), dim - 1)
    ramp = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0, 1)
    return base * (1 - ramp) + base / rope["factor"] * ramp, 0.1 * math.log(rope["factor"]) + 1.0


@pytest.mark.parametrize("rope_type", ROPES)
def test_logits_of_an_engine_equal_hugging_face_near_and_far(program: Callable[..., Program], rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": THETA, **ROPES[rope_type]}
    traced = program("llama", num_hidden_layers=1, rope_parameters=rope)
    ids = random_ids(traced.model, 1, 201)
    expected = hf_logits(traced.model, ids)
    logits = traced.logits(traced.engine(), ids)
    np.testing.assert_allclose(logits[0, POSITIONS], expected[0, POSITIONS], atol=2e-5)
    unscaled = build_model(num_hidden_layers=1)
    unscaled.load_state_dict(traced.model.state_dict())
    assert np.abs(hf_logits(unscaled, ids)[0, 200] - expected[0, 200]).max() > 1e-3


@pytest.mark.parametrize("rope_type", ROPES)
def test_the_tables_of_the_graph_follow_the_papers(program: Callable[..., Program], rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": THETA, **ROPES[rope_type]}
    graph = program("llama", num_hidden_layers=1, rope_parameters=rope).graph()
    node = next(n for n in graph.graph if n.op_type == "GroupQueryAttention")
    cos, sin = (node.inputs[i].const_value.numpy() for i in (7, 8))  # type: ignore[union-attr]
    frequencies, factor = expected_frequencies(rope_type, cos.shape[1])
    angles = np.outer(POSITIONS, frequencies)
    np.testing.assert_allclose(cos[POSITIONS], np.cos(angles) * factor, atol=1e-4)
    np.testing.assert_allclose(sin[POSITIONS], np.sin(angles) * factor, atol=1e-4)


@pytest.mark.parametrize("rope_type", ROPES)
def test_three_spellings_of_the_config_mean_the_same(tmp_path: Path, rope_type: str) -> None:
    rope = ROPES[rope_type]
    spellings: list[dict[str, Any]] = [
        {"rope_parameters": {"rope_type": rope_type, "rope_theta": THETA, **rope}},
        {"rope_scaling": {"rope_type": rope_type, **rope}, "rope_theta": THETA},
        {"rope_scaling": {"type": rope_type, **rope}, "rope_theta": THETA},
    ]
    save_model(tmp_path, build_model())
    file = tmp_path / "config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if not k.startswith("rope")}
    for spelling in spellings:
        file.write_text(json.dumps({**config, **spelling}))
        model = load_checkpoint(str(tmp_path)).model
        frequencies, factor = expected_frequencies(rope_type, 8)
        np.testing.assert_allclose(model.model.rotary_emb.inv_freq.numpy(), frequencies, rtol=1e-5)
        assert model.model.rotary_emb.attention_scaling == pytest.approx(factor)
        assert model.config.rope_parameters["rope_type"] == rope_type

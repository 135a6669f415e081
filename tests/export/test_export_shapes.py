"""Sizes of the cache come from the config, not from hidden size over heads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tracing import Program, hf_logits, random_ids

GEOMETRIES = [
    ("qwen3", {"head_dim": 32}),
    ("qwen3", {"head_dim": 8}),
    ("llama", {"head_dim": 32, "num_attention_heads": 8}),
]


@pytest.mark.parametrize(("family", "config"), GEOMETRIES)
def test_logits_equal_hugging_face_where_head_dim_is_not_hidden_over_heads(
    program: Callable[..., Program], family: str, config: dict[str, int]
) -> None:
    traced = program(family, **config)
    assert traced.entry.head_dim != traced.entry.hidden // traced.entry.heads
    ids = random_ids(traced.model, 2, 60)
    np.testing.assert_allclose(traced.logits(traced.engine(), ids), hf_logits(traced.model, ids), atol=2e-5)


@pytest.mark.parametrize(("family", "config"), GEOMETRIES)
def test_cache_inputs_have_the_config_s_head_dim_and_kv_heads(
    program: Callable[..., Program], family: str, config: dict[str, int]
) -> None:
    graph = program(family, **config).graph()
    caches = [v for v in (*graph.graph.inputs, *graph.graph.outputs) if (v.name or "").startswith(("past", "present"))]
    assert len(caches) == 8
    for value in caches:
        batch, *rest = value.shape
        assert str(batch) == "batch"
        assert rest == [2, 256, config["head_dim"]]

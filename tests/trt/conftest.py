"""Tiny bundles in the dialects that TensorRT takes, exported once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

VERIFY = ((1, 2), (2, 4))
HEADS = {"hidden_size": 128, "head_dim": 32}  # fused attention in fp16 begins at this size


@pytest.fixture(scope="session")
def standard_bundle(export_dialects: Callable[..., Path]) -> Path:
    """Every role of the dialect `standard` in every precision."""
    return export_dialects(
        tiny.build_model("llama", **HEADS),
        dialect="standard",
        precisions=("fp16", "int8", "int4", "fp32"),
        drafts=("skip",),
        skip=("attention.1", "mlp.0"),
        verify=VERIFY,
    )


@pytest.fixture(scope="session")
def decomposed_bundle(export_dialects: Callable[..., Path]) -> Path:
    """The dialect `decomposed` in fp16."""
    return export_dialects(
        tiny.build_model("llama", **HEADS), dialect="decomposed", precisions=("fp16",), verify=VERIFY[:1]
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the box."""
    folder = tmp_path / "box"
    monkeypatch.setenv("KVRELAY_CACHE", str(folder))
    return folder

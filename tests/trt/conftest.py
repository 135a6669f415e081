"""Tiny bundles in the dialects that TensorRT takes, exported once a session, and boxes whose GPU is fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny
from fake_box import FakeBox, fake_box
from kvrelay.bundle import Bundle, open_bundle

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


@pytest.fixture(scope="session")
def loop_bundle(export_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A Llama of the dialect `standard` in fp32, and a draft model with more padded ids, which shout."""
    cousin = tiny.save_model(tmp_path_factory.mktemp("drafts") / "cousin", tiny.cousin_of(tiny.target_model()))
    path = export_tiny(
        tiny.target_model(), dialect="standard", draft_models=(str(cousin),), verify=((1, 2), (1, 4), (2, 4))
    )
    return open_bundle(path)


@pytest.fixture
def fake(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FakeBox]:
    """A box whose GPU is fake; afterwards nothing may be left on it, and no rule broken.

    Parametrise it indirectly for another version of TensorRT.
    """
    with fake_box(tmp_path, getattr(request, "param", "10.16.1")) as box:
        yield box

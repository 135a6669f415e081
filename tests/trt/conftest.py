"""A bundle of the dialect `standard`, and boxes whose GPU is fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny
from fake_box import FakeBox, fake_box
from kvrelay.bundle import Bundle, open_bundle


@pytest.fixture(scope="session")
def standard_bundle(export_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A Llama of the dialect `standard`, and a draft model with more padded ids, which shout."""
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

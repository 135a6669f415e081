"""Builds the C++ programs once a session, and the bundle that they run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import cases
import pytest
import tiny
from cpp_building import build, require_tools

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of the built test programs; kept between runs, so that only changes are built."""
    require_tools()
    folder = HERE.parents[1] / "build" / "cpp-tests"
    return build(HERE, folder, Path(sys.executable))


@pytest.fixture(scope="session")
def cpp_bundle(export_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama of the runtime tests in fp32, with groups of windows and the drafts "skip" and "cousin"."""
    cousin = tiny.save_model(tmp_path_factory.mktemp("draft-models") / "cousin", tiny.cousin_of(tiny.target_model()))
    return export_tiny(
        tiny.target_model(),
        drafts=("skip",),
        skip=("attention.1",),
        draft_models=(str(cousin),),
        verify=((1, 8), (1, 16), (4, 16), (2, 8)),
    )


@pytest.fixture(scope="session")
def reference_file(cpp_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python's results for the suite's cases."""
    file = tmp_path_factory.mktemp("reference") / "reference.txt"
    cases.write_reference(cpp_bundle, file)
    return file

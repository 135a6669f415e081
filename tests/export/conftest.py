"""Programs and bundles that several files of this folder share: tracing one costs seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import build_model
from tracing import Program, trace_program, with_random_biases


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Program]:
    """Trace ``build_model(family, **config)``, once for each set of arguments. Biases are random, not zero."""
    folder = tmp_path_factory.mktemp("programs")
    known: dict[Any, Program] = {}

    def make(family: str = "llama", **config: Any) -> Program:
        key = (family, tuple(sorted((k, repr(v)) for k, v in config.items())))
        if key not in known:
            known[key] = trace_program(with_random_biases(build_model(family, **config)), folder)
        return known[key]

    return make


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for checkpoints."""
    return tmp_path_factory.mktemp("models")

"""Programs and bundles that several files of this folder share: tracing one costs seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kvrelay.ort import use_threads
from tiny import build_model
from tracing import Program, trace_program


def pytest_configure() -> None:
    use_threads(None)


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


def with_random_biases(model: Any) -> Any:
    """Give every bias and norm weight a value that matters: they start at zero and one."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for checkpoints."""
    return tmp_path_factory.mktemp("models")

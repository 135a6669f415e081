"""The default model's bundle, as `make export` writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def default_bundle() -> Path:
    bundle = ROOT / "engines" / "smollm2-135m-instruct"
    if not (bundle / "manifest.json").is_file():
        pytest.fail(f"{bundle} is missing: run `make export`, or the tests by `make test`")
    return bundle

"""A fake GPU where the product looks for a real one: its identity, and a plan for every engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_box import DEVICE, FakeBox, fake_box
from kvrelay.gpu import Gpu

__all__ = ["fake_gpu"]


@contextmanager
def fake_gpu(folder: Path, cuda: str) -> Iterator[FakeBox]:
    """A box with a fake GPU, CUDA of version ``cuda`` and TensorRT; plans are made in ``folder`` when asked for."""
    with fake_box(folder) as box, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvrelay.loading.this_device", lambda _: DEVICE)
        patch.setattr("kvrelay.loading.find_plan", lambda bundle, entry, _, most: box.plan(bundle, entry, most))
        for module in ("loading", "identity"):
            patch.setattr(f"kvrelay.{module}.tensorrt", lambda _: box.library)
        patch.setattr("kvrelay.identity.require_gpu", lambda: Gpu("Fake GPU", "sm87", 1 << 30, True, 8))
        patch.setattr("kvrelay.identity.cuda_versions", lambda: (cuda, cuda))
        yield box

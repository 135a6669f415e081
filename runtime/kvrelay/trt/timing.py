"""TensorRT's timing cache: what it measured for one engine serves the next, and the next build."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ..boxcache import publish_bytes
from .device import PlanDevice

__all__ = ["TimingCache"]


class TimingCache:
    """The timing cache of a device in ``folder``. TensorRT-RTX measures nothing while it builds, and has none."""

    def __init__(self, folder: Path, device: PlanDevice) -> None:
        digest = hashlib.sha256(str(device).encode()).hexdigest()[:16]
        self._path = folder / f"timing-{digest}.cache" if device.backend == "tensorrt" else None

    def load(self, config: Any) -> None:
        """Have a build use what is stored; the library itself refuses what is damaged or of another device."""
        if self._path is None:
            return
        stored = self._path.read_bytes() if self._path.exists() else b""
        if not config.set_timing_cache(config.create_timing_cache(stored), False):
            config.set_timing_cache(config.create_timing_cache(b""), False)

    def save(self, config: Any) -> None:
        """Store what the build added. The caller holds the folder's lock."""
        if self._path is not None:
            publish_bytes(self._path, memoryview(config.get_timing_cache().serialize()))

"""ONNX Runtime backend."""

from __future__ import annotations

from .engine import OrtEngine
from .threads import use_threads

__all__ = ["OrtEngine", "use_threads"]

"""Import ONNX Runtime, or say which extra brings it."""

from __future__ import annotations

from types import ModuleType

from ..errors import BackendMissingError

__all__ = ["onnxruntime"]


def onnxruntime() -> ModuleType:
    """Return the onnxruntime module.

    Raises:
        BackendMissingError: it is not installed.
    """
    try:
        import onnxruntime as module
    except ImportError:
        raise BackendMissingError(
            "no engine backend is installed: install exactly one of kvrelay[cpu] (onnxruntime), "
            "kvrelay[gpu] (onnxruntime-gpu)"
        ) from None
    return module  # type: ignore[no-any-return]

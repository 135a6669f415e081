"""Import ONNX Runtime, or say which extra brings it."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from ..errors import BackendMissingError

__all__ = ["onnxruntime"]


def onnxruntime() -> ModuleType:
    """Return the onnxruntime module.

    Raises:
        BackendMissingError: it is not installed, or twice.
    """
    _refuse_two_builds()
    try:
        import onnxruntime as module
    except ImportError:
        raise BackendMissingError(
            "no engine backend is installed: install exactly one of kvrelay[cpu] (onnxruntime), "
            "kvrelay[gpu] (onnxruntime-gpu)"
        ) from None
    return module  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def _refuse_two_builds() -> None:
    """Refuse an environment of both packages: they hold files of one name, and the later overwrote the earlier."""
    cpu, gpu = _installed("onnxruntime"), _installed("onnxruntime-gpu")
    if cpu is not None and gpu is not None:
        raise BackendMissingError(
            f"onnxruntime {cpu} and onnxruntime-gpu {gpu} share this environment and overwrite each other's files: "
            "pip uninstall both, then install exactly one of kvrelay[cpu], kvrelay[gpu]"
        )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

"""Import TensorRT, TensorRT-RTX and CUDA's Python bindings, or say which package brings them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Literal

from ..errors import BackendMissingError

__all__ = ["Backend", "cuda_runtime", "tensorrt"]

Backend = Literal["tensorrt", "tensorrt-rtx"]

_MODULES: dict[Backend, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_PACKAGES: dict[Backend, str] = {
    "tensorrt": "pip install 'kvrelay[tensorrt]' (on Jetson: apt install python3-libnvinfer, which JetPack brings)",
    "tensorrt-rtx": "pip install tensorrt-rtx-cu13",
}
_OLDEST = (10, 3)  # of TensorRT; TensorRT-RTX counts on its own, and all of it is newer


def tensorrt(backend: Backend = "tensorrt") -> ModuleType:
    """Return the module of ``backend``. Both have the same API.

    Raises:
        BackendMissingError: it is not installed, misses a library, or is too old.
    """
    module = _import(_MODULES[backend], f"the backend {backend}", _PACKAGES[backend])
    version = tuple(int(part) for part in str(module.__version__).split(".")[:2])
    if backend == "tensorrt" and version < _OLDEST:
        raise BackendMissingError(
            f"TensorRT {module.__version__} is installed, 10.3 or newer is needed: {_PACKAGES[backend]}"
        )
    return module


def cuda_runtime() -> ModuleType:
    """Return CUDA's runtime bindings: ``cuda.bindings.runtime``, or ``cuda.cudart`` of an older cuda-python.

    Importing them needs neither a GPU nor a driver: their calls return error codes.

    Raises:
        BackendMissingError: neither is installed, or a library is missing.
    """
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ModuleNotFoundError:
        return _import("cuda.cudart", "CUDA", "pip install cuda-python, of the major version of the box's CUDA")


def _import(name: str, what: str, remedy: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise BackendMissingError(f"{what} needs the Python module {error.name}: {remedy}") from None
    except (ImportError, OSError, RuntimeError) as error:  # a shared library is missing: its name is in the message
        reason = " ".join(str(error).split())
        raise BackendMissingError(f"{what}: the module {name} cannot be imported ({reason}): {remedy}") from None

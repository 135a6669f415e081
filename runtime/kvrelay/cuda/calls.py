"""The one place where CUDA's return codes are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import CudaError
from ..trt.library import cuda_runtime

__all__ = ["CudaError", "check", "runtime"]


def runtime() -> Any:
    """Return CUDA's runtime bindings.

    Raises:
        BackendMissingError: they are not installed.
    """
    return cuda_runtime()


def check(result: Sequence[Any], doing: str) -> Any:
    """Return what a CUDA call gave, without its return code: nothing, one value, or a tuple.

    Args:
        result: what the call returned, the code first.
        doing: the end of the sentence "CUDA cannot ...".

    Raises:
        CudaError: the code is not success; says which, and what was being done.
    """
    code, *values = result
    if int(code) != 0:
        raise CudaError(f"CUDA cannot {doing}: {getattr(code, 'name', code)}")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)

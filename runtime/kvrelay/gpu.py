"""The GPUs of this box, as CUDA names them; nothing is loaded onto one to find out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from .errors import DeviceError
from .trt.library import cuda_runtime

__all__ = ["Gpu", "cuda_versions", "gpus", "require_gpu"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    index: int
    name: str
    compute_capability: str  # "sm87"
    bytes: int  # of its memory; a Jetson shares it with the CPU
    integrated: bool  # it has no memory of its own

    @property
    def identity(self) -> str:
        """Digest of what the bits of a result may depend on: the model, not the piece."""
        return hashlib.sha256(f"{self.name}\n{self.compute_capability}".encode()).hexdigest()[:16]


def gpus() -> list[Gpu]:
    """Return the GPUs that CUDA offers, at least one.

    Raises:
        BackendMissingError: CUDA's Python bindings are not installed.
        DeviceError: there is no GPU, or no driver that fits; says what CUDA says.
    """
    count = _value("cudaGetDeviceCount")
    return [_gpu(index, _value("cudaGetDeviceProperties", index)) for index in range(count)]


def require_gpu(index: int = 0) -> Gpu:
    """Return the GPU ``index``.

    Raises:
        BackendMissingError: CUDA's Python bindings are not installed.
        DeviceError: there is none; says what CUDA says.
    """
    found = gpus()
    if index >= len(found):
        raise DeviceError(f"no GPU {index}: this box has {len(found)}")
    return found[index]


def cuda_versions() -> tuple[str, str]:
    """Return the newest CUDA that the driver serves, "none" without one, and that of the runtime library.

    Raises:
        BackendMissingError: CUDA's Python bindings are not installed.
        DeviceError: the runtime library cannot be loaded.
    """
    return _version(_value("cudaDriverGetVersion")), _version(_value("cudaRuntimeGetVersion"))


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if number else "none"


def _value(call: str, *arguments: Any) -> Any:
    """Call CUDA's runtime: its functions return an error code before the value, and do not raise."""
    cuda = cuda_runtime()
    try:
        error, value = getattr(cuda, call)(*arguments)
    except RuntimeError as missing:  # the bindings load libcudart on the first call
        raise DeviceError(f"no GPU can be used: {' '.join(str(missing).split())}") from None
    if int(error) != 0:
        text = cuda.cudaGetErrorString(error)[1]
        why = text.decode() if isinstance(text, bytes) else str(text)
        raise DeviceError(f"no GPU can be used: {call} says {error.name}: {why}")
    return value


def _gpu(index: int, properties: Any) -> Gpu:
    name = properties.name
    return Gpu(
        index=index,
        name=(name.decode() if isinstance(name, bytes) else str(name)).rstrip("\0"),
        compute_capability=f"sm{properties.major}{properties.minor}",
        bytes=int(properties.totalGlobalMem),
        integrated=bool(properties.integrated),
    )

"""The GPUs of this box, as CUDA names them; nothing is loaded onto one to find out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from .cuda import CudaError, check, runtime

__all__ = ["Gpu", "cuda_versions", "gpus", "require_gpu"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    name: str
    compute_capability: str  # "sm87"
    bytes: int  # of its memory; an integrated one shares the CPU's
    integrated: bool
    multiprocessors: int  # in use: Jetson modules of one name differ in them, and so do power modes of one module

    @property
    def identity(self) -> str:
        """Digest of what the bits of a result may depend on: the model, not the piece."""
        facts = f"{self.name}\n{self.compute_capability}\n{self.multiprocessors}"
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.name} ({self.compute_capability}, {self.multiprocessors} multiprocessors)"


def gpus() -> list[Gpu]:
    """Return the GPUs that CUDA shows to the process, at least one.

    Raises:
        BackendMissingError: CUDA's Python bindings are not installed.
        CudaError: there is no GPU, or no driver that fits; says what CUDA says.
    """
    cuda = runtime()
    count = _answer(cuda, "cudaGetDeviceCount", "count the GPUs of this box")
    if count < 1:
        raise CudaError("CUDA shows no GPU: look at CUDA_VISIBLE_DEVICES and at nvidia-smi")
    return [_gpu(check(cuda.cudaGetDeviceProperties(i), f"read what GPU {i} is")) for i in range(count)]


def require_gpu() -> Gpu:
    """Return the GPU that engines of this process run on: the first.

    Raises:
        BackendMissingError: CUDA's Python bindings are not installed.
        CudaError: there is none; says what CUDA says.
    """
    return gpus()[0]


def cuda_versions() -> tuple[str, str]:
    """Return the newest CUDA that the driver serves, "none" without one, and that of the runtime library.

    Raises:
        BackendMissingError: CUDA's Python bindings are not installed.
        CudaError: the runtime library cannot be loaded.
    """
    cuda = runtime()
    driver = _answer(cuda, "cudaDriverGetVersion", "read the driver's version")
    library = _answer(cuda, "cudaRuntimeGetVersion", "read its own version")
    return _version(driver), _version(library)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if number else "none"


def _answer(cuda: Any, call: str, doing: str) -> int:
    try:
        return int(check(getattr(cuda, call)(), doing))
    except RuntimeError as error:  # the bindings load the library on the first call
        raise CudaError(f"CUDA cannot {doing}: {' '.join(str(error).split())}") from None


def _gpu(properties: Any) -> Gpu:
    return Gpu(
        name=bytes(properties.name).split(b"\0")[0].decode(),
        compute_capability=f"sm{properties.major}{properties.minor}",
        bytes=int(properties.totalGlobalMem),
        integrated=bool(properties.integrated),
        multiprocessors=int(properties.multiProcessorCount),
    )

"""What the bits and the costs of engines at a place depend on: versions and device, for cache keys and receipts."""

from __future__ import annotations

from dataclasses import dataclass

from .boxcache import cpu_identity, cpu_name
from .gpu import cuda_versions, require_gpu
from .ort.library import onnxruntime
from .place import Place
from .trt.library import tensorrt

__all__ = ["Identity", "identity_of", "library_version"]


@dataclass(frozen=True, slots=True)
class Identity:
    """One place, as receipts name it."""

    backend: str  # "onnxruntime 1.32.0"
    provider: str  # of ONNX Runtime, in order of preference; the backend itself for others
    libraries: str  # what else computes: CUDA's library and the driver; empty on a CPU
    device: str  # for people
    device_id: str  # digest

    def key(self) -> tuple[str, ...]:
        """What findings are stored under."""
        return (self.backend, self.provider, self.libraries, self.device_id)


def library_version(place: Place) -> str:
    """Return the version of the backend.

    Raises:
        BackendMissingError: it is not installed.
    """
    if place.backend == "onnxruntime":
        return str(onnxruntime().__version__)
    return str(tensorrt(place.trt_backend).__version__)


def identity_of(place: Place) -> Identity:
    """Return the identity of ``place`` on this box.

    Raises:
        BackendMissingError: a library is not installed.
        CudaError: a GPU is wanted and there is none.
    """
    backend = f"{place.backend} {library_version(place)}"
    if not place.on_gpu:
        return Identity(backend, place.provider, "", cpu_name(), cpu_identity())
    gpu = require_gpu()
    driver, library = cuda_versions()
    libraries = f"CUDA {library}, driver for CUDA {driver}"
    return Identity(backend, place.provider, libraries, str(gpu), gpu.identity)

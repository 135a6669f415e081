"""What a plan is for: library, version and GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..errors import BackendMissingError, ParameterError
from .library import Backend, cuda_runtime, tensorrt

__all__ = ["ANY_GPU", "PlanDevice", "free_memory", "plan_devices", "this_device"]

# TensorRT-RTX compiles its kernels on the GPU itself: a plan is good for every GPU of its compute capabilities.
ANY_GPU = "any"


@dataclass(frozen=True, slots=True)
class PlanDevice:
    """What a plan is built for, or what it is to run on (then with one compute capability)."""

    backend: Backend
    library_version: str
    compute_capabilities: tuple[str, ...]  # "sm87"
    gpu_name: str  # with its multiprocessors; ANY_GPU where the plan does not depend on it

    def __str__(self) -> str:
        gpu = "" if self.gpu_name == ANY_GPU else f" ({self.gpu_name})"
        return f"{self.backend} {self.library_version}, {', '.join(self.compute_capabilities)}{gpu}"


def this_device(backend: Backend) -> PlanDevice:
    """Return what a plan must be for to run here, on the process's first GPU.

    Raises:
        BackendMissingError: the library, CUDA's bindings, a driver or a GPU is missing.
    """
    version = str(tensorrt(backend).__version__)
    cuda = cuda_runtime()
    properties = _called(cuda, backend, lambda: cuda.cudaGetDeviceProperties(0))
    name = ANY_GPU
    if backend == "tensorrt":
        # Every module of a Jetson generation is called "Orin": what tells them apart decides which kernels fit.
        called = properties.name.split(b"\0")[0].decode()
        name = f"{called}, {properties.multiProcessorCount} multiprocessors"
    return PlanDevice(backend, version, (f"sm{properties.major}{properties.minor}",), name)


def free_memory(backend: Backend) -> tuple[int, int]:
    """Return the bytes that are free on this process's first GPU, and all it has.

    Raises:
        BackendMissingError: as :func:`this_device`.
    """
    cuda = cuda_runtime()
    properties = _called(cuda, backend, lambda: cuda.cudaGetDeviceProperties(0))
    free, total = _called(cuda, backend, lambda: cuda.cudaMemGetInfo())
    # A GPU that shares the system's memory counts the system's file cache as used, which gives way.
    return int(total if properties.integrated else free), int(total)


def plan_devices(backend: Backend, devices: str) -> PlanDevice:
    """Return what to build for.

    Args:
        backend: the library.
        devices: "current", or compute capabilities: "sm86,sm89".

    Raises:
        ParameterError: the library cannot build for a device.
        BackendMissingError: as :func:`this_device`.
    """
    trt: Any = tensorrt(backend)
    if devices == "current":
        device = this_device(backend)
    elif backend == "tensorrt":
        raise ParameterError(
            f"--device {devices}: TensorRT builds for the GPU that it runs on: build there with --device current, "
            "or use --backend tensorrt-rtx"
        )
    else:
        names = [part.strip().lower() for part in devices.split(",") if part.strip()]
        device = PlanDevice(backend, str(trt.__version__), tuple(sorted(set(names), key=_number)), ANY_GPU)
    if backend == "tensorrt-rtx":
        known = sorted((n.lower() for n in trt.ComputeCapability.__members__ if n.startswith("SM")), key=_number)
        unknown = [name for name in device.compute_capabilities if name not in known]
        if unknown or not device.compute_capabilities:
            raise ParameterError(
                f"--device {devices}: TensorRT-RTX {trt.__version__} builds for {', '.join(known)}, "
                f"not for {', '.join(unknown) or 'nothing'}; other GPUs need --backend tensorrt"
            )
    return device


def _number(capability: str) -> tuple[int, str]:
    digits = capability.removeprefix("sm")
    return (int(digits) if digits.isdecimal() else 0, capability)


def _called(cuda: ModuleType, backend: Backend, call: Callable[[], tuple[Any, ...]]) -> Any:
    """Return what a call of CUDA's runtime gives, one value or a tuple, or raise for its error code."""
    try:
        error, *values = call()
    except RuntimeError as missing:  # the bindings load CUDA's libraries on the first call
        reason = " ".join(str(missing).split())
    else:
        if error == cuda.cudaError_t.cudaSuccess:
            return values[0] if len(values) == 1 else tuple(values)
        reason = f"{error.name} ({int(error)})"
    elsewhere = "; without a GPU, name devices: --device sm86,sm89" if backend == "tensorrt-rtx" else ""
    raise BackendMissingError(f"no GPU can be used here: {reason}: install or update the NVIDIA driver{elsewhere}")

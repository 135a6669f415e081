"""Places: the backend and device that engines run on, and which bundles they can run there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from .errors import ParameterError
from .ort.providers import parse_providers
from .trt.library import Backend

__all__ = ["BACKENDS", "HOST", "Place", "draft_place_of", "place_of"]

BACKENDS = ("onnxruntime", "tensorrt", "tensorrt-rtx")


@dataclass(frozen=True, slots=True)
class Place:
    """Where engines run."""

    backend: str  # one of BACKENDS
    providers: tuple[str, ...] = ()  # of ONNX Runtime, in order of preference: "cpu", "cuda", "tensorrt"

    @property
    def on_gpu(self) -> bool:
        return self.providers != ("cpu",)

    @property
    def memory(self) -> Literal["host", "cuda"]:
        """Where the KV cache lies that engines here are bound to."""
        return "cuda" if self.on_gpu else "host"

    @property
    def trt_backend(self) -> Backend:
        """The backend, of a place on TensorRT or TensorRT-RTX."""
        return cast("Backend", self.backend)

    @property
    def provider(self) -> str:
        """What runs the engines, for receipts and messages."""
        return ",".join(self.providers) or self.backend

    def __str__(self) -> str:
        return f"{self.backend} ({self.provider})" if self.providers else self.backend


HOST = Place("onnxruntime", ("cpu",))


def place_of(backend: str, provider: str | None, *, option: str = "") -> Place:
    """Return the place that options name.

    Args:
        backend: one of :data:`BACKENDS`.
        provider: of ONNX Runtime, "cpu" if None; "cuda,cpu" lets operators that CUDA lacks run on the CPU.
        option: what the options' names begin with, for messages.

    Raises:
        ParameterError: one is unknown, or they contradict each other.
    """
    if backend not in BACKENDS:
        raise ParameterError(f"{option}backend={backend!r}: one of {', '.join(BACKENDS)}")
    if backend == "onnxruntime":
        return Place(backend, parse_providers("cpu" if provider is None else provider, f"{option}provider"))
    if provider is not None:
        raise ParameterError(
            f"{option}provider={provider!r}: providers belong to onnxruntime, leave it out with {backend}"
        )
    return Place(backend)


def draft_place_of(place: Place, backend: str | None, provider: str | None) -> Place:
    """Return the place of drafts: the target's unless options name another.

    Raises:
        ParameterError: an option is unknown, or they contradict each other.
    """
    if backend is None and provider is None:
        return place
    return place_of(backend or "onnxruntime", provider, option="draft_")

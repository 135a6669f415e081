"""Errors of kvrelay. Each message names the value, the limit and the way out."""

from __future__ import annotations

__all__ = [
    "BackendMissingError",
    "BundleError",
    "CacheDirectoryError",
    "CudaError",
    "EngineError",
    "ExactnessError",
    "KvrelayError",
    "MemoryBudgetError",
    "ParameterError",
    "PlanError",
    "PromptError",
    "ThreadCountError",
]


class KvrelayError(Exception):
    """Base of every error that kvrelay raises on purpose."""


class BundleError(KvrelayError):
    """A bundle is missing, damaged, or of another version."""


class BackendMissingError(KvrelayError):
    """No engine backend is installed."""


class CacheDirectoryError(KvrelayError):
    """The box's cache cannot be written."""


class EngineError(KvrelayError):
    """An engine failed to load or run, or returned values that are not numbers."""


class CudaError(EngineError):
    """A call of CUDA failed, or there is no GPU."""


class ExactnessError(KvrelayError):
    """The engines on this box cannot keep the promise that was asked for."""


class MemoryBudgetError(KvrelayError):
    """The KV cache does not fit in memory."""


class ParameterError(KvrelayError, ValueError):
    """A parameter is unknown, out of range, or contradicts another."""


class PlanError(EngineError):
    """A TensorRT plan cannot be built, is missing or damaged, or is for another version, device or graph."""


class PromptError(KvrelayError, ValueError):
    """A prompt is empty, too long, or of the wrong type."""


class ThreadCountError(KvrelayError):
    """The process already runs its engines with another number of threads."""

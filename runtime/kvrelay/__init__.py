"""kvrelay: draft-verify decoding on ONNX Runtime and TensorRT, without an ML framework.

>>> import kvrelay
>>> pipe = kvrelay.Pipeline("engines/smollm2-135m-instruct", draft="auto")  # doctest: +SKIP
>>> for piece in pipe.stream("Why is the sky blue?", max_new_tokens=128):  # doctest: +SKIP
...     print(piece, end="")
"""

from __future__ import annotations

from .errors import (
    BackendMissingError,
    BundleError,
    CacheDirectoryError,
    EngineError,
    ExactnessError,
    KvrelayError,
    MemoryBudgetError,
    ParameterError,
    PromptError,
    ThreadCountError,
)
from .ort import use_threads
from .pipeline import Pipeline, Result, Stream
from .sampling import SamplingParams
from .stats import Stats

__all__ = [
    "BackendMissingError",
    "BundleError",
    "CacheDirectoryError",
    "EngineError",
    "ExactnessError",
    "KvrelayError",
    "MemoryBudgetError",
    "ParameterError",
    "Pipeline",
    "PromptError",
    "Result",
    "SamplingParams",
    "Stats",
    "Stream",
    "ThreadCountError",
    "use_threads",
]

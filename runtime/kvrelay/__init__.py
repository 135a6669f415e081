"""kvrelay: draft-verify decoding on ONNX Runtime and TensorRT, without an ML framework.

>>> import kvrelay
>>> pipe = kvrelay.Pipeline("engines/smollm2-135m-instruct", draft="auto")  # doctest: +SKIP
>>> for piece in pipe.stream("Why is the sky blue?", max_new_tokens=128):  # doctest: +SKIP
...     print(piece, end="")
"""

from __future__ import annotations

from importlib.metadata import version as _version

from .errors import (
    BackendMissingError,
    BundleError,
    CacheDirectoryError,
    CudaError,
    EngineError,
    ExactnessError,
    KvrelayError,
    MemoryBudgetError,
    ParameterError,
    PlanError,
    PromptError,
    ThreadCountError,
)
from .faults import Faults
from .handle import Handle
from .intake import Result
from .ort import use_threads
from .pipeline import Pipeline, Stream
from .receipt import Receipt, read_receipt
from .sampling import SamplingParams
from .serving import Engine
from .stats import EngineStats, Stats

__all__ = [
    "BackendMissingError",
    "BundleError",
    "CacheDirectoryError",
    "CudaError",
    "Engine",
    "EngineError",
    "EngineStats",
    "ExactnessError",
    "Faults",
    "Handle",
    "KvrelayError",
    "MemoryBudgetError",
    "ParameterError",
    "Pipeline",
    "PlanError",
    "PromptError",
    "Receipt",
    "Result",
    "SamplingParams",
    "Stats",
    "Stream",
    "ThreadCountError",
    "__version__",
    "read_receipt",
    "use_threads",
]

__version__ = _version("kvrelay")

"""Sessions on the one thread pool that all engines of a process share."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import EngineError, ParameterError, ThreadCountError
from .library import onnxruntime

__all__ = ["first_line", "load_session", "use_threads"]

_lock = threading.Lock()
_threads: int | None = None


def use_threads(threads: int | None) -> int:
    """Set the thread count of the process on first use; return the count in force.

    Args:
        threads: worker threads for one engine pass, or None for the count in force (at first: the CPUs that this
            process may use).

    Raises:
        ThreadCountError: the pool already runs with another count.
        ParameterError: ``threads`` is under 1 or over 4 times the CPUs.
    """
    global _threads
    usable = len(os.sched_getaffinity(0))
    whole = isinstance(threads, (int, np.integer)) and not isinstance(threads, bool)
    if threads is not None and not (whole and 1 <= threads <= 4 * usable):
        raise ParameterError(f"threads={threads!r}: this process may use {usable} CPUs, give 1 to {4 * usable}")
    with _lock:
        if _threads is None:
            wanted = int(threads or usable)
            onnxruntime().set_global_thread_pool_sizes(wanted, 1)
            _threads = wanted
        elif threads is not None and threads != _threads:
            raise ThreadCountError(
                f"threads={threads}: this process already runs its engines on {_threads} thread(s); all engines of a "
                f"process share one pool, so use threads={_threads} or another process"
            )
        return _threads


def load_session(file: Path | bytes, options: Any, providers: Sequence[Any] = ("CPUExecutionProvider",)) -> Any:
    """Return a session on the shared pool.

    Args:
        file: an ONNX file, or its content.
        options: session options, completed here.
        providers: ONNX Runtime's names or (name, options), in order of preference.

    Raises:
        EngineError: ONNX Runtime refuses the file.
    """
    use_threads(None)
    options.use_per_session_threads = False
    options.log_severity_level = 3
    try:
        model = file if isinstance(file, bytes) else str(file)
        return onnxruntime().InferenceSession(model, options, providers=list(providers), enable_fallback=0)
    except Exception as error:  # onnxruntime raises classes of its own, without a common base
        if "EnvCreatedWithGlobalThreadPools" in str(error):
            raise EngineError(
                "this process made an ONNX Runtime session of its own before kvrelay: all engines share one pool, "
                "which must come first; call kvrelay.use_threads() at the start of the program"
            ) from None
        what = "a model" if isinstance(file, bytes) else file
        raise EngineError(f"ONNX Runtime refuses {what}: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    """Return the first line of an error's text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

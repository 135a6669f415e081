"""What the C++ facade needs of Python besides the public API."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import EngineError, KvrelayError
from ..handle import Handle
from ..pipeline import Pipeline
from ..serving import Engine
from ..tokenizer import Prompt

__all__ = ["Shutdown", "close_engines", "next_logits", "wait"]


class Shutdown(BaseException):
    """Raised in a thread that is inside kvrelay when the host stops all work. No request catches it."""


def close_engines(engines: Sequence[Engine], seconds: float) -> bool:
    """Close all engines at once; return whether their threads ended within ``seconds``."""
    deadline = time.monotonic() + seconds
    closers = [threading.Thread(target=engine.close, daemon=True) for engine in engines]
    for engine, closer in zip(engines, closers, strict=True):
        try:
            closer.start()
        except RuntimeError:  # a host that ends its interpreter can start no thread (Python 3.12), nor one at its limit
            engine.close()
    for closer in closers:
        if closer.ident is not None:
            closer.join(max(0.0, deadline - time.monotonic()))
    return not any(closer.is_alive() for closer in closers)


def wait(handle: Handle, seconds: float) -> bool:
    """Return whether a request ended, well or not, within ``seconds``: any number, infinity and NaN included."""
    try:
        handle.result(min(seconds, threading.TIMEOUT_MAX) if seconds > 0 else 0.0)
    except TimeoutError:
        return False
    except KvrelayError:
        pass
    return True


def next_logits(pipeline: Pipeline, prompt: Prompt) -> npt.NDArray[np.float32]:
    """Return the target's float32 logits ``[V]`` behind ``prompt``, an array of their own.

    Raises:
        PromptError: the prompt is empty, or does not fit the context.
        EngineError: an engine failed.
    """
    request = pipeline._intake.request(prompt, max_new_tokens=1)
    lanes = pipeline._lanes
    lane = lanes.take(request)
    usable = True
    try:
        logits = lane.target.prefill(request.tokens, request.kv_length)
        lane.tokens = list(request.tokens)
        return np.array(logits.whole[: request.sampler.vocab_size])  # the engine's own memory serves the next pass
    except EngineError:
        usable = False  # what the failed pass wrote is unknown
        raise
    finally:
        if usable:
            lanes.release(lane)

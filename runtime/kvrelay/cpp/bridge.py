"""What the C++ facade needs of Python besides the public API."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ..errors import KvrelayError
from ..handle import Handle
from ..serving import Engine

__all__ = ["Shutdown", "close_engines", "wait"]


class Shutdown(BaseException):
    """Raised in a thread that is inside kvrelay when the host stops all work. Nothing in kvrelay catches it."""


def close_engines(engines: Sequence[Engine], seconds: float) -> bool:
    """Close all engines at once; return whether their threads ended within ``seconds``."""
    deadline = time.monotonic() + seconds
    closers = [threading.Thread(target=engine.close, daemon=True) for engine in engines]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(max(0.0, deadline - time.monotonic()))
    return not any(closer.is_alive() for closer in closers)


def wait(handle: Handle, seconds: float) -> bool:
    """Return whether a request ended, well or not, within ``seconds``."""
    try:
        handle.result(seconds)
    except TimeoutError:
        return False
    except KvrelayError:
        pass
    return True

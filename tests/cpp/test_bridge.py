"""What the C++ facade asks of Python: waits of any length, and engines closed where no thread can be started."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvrelay.cpp import bridge
from kvrelay.handle import Handle


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [(1.5, 1.5), (1e300, threading.TIMEOUT_MAX), (math.inf, threading.TIMEOUT_MAX), (-1.0, 0.0), (math.nan, 0.0)],
)
def test_a_wait_may_be_of_any_length(seconds: float, limit: float) -> None:
    waited: list[float] = []
    assert bridge.wait(cast(Handle, SimpleNamespace(result=waited.append)), seconds)
    assert waited == [limit]


def test_engines_are_closed_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 refuses new threads to exit handlers, the host's interpreter's among them."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    closed: list[int] = []
    engines: list[Any] = [SimpleNamespace(close=lambda i=i: closed.append(i)) for i in range(3)]
    assert bridge.close_engines(engines, 20)
    assert closed == [0, 1, 2]

"""A caller's hold on a request in an engine."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable, Iterator

from .errors import EngineError
from .forked import Home
from .intake import Result, result_of
from .latch import Latch
from .receipt import Receipt
from .request import Request

__all__ = ["Handle"]


class Handle:
    """One request in an engine. Any thread may use it."""

    def __init__(self, request: Request, wake: Callable[[], None], receipt: Callable[[], Receipt] | None) -> None:
        # Until the end: a handle that is kept does not keep the engine and its memory, nor the sampler's arrays.
        self._request: Request | None = request
        self._wake: Callable[[], None] | None = wake
        self._make_receipt = receipt
        self._home = Home()
        self._pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._done = Latch()
        self._error: Exception | None = None
        self._result: Result | None = None

    def stream(self) -> Iterator[str]:
        """Yield text as it is committed, to the end; each piece is given once.

        Raises:
            KvrelayError: the request failed, or had not ended when this process was forked.
        """
        self._require_end_to_come()
        while (piece := self._pieces.get()) is not None:
            yield piece
        self._pieces.put(None)  # for whoever comes next
        if self._error is not None:
            raise self._error

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end and return the generation; a cancelled one has what was committed before.

        Args:
            timeout: seconds to wait, None for as long as it takes.

        Raises:
            KvrelayError: the request failed, or had not ended when this process was forked.
            TimeoutError: it has not ended yet.
        """
        self._require_end_to_come()
        if not self._done.wait(timeout):
            raise TimeoutError(f"the request has not ended after {timeout} s; it goes on")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """End the request after the pass at hand. A request that has ended stays as it is, in a forked process any."""
        request, wake = self._request, self._wake
        if request is not None and wake is not None:
            request.cancelled = True
            wake()

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._done.is_open

    def _require_end_to_come(self) -> None:
        """Refuse to wait in a forked process for what only its parent would be told."""
        if not self._done.is_open:
            self._home.require()

    def _push(self, text: str) -> None:
        self._pieces.put(text)

    def _end(self, text: str, error: Exception | None) -> None:
        try:
            if error is None and self._request is not None:
                receipt = self._make_receipt() if self._make_receipt is not None else None
                self._result = dataclasses.replace(result_of(self._request), receipt=receipt)
        except Exception as fault:  # costs this request, not the engine
            error = EngineError(f"the request ended, but its result cannot be made: {type(fault).__name__}: {fault}")
        self._error = error
        self._request = self._wake = self._make_receipt = None
        if text:
            self._pieces.put(text)
        self._done.open()  # first: whoever has read the stream to its end finds the request done
        self._pieces.put(None)

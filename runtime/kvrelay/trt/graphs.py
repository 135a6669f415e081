"""How a pass is queued: call by call the first time, then captured, then as one graph."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..cuda import Graph, NotCapturableError, capture

__all__ = ["Launcher"]

_log = logging.getLogger(__name__)


class Launcher:
    """Queues the work of one pass, whose shapes and addresses never change.

    The first run sets up what cannot be captured, so the second one captures: nothing is run to warm up, which would
    write into the cache. Work that CUDA does not take into a graph is queued call by call, as at first.

    Args:
        name: of the engine, for the log.
        queue: queues the work.
        captured: use a CUDA graph from the second run on.
    """

    def __init__(self, name: str, queue: Callable[[], None], *, captured: bool) -> None:
        self._name = name
        self._queue = queue
        self._captured = captured
        self._warm = False
        self.graph: Graph | None = None

    def __call__(self) -> None:
        """Queue the work once. The caller is inside :meth:`kvrelay.cuda.Device.exclusive`.

        Raises:
            EngineError: it cannot be queued.
        """
        if self.graph is None and self._captured and self._warm:
            self._capture()
        if self.graph is not None:
            self.graph.launch()
        else:
            self._queue()
            self._warm = True

    def _capture(self) -> None:
        try:
            self.graph = capture(self._queue)
        except NotCapturableError as error:
            self._captured = False
            _log.warning("engine %s runs without a CUDA graph: %s", self._name, str(error))  # without its frames

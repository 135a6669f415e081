"""How a pass is queued: call by call the first time, then captured, then as one graph."""

from __future__ import annotations

from collections.abc import Callable

from ..cuda import Graph, capture

__all__ = ["Launcher"]


class Launcher:
    """Queues the work of one pass, whose shapes and addresses never change.

    The first run sets up what cannot be captured, so the second one captures: nothing is run to warm up, which would
    write into the cache.

    Args:
        queue: queues the work.
        captured: use a CUDA graph from the second run on.
    """

    def __init__(self, queue: Callable[[], None], *, captured: bool) -> None:
        self._queue = queue
        self._captured = captured
        self._warm = False
        self.graph: Graph | None = None

    def __call__(self) -> None:
        """Queue the work once. The caller is inside :meth:`kvrelay.cuda.Device.exclusive`.

        Raises:
            EngineError: it cannot be queued or captured.
        """
        if self.graph is None and self._captured and self._warm:
            self.graph = capture(self._queue)
        if self.graph is not None:
            self.graph.launch()
        else:
            self._queue()
            self._warm = True

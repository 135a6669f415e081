"""CUDA graphs: work that was queued once, captured, and is launched as a whole from then on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..errors import EngineError
from .calls import CudaError, check, runtime
from .device import Device

__all__ = ["Graph", "NotCapturableError", "capture"]

# What CUDA says of work that a capture does not take: cudaErrorStreamCaptureUnsupported and those behind it.
_CAPTURE_CODES = range(900, 909)


class NotCapturableError(EngineError):
    """Work cannot be a part of a graph; queued call by call it may well run."""


class Graph:
    """Captured work. It uses the addresses that it was captured with: keep their memory."""

    def __init__(self, executable: Any) -> None:
        device = Device.current()
        self._executable = executable
        weakref.finalize(self, device.retire, runtime().cudaGraphExecDestroy, executable, "a graph")

    def launch(self) -> None:
        """Queue the work again."""
        check(runtime().cudaGraphLaunch(self._executable, Device.current().stream.raw), "launch a graph")


def capture(queue: Callable[[], None]) -> Graph:
    """Return what ``queue`` queues on the device's stream, as a graph; nothing is run.

    The caller is inside :meth:`Device.exclusive`, and ``queue`` has been run before: what is set up on first use
    cannot be captured.

    Raises:
        NotCapturableError: CUDA does not take the work into a graph.
        CudaError: a call failed.
        EngineError: ``queue`` failed.
    """
    device = Device.current()
    cuda, stream = runtime(), device.stream.raw
    mode = cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    check(cuda.cudaStreamBeginCapture(stream, mode), "begin a capture")
    device.capturing = True
    try:
        queue()
    except BaseException as error:
        # A capture left open takes all later work; the error that matters is the one at hand.
        code, *graphs = _end(device)
        if not int(code) and int(graphs[0]):
            device.retire(cuda.cudaGraphDestroy, graphs[0], "a captured graph")
        if int(code) in _CAPTURE_CODES and isinstance(error, EngineError):
            raise NotCapturableError(str(error)) from None
        raise
    ended = _end(device)
    if int(ended[0]) in _CAPTURE_CODES:
        raise NotCapturableError(f"CUDA cannot capture a pass: {ended[0].name}")
    graph = check(ended, "capture a pass")
    if not int(graph):
        raise CudaError("CUDA captured no work: the pass runs on another stream")
    try:
        executable = check(cuda.cudaGraphInstantiate(graph, 0), "make a captured pass ready to launch")
    finally:
        device.retire(cuda.cudaGraphDestroy, graph, "a captured graph")
    return Graph(executable)


def _end(device: Device) -> Any:
    """End the capture; return what CUDA says."""
    try:
        return runtime().cudaStreamEndCapture(device.stream.raw)
    finally:
        device.capturing = False

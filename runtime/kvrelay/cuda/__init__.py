"""CUDA for the backends: every call checked, memory and streams that free themselves, KV that lives on the device.

Importing this package loads neither CUDA's bindings nor a driver; :meth:`Device.current` does. All work of a process
is queued on one stream of one device, in order.
"""

from __future__ import annotations

from .calls import CudaError, check, runtime
from .device import Device
from .graphs import Graph, NotCapturableError, capture
from .memory import Block, DeviceBuffer, PinnedArray, copy, copy_block, zero, zero_block
from .streams import Event, Stream

__all__ = [
    "Block",
    "CudaError",
    "Device",
    "DeviceBuffer",
    "Event",
    "Graph",
    "NotCapturableError",
    "PinnedArray",
    "Stream",
    "capture",
    "check",
    "copy",
    "copy_block",
    "runtime",
    "zero",
    "zero_block",
]

"""Bound passes of TensorRT."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .. import contract
from ..cuda import Block, Device, DeviceBuffer, Event, copy
from ..errors import EngineError
from ..kv import KVCache
from ..logits import Top
from .buffers import LogitMemory, Staged
from .graphs import Launcher

__all__ = ["NewEntries", "TrtPass", "require_room"]


def require_room(write_index: npt.NDArray[np.int64], width: int, capacity: int) -> None:
    """Refuse a pass that the GPU would let write over other memory.

    Raises:
        EngineError: a row would leave the cache; names the numbers.
    """
    first, last = int(write_index.min()), int(write_index.max())
    if first < 0 or last + width > capacity:
        raise EngineError(f"a pass of {width} at entries {first}..{last} leaves the capacity {capacity}")


class NewEntries:
    """Writes the entries of a pass of the dialect `decomposed` to the cache, on the GPU.

    Args:
        cache: the cache.
        names: past names, in the order in which the new entries lie.
        slot: the first slot.
        memory: of the new entries, kept.
        block: where the entries ``[tensors, B, Hkv, S, D]`` lie.
        width: tokens of a row, S.
    """

    def __init__(
        self, cache: KVCache, names: list[str], slot: int, memory: DeviceBuffer, block: Block, width: int
    ) -> None:
        self._memory = memory
        self._cache = cache
        self._names = names
        self._slot = slot
        self._block = block
        self._width = width

    def queue(self, write_index: npt.NDArray[np.int64]) -> int:
        """Queue the copies for every row; return the bytes."""
        copied = 0
        for row, start in enumerate(write_index.tolist()):
            heads = self._cache.model.kv_heads
            address = self._block.address + row * heads * self._block.pitch
            mine = Block(address, self._block.pitch, self._block.slice_rows)
            copied += self._cache.append(self._slot + row, start, self._width, mine, self._names)
        return copied


class TrtPass:
    """One engine bound to one run of slots (see :class:`kvrelay.engine.BoundPass`).

    A run copies the inputs to the GPU, runs the engine on the device's stream and copies the largest logits back,
    from the second run on as one CUDA graph. Whole rows follow when ``logits`` is read. A second thread inside
    :meth:`run` is an error; passes of different threads take turns at queueing and wait for the GPU side by side.
    """

    def __init__(
        self,
        name: str,
        cache: KVCache,
        inputs: Staged,
        largest: Staged | None,
        memory: LogitMemory,
        logits_shape: tuple[int, int, int],
        queue_engine: Callable[[], None],
        entries: NewEntries | None,
        *,
        captured: bool,
    ) -> None:
        self.input_ids = inputs.arrays[contract.INPUT_IDS]
        self.write_index = inputs.arrays[contract.WRITE_INDEX]
        self.logit_rows = inputs.arrays[contract.LOGIT_ROWS]
        self.seconds = 0.0
        self.runs = 0
        self.kv_bytes_copied = 0
        self._name = name
        self._cache = cache  # bound by address: keep it alive
        self._memory = memory
        self._logits_shape = logits_shape
        self._fetched = True
        self._entries = entries
        self._top = None
        if largest is not None:
            arrays = largest.arrays
            self._top = Top(arrays[contract.TOP_VALUES], arrays[contract.TOP_IDS], arrays[contract.LOG_SUM])
        self._device = Device.current()
        self._done = Event()
        self._running = threading.Lock()

        def queue() -> None:
            inputs.to_device()
            queue_engine()
            if largest is not None:
                largest.to_host()

        self.launcher = Launcher(name, queue, captured=captured)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """The logits ``[B, R, V]`` of the last run, copied from the GPU when they are first read."""
        size = int(np.prod(self._logits_shape))
        host = self._memory.host()
        if not self._fetched:
            with self._device.exclusive():
                copy(host.address, self._memory.device.address, 4 * size, f"logits of {self._name} from the GPU")
                self._done.record(self._device.stream)
            self._done.synchronize()
            self._fetched = True
        whole: npt.NDArray[np.float32] = host.array[:size].reshape(self._logits_shape)
        return whole

    def top(self) -> Top | None:
        """Return the largest logits of the last run's rows; None from a plan without them."""
        return self._top

    def run(self) -> None:
        """Run the engine once and wait for it.

        Raises:
            EngineError: another thread is inside, a row would leave the cache, or the GPU reports a failure.
        """
        if not self._running.acquire(blocking=False):
            raise EngineError(f"a pass of engine {self._name} is in use by another thread: bind one for each thread")
        try:
            self._run()
        finally:
            self._running.release()

    def _run(self) -> None:
        start = time.perf_counter()
        require_room(self.write_index, self.input_ids.shape[1], self._cache.model.capacity)
        copied = 0
        with self._device.exclusive():
            self.launcher()
            if self._entries is not None:
                copied = self._entries.queue(self.write_index)
            self._done.record(self._device.stream)
        self._done.synchronize()
        self._fetched = False
        self.kv_bytes_copied += copied
        self.seconds += time.perf_counter() - start
        self.runs += 1

"""ONNX Runtime on the GPU of this process: sessions on the device's stream, passes over device memory.

A session of the CUDA provider copies a host input to the device when it is *bound*, not when it is run. So what changes
from pass to pass lies in page-locked host memory and is copied to fixed device addresses before each run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import contract
from ..cuda import Block, Device, copy
from ..errors import EngineError
from ..kv import KVCache
from ..manifest import EngineEntry, ModelEntry
from ..trt.buffers import Staged, logit_memory, padded_rows, scratch
from ..trt.passes import NewEntries, require_room
from .library import onnxruntime
from .passes import OrtPass, PassShape
from .providers import PROVIDERS, check_providers, explained, preload, quiet
from .tensorrt_options import tensorrt_options
from .threads import load_session

__all__ = ["GpuPass", "OrtGpu"]

_graph_ids = itertools.count(1)  # each pass has addresses of its own, and so a graph of its own of the CUDA provider


class OrtGpu:
    """Loads sessions onto the GPU and binds passes of them.

    Args:
        providers: in order of preference; the first is "cuda" or "tensorrt".
        cache: the bundle's folder in the box's cache, where TensorRT's engines are kept.
        model: sizes of the model that engines loaded here are of.
        max_batch: most rows of a pass of an engine with a dynamic batch.
        progress: told what takes long, and of engines that cannot be captured.

    Raises:
        BackendMissingError: this build of ONNX Runtime lacks a provider, or CUDA's bindings are not installed.
        CudaError: there is no GPU.
    """

    def __init__(
        self,
        providers: tuple[str, ...],
        cache: Path,
        model: ModelEntry,
        max_batch: int,
        progress: Callable[[str], None],
    ) -> None:
        check_providers(providers)
        preload()
        self.providers = providers
        self._device = Device.current()
        self._cache = cache
        self._model = model
        self._max_batch = max_batch
        self._progress = progress

    def load(self, entry: EngineEntry, file: Path, options: Any) -> tuple[Any, bool]:
        """Return a session, and whether it runs as CUDA graphs: not on TensorRT, nor where operators forbid it.

        Raises:
            EngineError: ONNX Runtime refuses the file.
        """
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        # The TensorRT provider keeps one graph for a session, whatever `gpu_graph_id` says: a second pass of an engine
        # would replay the first one's, at its addresses.
        graphs = self.providers[0] == "cuda"
        with quiet():
            try:
                return load_session(file, options, self._providers(entry, graphs=graphs)), graphs
            except EngineError as error:
                if not graphs or "graph capture" not in str(error):
                    raise explained(error, self.providers) from None
                self._progress(f"engine {entry.name} runs without a CUDA graph: {error}")
                return load_session(file, options, self._providers(entry, graphs=False)), False

    def _providers(self, entry: EngineEntry, *, graphs: bool) -> list[tuple[str, dict[str, str]]]:
        shared = {"device_id": "0", "user_compute_stream": str(self._device.stream.handle)}
        options: dict[str, dict[str, str]] = {
            "cpu": {},
            # TF32 would round the factors of fp32 products to 10 bits, away from every other backend's results.
            "cuda": {
                **shared,
                "enable_cuda_graph": str(int(graphs)),
                "use_tf32": "0",
                "arena_extend_strategy": "kSameAsRequested",  # a power of two is too much of a Jetson's memory
            },
        }
        if "tensorrt" in self.providers:
            compiled = tensorrt_options(entry, self._model, self._max_batch, self._cache)
            options["tensorrt"] = {**shared, **compiled}
        return [(PROVIDERS[name], options[name]) for name in self.providers]

    def bind(
        self,
        session: Any,
        entry: EngineEntry,
        cache: KVCache,
        shape: PassShape,
    ) -> GpuPass:
        """Bind a pass.

        Raises:
            CudaError: there is no room for the pass's inputs and logits.
        """
        return GpuPass(session, entry, cache, shape)


class GpuPass(OrtPass):
    """A pass on the GPU: ids and lengths are copied there before each run, logits back when they are read; KV stays.

    A pass belongs to one thread at a time. Passes of different threads take turns: they share one stream.
    """

    def __init__(self, session: Any, entry: EngineEntry, cache: KVCache, shape: PassShape) -> None:
        self._device = Device.current()
        with self._device.exclusive():
            self._inputs = Staged({n: (size, np.int64) for n, size in shape.inputs().items()}, "ids and lengths")
            super().__init__(session, entry, cache, self._inputs.arrays)
            self._memory = logit_memory(cache, int(np.prod(shape.logits)))
            self._shape = shape.logits
            self._fetched = True
            self._entries: NewEntries | None = None
            self._bind_inputs()
            address = self._memory.device.address
            self._binding.bind_output(contract.LOGITS, "cuda", 0, np.float32, shape.logits, address)
            self._bind_cache(entry, shape, "cuda")
            if not contract.updates_in_place(entry.dialect):
                self._entries = self._bind_new(entry, shape)
        self._run_options = onnxruntime().RunOptions()
        self._run_options.add_run_config_entry("gpu_graph_id", str(next(_graph_ids)))

    def _bind_inputs(self) -> None:
        session, arrays = self._session, self._inputs.arrays
        places = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
        on_host = {i.name for i, info in places if info.name.lower().startswith("cpu")}
        for name, array in arrays.items():
            # Arithmetic on lengths may read an input on the CPU: that one is bound where the caller writes it.
            device = "cpu" if name in on_host else "cuda"
            address = array.ctypes.data if name in on_host else self._inputs.addresses[name]
            self._binding.bind_input(name, device, 0, np.int64, array.shape, address)

    def _bind_new(self, entry: EngineEntry, shape: PassShape) -> NewEntries:
        """Bind what a pass of the dialect `decomposed` gives to memory that all passes share."""
        heads, head_dim = self._cache.shape[1], self._cache.shape[3]
        names = contract.new_names(entry.kv_layers)
        pitch = shape.width * head_dim * self._cache.dtype.itemsize
        rows = padded_rows(shape.batch * heads, pitch)
        memory = scratch("new KV entries of onnxruntime", len(names) * rows * pitch)
        for index, name in enumerate(names):
            address = memory.address + index * rows * pitch
            size = (shape.batch, heads, shape.width, head_dim)
            self._binding.bind_output(name, "cuda", 0, self._cache.dtype.type, size, address)
        block = Block(memory.address, pitch, rows)
        past = contract.past_names(entry.kv_layers)
        return NewEntries(self._cache, past, shape.slot, memory, block, shape.width)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """The logits ``[B, R, V]`` of the last run, copied from the GPU when they are first read."""
        host = self._memory.host()
        size = int(np.prod(self._shape))
        if not self._fetched:
            with self._device.exclusive():
                copy(host.address, self._memory.device.address, 4 * size, f"logits of {self._name} from the GPU")
                self._device.stream.synchronize()
            self._fetched = True
        whole: npt.NDArray[np.float32] = host.array[:size].reshape(self._shape)
        return whole

    def _run(self) -> None:
        require_room(self.write_index, self.input_ids.shape[1], self._cache.model.capacity)
        with self._device.exclusive():
            self._inputs.to_device()
            self._execute(self._run_options)
            if self._entries is not None:
                self.kv_bytes_copied += self._entries.queue(self.write_index)
            self._device.stream.synchronize()
        self._fetched = False

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
from ..cuda import Block, Device, DeviceBuffer, PinnedArray, copy, copy_block
from ..errors import EngineError
from ..kv import KVCache
from ..manifest import EngineEntry, ModelEntry
from .library import onnxruntime
from .passes import OrtPass, PassShape
from .providers import PROVIDERS, check_providers, preload, quiet
from .tensorrt_options import tensorrt_options
from .threads import load_session

__all__ = ["GpuPass", "OrtGpu"]

Array = npt.NDArray[Any]

_graph_ids = itertools.count(1)  # each pass has addresses of its own, and so a captured graph of its own


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

    def load(self, entry: EngineEntry, file: Path, options: Any) -> Any:
        """Return a session, with CUDA graphs where its operators can be captured.

        Raises:
            EngineError: ONNX Runtime refuses the file.
        """
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        with quiet():
            try:
                return load_session(file, options, self._providers(entry, graphs=True))
            except EngineError as error:
                if "graph capture" not in str(error):
                    raise
                self._progress(f"engine {entry.name} runs without a CUDA graph: {error}")
                return load_session(file, options, self._providers(entry, graphs=False))

    def _providers(self, entry: EngineEntry, *, graphs: bool) -> list[tuple[str, dict[str, str]]]:
        shared = {"device_id": "0", "user_compute_stream": str(self._device.stream.handle)}
        options: dict[str, dict[str, str]] = {
            "cpu": {},
            # TF32 would round the factors of fp32 products to 10 bits, away from every other backend's results.
            "cuda": {
                **shared,
                "enable_cuda_graph": str(int(graphs and self.providers[0] == "cuda")),
                "use_tf32": "0",
                "arena_extend_strategy": "kSameAsRequested",  # a power of two is too much of a Jetson's memory
            },
        }
        if "tensorrt" in self.providers:
            compiled = tensorrt_options(entry, self._model, self._max_batch, self._cache)
            options["tensorrt"] = {**shared, "trt_cuda_graph_enable": str(int(graphs)), **compiled}
        return [(PROVIDERS[name], options[name]) for name in self.providers]

    def bind(
        self,
        session: Any,
        entry: EngineEntry,
        cache: KVCache,
        shape: PassShape,
        logits: npt.NDArray[np.float32] | None,
    ) -> GpuPass:
        """Bind a pass.

        Raises:
            CudaError: there is no room for the pass's inputs and logits.
        """
        return GpuPass(session, entry, cache, shape, logits)


class GpuPass(OrtPass):
    """A pass on the GPU: ids and lengths are copied there before each run, logits back after it; KV stays."""

    def __init__(
        self,
        session: Any,
        entry: EngineEntry,
        cache: KVCache,
        shape: PassShape,
        logits: npt.NDArray[np.float32] | None,
    ) -> None:
        if logits is None:
            logits = PinnedArray((shape.batch * shape.rows * shape.vocab,), np.float32).array
        super().__init__(session, entry, cache, shape, logits, lambda size: PinnedArray(size, np.int64).array)
        self._device = Device.current()
        self._run_options = onnxruntime().RunOptions()
        self._run_options.add_run_config_entry("gpu_graph_id", str(next(_graph_ids)))
        places = dict(zip((i.name for i in session.get_inputs()), session.get_input_memory_infos(), strict=True))
        self._staged: list[tuple[str, Array, DeviceBuffer]] = []
        for name, array in self.inputs().items():
            if places[name].name.lower().startswith("cpu"):  # only arithmetic on lengths reads it, on the CPU
                self._binding.bind_input(name, "cpu", 0, np.int64, array.shape, array.ctypes.data)
                continue
            buffer = DeviceBuffer(array.nbytes)
            self._staged.append((name, array, buffer))
            self._binding.bind_input(name, "cuda", 0, np.int64, array.shape, buffer.address)
        self._device_logits = DeviceBuffer(self.logits.nbytes)
        self._binding.bind_output(
            contract.LOGITS, "cuda", 0, np.float32, self.logits.shape, self._device_logits.address
        )
        self._new: dict[str, DeviceBuffer] = {}  # entries that the backend writes to the cache, by past name
        self._new_shape = shape.new_entries(cache)
        self._bind_cache(entry, cache, shape)

    def _bind_cache(self, entry: EngineEntry, cache: KVCache, shape: PassShape) -> None:
        in_place = contract.updates_in_place(entry.dialect)
        outputs = contract.present_names(entry.kv_layers) if in_place else contract.new_names(entry.kv_layers)
        kind = cache.dtype.type
        for past, output in zip(contract.past_names(entry.kv_layers), outputs, strict=True):
            address, cached = cache.address(past, shape.slot), shape.cached(cache)
            self._binding.bind_input(past, "cuda", 0, kind, cached, address)
            if in_place:
                self._binding.bind_output(output, "cuda", 0, kind, cached, address)
            else:
                self._new[past] = DeviceBuffer(int(np.prod(self._new_shape)) * cache.dtype.itemsize)
                self._binding.bind_output(output, "cuda", 0, kind, self._new_shape, self._new[past].address)

    def _run(self) -> None:
        with self._device.exclusive():
            for name, array, buffer in self._staged:
                copy(buffer.address, array.ctypes.data, array.nbytes, name)
            self._execute(self._run_options)
            for name, entries in self._new.items():
                self._cache_new(name, entries)
            copy(self.logits.ctypes.data, self._device_logits.address, self.logits.nbytes, "logits")
            self._device.stream.synchronize()

    def _cache_new(self, name: str, entries: DeviceBuffer) -> None:
        _, heads, width, head_dim = self._new_shape
        pitch = head_dim * self._cache.dtype.itemsize
        for row, start in enumerate(self.write_index.tolist()):
            source = Block(entries.address + row * heads * width * pitch, pitch, width)
            address = self._cache.address(name, self._slot + row) + start * pitch
            copy_block(Block(address, pitch, self._cache.model.capacity), source, pitch, width, heads, "new KV entries")
        self.kv_bytes_copied += entries.size

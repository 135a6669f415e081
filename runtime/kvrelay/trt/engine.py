"""Engines on TensorRT and TensorRT-RTX: plans checked against the bundle, bound once, by address."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import contract
from ..cuda import Block, Device, DeviceBuffer
from ..errors import EngineError
from ..kv import KVCache, Memory
from ..manifest import EngineEntry, ModelEntry
from .buffers import ALIGNMENT, Staged, logit_memory, padded_rows, scratch
from .contexts import Context, dropped
from .engine_check import check_engine, top_count
from .network import Log
from .passes import NewEntries, TrtPass
from .plans import Plan, read_plan

__all__ = ["TrtEngine"]

Shape = tuple[int, ...]


class TrtEngine:
    """A loaded engine (see :class:`kvrelay.engine.LoadedEngine`). Thread-safe: each thread binds its own passes.

    Args:
        entry: its manifest entry.
        model: its model.
        plan: its plan, found for this library and GPU.
        library: the module ``tensorrt`` or ``tensorrt_rtx``.
        graphs: replay passes as CUDA graphs.

    Raises:
        EngineError: the library refuses the plan, or its tensors are not those of the manifest.
        PlanError: the plan's file is not what was built.
        CudaError: there is no GPU.
    """

    def __init__(self, entry: EngineEntry, model: ModelEntry, plan: Plan, library: Any, *, graphs: bool = True) -> None:
        device = Device.current()
        self.entry = entry
        self.memory: Memory = "cuda"
        self._model = model
        self._library = library
        self._graphs = graphs
        self._log = Log()
        data = read_plan(plan)
        self._runtime = library.Runtime(self._log.logger(library))
        with device.exclusive():
            self._engine = self._runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            major, minor = device.compute_capability
            raise EngineError(
                f"{plan.path} cannot be loaded: built for {plan.key.library} {plan.key.library_version} on "
                f"{', '.join(plan.key.compute_capability)} ({plan.key.gpu_name}), here is {library.__name__} "
                f"{library.__version__} on sm{major}{minor} ({device.name}): {self._log.first_error()}; "
                "run `kvrelay build` again"
            )
        weakref.finalize(self, device.retire, dropped, self._engine, f"engine {entry.name}")
        check_engine(library, self._engine, entry, model)

    def bind(
        self,
        cache: KVCache,
        width: int,
        rows: int,
        *,
        slot: int = 0,
        batch: int = 1,
        logits: npt.NDArray[np.float32] | None = None,
    ) -> TrtPass:
        """Bind ``batch`` neighbouring slots from ``slot`` on (see :class:`kvrelay.engine.LoadedEngine`).

        ``logits`` is not used: passes over one cache share page-locked memory for whole rows.
        """
        entry = self.entry
        self._check_bind(cache, (batch, width, rows), slot)
        vocab, cached = self._model.padded_vocab_size, (batch, *cache.shape[1:])
        past = contract.past_names(entry.kv_layers)
        with Device.current().exclusive():
            inputs = Staged(
                {
                    contract.INPUT_IDS: ((batch, width), np.int64),
                    contract.WRITE_INDEX: ((batch,), np.int64),
                    contract.LOGIT_ROWS: ((batch, rows), np.int64),
                },
                f"inputs of {entry.name}",
            )
            largest = self._largest(batch, rows)
            memory = logit_memory(cache, batch * rows * vocab)
            addresses = {**inputs.addresses, contract.LOGITS: memory.device.address}
            addresses |= {name: cache.address(name, slot) for name in past}
            shapes: dict[str, Shape] = {contract.LOGITS: (batch, rows, vocab)}
            if largest is not None:
                addresses |= largest.addresses
                shapes |= {name: array.shape for name, array in largest.arrays.items()}
            entries = None
            if contract.updates_in_place(entry.dialect):
                present = contract.present_names(entry.kv_layers)
                addresses |= {out: addresses[name] for out, name in zip(present, past, strict=True)}
                shapes |= dict.fromkeys(present, cached)
            else:
                new = contract.new_names(entry.kv_layers)
                memory_of_new, block = self._new_block(cache, batch, width, len(new))
                stride = block.pitch * block.slice_rows
                addresses |= {name: block.address + i * stride for i, name in enumerate(new)}
                shapes |= dict.fromkeys(new, (batch, cached[1], width, cached[3]))
                entries = NewEntries(cache, past, slot, memory_of_new, block, width)
            context = Context(
                self._library,
                self._engine,
                self._log,
                entry.name,
                inputs={**{n: a.shape for n, a in inputs.arrays.items()}, **dict.fromkeys(past, cached)},
                outputs=shapes,
                addresses=addresses,
                graphs=self._graphs,
            )
            return TrtPass(
                entry.name,
                cache,
                inputs,
                largest,
                memory,
                (batch, rows, vocab),
                context.queue,
                entries,
                captured=self._graphs and not context.captures_itself,
            )

    def _check_bind(self, cache: KVCache, wanted: tuple[int, int, int], slot: int) -> None:
        entry, batch = self.entry, wanted[0]
        fixed = (entry.batch, entry.sequence, entry.rows)
        if any(size is not None and size != asked for size, asked in zip(fixed, wanted, strict=True)):
            raise EngineError(f"engine {entry.name} has the fixed shape {fixed}, asked for {wanted}")
        if cache.memory != "cuda":
            raise EngineError(f"engine {entry.name} runs on the GPU and needs a cache there, got one in host memory")
        if cache.dtype.name != entry.kv_dtype or not set(entry.kv_layers) <= set(cache.layers):
            raise EngineError(
                f"engine {entry.name} wants a {entry.kv_dtype} cache of layers {entry.kv_layers}, "
                f"got {cache.dtype.name} and {list(cache.layers)}"
            )
        if not 0 <= slot <= cache.slots - batch:
            raise EngineError(f"slots {slot}..{slot + batch - 1} lie outside a cache of {cache.slots}")
        address = cache.address(cache.names[0], slot) if cache.names else 0
        if address % ALIGNMENT:
            raise EngineError(
                f"engine {entry.name}: slot {slot} lies at {address:#x}, TensorRT needs a multiple of {ALIGNMENT}; "
                "export with a --context that is a multiple of 64"
            )

    def _largest(self, batch: int, rows: int) -> Staged | None:
        count = top_count(self._engine)
        if count is None:
            return None
        return Staged(
            {
                contract.TOP_VALUES: ((batch, rows, count), np.float32),
                contract.TOP_IDS: ((batch, rows, count), np.int32),
                contract.LOG_SUM: ((batch, rows), np.float32),
            },
            f"largest logits of {self.entry.name}",
        )

    def _new_block(self, cache: KVCache, batch: int, width: int, tensors: int) -> tuple[DeviceBuffer, Block]:
        """Return where an engine that cannot update the cache leaves its entries ``[tensors, B, Hkv, S, D]``."""
        pitch = width * cache.shape[3] * cache.dtype.itemsize
        rows = padded_rows(batch * cache.shape[1], pitch)
        memory = scratch("entries", tensors * rows * pitch)
        return memory, Block(memory.address, pitch, rows)

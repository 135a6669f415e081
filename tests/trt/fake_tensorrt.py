"""A strict stand-in for TensorRT over the fake CUDA: plans name an ONNX file, which ONNX Runtime runs.

Rules that the real one states are errors here: shapes and addresses before execution, past and present at one
address, memory given by the user, a stream of its own, no capture before a first run, one thread at a time.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
from fake_cuda import GPU, FakeCuda
from kvrelay import contract
from kvrelay.manifest import EngineEntry, ModelEntry
from kvrelay.ort.threads import load_session
from kvrelay.trt.profiles import profiles_of

Shape = tuple[int, ...]
DataType = Enum("DataType", "INT64 INT32 FLOAT HALF")
TensorIOMode = Enum("TensorIOMode", "NONE INPUT OUTPUT")
TensorLocation = Enum("TensorLocation", "DEVICE HOST")
Strategy = Enum("Strategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED")
GraphStrategy = Enum("GraphStrategy", "DISABLED WHOLE_GRAPH_CAPTURE")
Kernels = Enum("Kernels", "LAZY EAGER NONE")
_KINDS = {
    "tensor(int64)": (DataType.INT64, np.int64),
    "tensor(float)": (DataType.FLOAT, np.float32),
    "tensor(float16)": (DataType.HALF, np.float16),
}
SCRATCH = 4096  # bytes that every profile needs


def plan_bytes(entry: EngineEntry, model: ModelEntry, graph: Path, max_batch: int = 1, **changes: Any) -> bytes:
    """What a builder would give: the graph, its profiles and how the engine is made wrong on purpose."""
    profiles = [p.shapes(entry, model) for p in profiles_of(entry, model, max_batch)]
    facts = {"graph": str(graph), "profiles": profiles, "vocab": model.vocab_size, "top": True, "append": False}
    return b"fake plan\n" + json.dumps({**facts, **changes}).encode()


class ILogger:
    """Loggers derive from it."""

    INTERNAL_ERROR, ERROR, WARNING = range(3)


class FakeTensorrt:
    """Use it in place of the module ``tensorrt``."""

    __name__ = "tensorrt"
    ILogger = ILogger
    DataType = DataType
    TensorIOMode = TensorIOMode
    TensorLocation = TensorLocation
    ExecutionContextAllocationStrategy = Strategy

    def __init__(self, cuda: FakeCuda, version: str = "10.16.1", *, captures: bool = False) -> None:
        self.cuda = cuda
        self.__version__ = version
        self.contexts: list[Context] = []
        self.hook: Callable[[Context], None] = lambda _: None  # called inside every execution
        if captures:
            self.CudaGraphStrategy = GraphStrategy
            self.DynamicShapesKernelSpecializationStrategy = Kernels

    def Runtime(self, logger: Any) -> Any:
        return SimpleNamespace(deserialize_cuda_engine=lambda data: self._load(logger, data))

    def _load(self, logger: Any, data: bytes) -> Engine | None:
        if not data.startswith(b"fake plan\n"):
            logger.log(ILogger.ERROR, "the magic tag of the plan does not match")
            return None
        kind = OldEngine if self.__version__ < "10.15" else Engine
        return kind(self, logger, json.loads(data.split(b"\n", 1)[1]))


class OldEngine:
    """ICudaEngine before TensorRT could update a cache in place."""

    def __init__(self, library: FakeTensorrt, logger: Any, facts: dict[str, Any]) -> None:
        self.library = library
        self.logger = logger
        self.facts = facts
        self.session = load_session(Path(facts["graph"]), onnxruntime.SessionOptions())
        self.num_optimization_profiles = len(facts["profiles"])
        self.inputs = {i.name: self._axes(i) for i in self.session.get_inputs()}
        self.kinds = {t.name: _KINDS[t.type] for t in (*self.session.get_inputs(), *self.session.get_outputs())}
        outputs = {o.name: self._axes(o) for o in self.session.get_outputs()}
        if facts["append"]:
            outputs = {contract.LOGITS: outputs[contract.LOGITS]}
            for past in (n for n in self.inputs if n.startswith("past_")):
                batch, heads, _, dim = self.inputs[past]
                new = past.replace("past_", "new_")
                outputs[new] = (batch, heads, self.inputs[contract.INPUT_IDS][1], dim)
                self.kinds[new] = self.kinds[past]
        if facts["top"]:
            rows = outputs[contract.LOGITS][:2]
            count = min(contract.TOP, facts["vocab"])
            outputs |= {contract.TOP_VALUES: (*rows, count), contract.TOP_IDS: (*rows, count), contract.LOG_SUM: rows}
            self.kinds[contract.TOP_VALUES] = self.kinds[contract.LOG_SUM] = _KINDS["tensor(float)"]
            self.kinds[contract.TOP_IDS] = (DataType.INT32, np.int32)
        self.outputs = outputs
        self.names = [*self.inputs, *outputs]
        self.num_io_tensors = len(self.names)

    @staticmethod
    def _axes(tensor: Any) -> Shape:
        return tuple(axis if isinstance(axis, int) else -1 for axis in tensor.shape)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if name == self.facts.get("on_host") else TensorLocation.DEVICE

    def get_tensor_dtype(self, name: str) -> DataType:
        return self.kinds[name][0]

    def get_tensor_shape(self, name: str) -> Shape:
        return self.inputs[name] if name in self.inputs else self.outputs[name]

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[list[int]]:
        return self.facts["profiles"][profile][name]

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return SCRATCH * (profile + 1)

    def create_runtime_config(self) -> Any:
        config = SimpleNamespace(cuda_graph_strategy=GraphStrategy.DISABLED, strategy=Strategy.STATIC)
        config.dynamic_shapes_kernel_specialization_strategy = Kernels.LAZY
        config.set_execution_context_allocation_strategy = lambda s: setattr(config, "strategy", s)
        return config

    def create_execution_context(self, how: Any) -> Context:
        context = Context(self, how if isinstance(how, Strategy) else how.strategy)
        if not isinstance(how, Strategy):
            context.captures = how.cuda_graph_strategy is GraphStrategy.WHOLE_GRAPH_CAPTURE
            context.kernels = how.dynamic_shapes_kernel_specialization_strategy
        self.library.contexts.append(context)
        return context


class Engine(OldEngine):
    """ICudaEngine."""

    def get_aliased_input_tensor(self, name: str) -> str | None:
        if name == self.facts.get("no_alias") or not name.startswith("present_"):
            return None
        return name.replace("present_", "past_")


class Context:
    """IExecutionContext."""

    def __init__(self, engine: OldEngine, strategy: Strategy) -> None:
        self.engine = engine
        self.strategy = strategy
        self.captures = False
        self.kernels = Kernels.EAGER
        self.profile = 0
        self.shapes: dict[str, Shape] = {}
        self.addresses: dict[str, int] = {}
        self.memory = (0, 0)
        self.warm = False
        self.executions = 0
        self._inside = threading.Lock()

    def _refuse(self, why: str) -> bool:
        self.engine.logger.log(ILogger.ERROR, why)
        return False

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        if self.engine.library.cuda.stream(stream) is None or not 0 <= index < self.engine.num_optimization_profiles:
            return self._refuse(f"no profile {index}, or no stream {stream}")
        self.profile, self.shapes, self.warm = index, {}, False
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = (address, size)

    def set_input_shape(self, name: str, shape: Shape) -> bool:
        if name not in self.engine.inputs:
            return self._refuse(f"{name} is no input")
        least, _, most = self.engine.facts["profiles"][self.profile][name]
        if not all(a <= x <= b for a, x, b in zip(least, shape, most, strict=True)):
            return self._refuse(f"{name} of {shape} lies outside of profile {self.profile}")
        self.warm = self.warm and self.shapes.get(name) == shape
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        if name not in self.engine.names or address % 256 or address < GPU:
            return self._refuse(f"{name} at {address:#x}: not aligned, or not on the GPU")
        self.addresses[name] = address
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine.inputs if name not in self.shapes]

    def get_tensor_shape(self, name: str) -> Shape:
        if name in self.shapes:
            return self.shapes[name]
        batch, width = self.shapes[contract.INPUT_IDS]
        sizes = {0: batch, 1: self.shapes[contract.LOGIT_ROWS][1]}
        if name.startswith("new_"):
            sizes = {0: batch, 2: width}
        return tuple(sizes[i] if axis == -1 else axis for i, axis in enumerate(self.engine.outputs[name]))

    def execute_async_v3(self, handle: int) -> bool:
        if not self._inside.acquire(blocking=False):
            self.engine.library.cuda.violations.append("a context was used by two threads at once")
            return self._refuse("in use")
        try:
            time.sleep(1e-5)  # lets a second thread in, if there is one
            return self._enqueue(handle)
        finally:
            self._inside.release()

    def _enqueue(self, handle: int) -> bool:
        cuda = self.engine.library.cuda
        stream = cuda.stream(handle)
        if stream is None:
            return self._refuse("no such stream")
        if self.infer_shapes() or set(self.addresses) != set(self.engine.names):
            return self._refuse("shapes and addresses come before execution")
        for name in self.engine.names:
            alias = getattr(self.engine, "get_aliased_input_tensor", lambda _: None)(name)
            if alias is not None and self.addresses[name] != self.addresses[alias]:
                return self._refuse(f"{name} must have the address of {alias}")
        needed = self.engine.get_device_memory_size_for_profile_v2(self.profile)
        if self.strategy is not Strategy.USER_MANAGED or self.memory[1] < needed or self.memory[0] % 256:
            return self._refuse(f"{needed} bytes of device memory are needed, {self.memory[1]} were given")
        if stream.captured is not None and (not self.warm or self.captures):
            stream.invalid = True
            return self._refuse("what is set up on first use cannot be captured")
        self.warm = True
        shapes = {name: self.get_tensor_shape(name) for name in self.engine.names}
        addresses, memory = dict(self.addresses), self.memory
        stream.put(lambda: self._compute(shapes, addresses, memory))
        return True

    def _compute(self, shapes: dict[str, Shape], addresses: dict[str, int], memory: tuple[int, int]) -> None:
        engine, cuda = self.engine, self.engine.library.cuda
        self.executions += 1
        engine.library.hook(self)
        scratch = cuda.view(*memory)
        if scratch is None:
            cuda.violations.append("scratch memory was freed while a context or a graph has its address")
            return
        scratch[:] = self.executions % 251
        arrays = {}
        for name in engine.names:
            kind = np.dtype(engine.kinds[name][1])
            view = cuda.view(addresses[name], int(np.prod(shapes[name])) * kind.itemsize)
            if view is None:
                cuda.violations.append(f"{name} lies outside of what was allocated")
                return
            arrays[name] = view.view(kind).reshape(shapes[name])
        self._run_graph(arrays)

    def _run_graph(self, arrays: dict[str, np.ndarray]) -> None:
        engine, cuda = self.engine, self.engine.library.cuda
        starts, width = arrays[contract.WRITE_INDEX], arrays[contract.INPUT_IDS].shape[1]
        past = {name: arrays[name] for name in engine.inputs if name.startswith("past_")}
        capacity = next((a.shape[2] for a in past.values()), 1 << 30)
        if starts.min() < 0 or starts.max() + width > capacity:
            cuda.violations.append(f"a pass of {width} at {starts} leaves a cache of {capacity}")
            return
        if engine.facts["append"]:
            past = {name: array.copy() for name, array in past.items()}
        binding = engine.session.io_binding()
        for name in engine.inputs:
            _bind(binding.bind_input, name, past.get(name, arrays[name]))
        for output in engine.session.get_outputs():
            name = output.name
            target = past[name.replace("present_", "past_")] if name.startswith("present_") else arrays[name]
            _bind(binding.bind_output, name, target)
        engine.session.run_with_iobinding(binding)
        for name in [n for n in arrays if n.startswith("new_") and engine.facts["append"]]:
            written = past[name.replace("new_", "past_")]
            for row, start in enumerate(starts):
                arrays[name][row] = written[row, :, start : start + width]
        if engine.facts["top"]:
            largest(arrays, engine.facts["vocab"])


def largest(arrays: dict[str, np.ndarray], vocab: int) -> None:
    """Fill in the largest logits as a GPU may: ties in the worst order, and the wrong ones of them at the edge."""
    known = arrays[contract.LOGITS][..., :vocab]
    count = arrays[contract.TOP_IDS].shape[-1]
    for at in np.ndindex(*known.shape[:-1]):
        row = np.ascontiguousarray(known[at])
        ids = np.lexsort((-np.arange(vocab), -row))[:count]  # the higher id first
        arrays[contract.TOP_IDS][at] = ids
        arrays[contract.TOP_VALUES][at] = row[ids] if np.isfinite(row).all() else np.nan
        with np.errstate(invalid="ignore"):
            arrays[contract.LOG_SUM][at] = np.log(np.exp(row - row.max()).sum())


def _bind(bind: Any, name: str, array: np.ndarray) -> None:
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

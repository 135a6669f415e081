"""Execution contexts: one for each pass, with a profile, shapes and addresses that are set once."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from ..cuda import Device
from ..errors import EngineError
from .buffers import scratch
from .network import Log

__all__ = ["Context", "choose_profile", "dropped"]

Shape = tuple[int, ...]
Ranges = dict[str, tuple[Shape, Shape]]  # least and largest shape of every input


def choose_profile(engine: Any, shapes: Mapping[str, Shape], name: str) -> int:
    """Return the first profile of ``engine`` that holds ``shapes``, the inputs' by name.

    Raises:
        EngineError: none does; says what they hold.
    """
    profiles = [_ranges(engine, i, shapes) for i in range(engine.num_optimization_profiles)]
    for index, ranges in enumerate(profiles):
        if all(_within(shapes[tensor], *bounds) for tensor, bounds in ranges.items()):
            return index
    wanted = next(iter(shapes))
    held = ", ".join(f"{least} to {most}" for ranges in profiles for least, most in [ranges[wanted]])
    raise EngineError(
        f"engine {name}: no profile of its plan holds {wanted} of {shapes[wanted]}, they hold {held}; "
        "build it for larger batches with `kvrelay build --max-batch`"
    )


def _ranges(engine: Any, profile: int, shapes: Mapping[str, Shape]) -> Ranges:
    found: Ranges = {}
    for name in shapes:
        static = tuple(engine.get_tensor_shape(name))
        if -1 in static:
            least, _, most = engine.get_tensor_profile_shape(name, profile)
            found[name] = (tuple(least), tuple(most))
        else:
            found[name] = (static, static)
    return found


def _within(shape: Shape, least: Shape, most: Shape) -> bool:
    return len(shape) == len(least) and all(a <= x <= b for a, x, b in zip(least, shape, most, strict=True))


class Context:
    """One execution context, ready to run.

    A captured graph goes on using its context, so none is shared between passes. Their scratch memory is, since all
    of them run on the device's stream. Not thread-safe: a pass has one, and a pass runs in one thread at a time.

    Args:
        library: the module ``tensorrt`` or ``tensorrt_rtx``.
        engine: its engine.
        log: what the library says.
        name: of the engine, for messages.
        inputs: shapes of the inputs by name.
        outputs: shapes of the outputs by name, to be compared.
        addresses: of all tensors by name.
        graphs: TensorRT-RTX captures the pass itself; TensorRT leaves that to the caller.

    Raises:
        EngineError: the library refuses a shape or an address, or computes other output shapes.
    """

    def __init__(
        self,
        library: Any,
        engine: Any,
        log: Log,
        name: str,
        *,
        inputs: Mapping[str, Shape],
        outputs: Mapping[str, Shape],
        addresses: Mapping[str, int],
        graphs: bool,
    ) -> None:
        self._library = library
        self._log = log
        self._name = name
        self._engine = engine  # outlives its contexts
        self._stream = Device.current().stream
        log.begin(library)
        self.profile = choose_profile(engine, inputs, name)
        self.captures_itself = hasattr(library, "CudaGraphStrategy")
        self._context = _new_context(library, engine, graphs=graphs)
        self._require(self._context is not None, "cannot make an execution context")
        weakref.finalize(self, Device.current().retire, dropped, self._context, f"a context of {name}")
        switched = self._context.set_optimization_profile_async(self.profile, self._stream.handle)
        self._require(switched, f"cannot use its profile {self.profile}")
        size = int(engine.get_device_memory_size_for_profile_v2(self.profile))
        self._scratch = scratch("activations", size)
        self._context.set_device_memory(self._scratch.address, self._scratch.size)
        for tensor, shape in inputs.items():
            self._require(self._context.set_input_shape(tensor, shape), f"refuses {tensor} of shape {shape}")
        for tensor, address in addresses.items():
            self._require(self._context.set_tensor_address(tensor, address), f"refuses the address of {tensor}")
        self._check_shapes(outputs)

    def _check_shapes(self, outputs: Mapping[str, Shape]) -> None:
        try:
            missing = self._context.infer_shapes()
        except RuntimeError as error:
            raise EngineError(f"engine {self._name} cannot infer its shapes: {error}") from None
        self._require(not missing, f"lacks the shapes of {missing}")
        for tensor, shape in outputs.items():
            found = tuple(self._context.get_tensor_shape(tensor))
            if found != shape:
                raise EngineError(f"engine {self._name}: {tensor} comes out as {found}, the bundle says {shape}")

    def queue(self) -> None:
        """Queue one run on the device's stream.

        Raises:
            EngineError: the library refuses.
        """
        self._log.begin(self._library)
        self._require(self._context.execute_async_v3(self._stream.handle), "did not run")

    def _require(self, done: bool, what: str) -> None:
        if not done:
            raise EngineError(f"engine {self._name} {what}: {self._log.first_error()}")


def _new_context(library: Any, engine: Any, *, graphs: bool) -> Any:
    managed = library.ExecutionContextAllocationStrategy.USER_MANAGED
    if not hasattr(library, "CudaGraphStrategy"):
        return engine.create_execution_context(managed)
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(managed)
    strategy = library.CudaGraphStrategy
    config.cuda_graph_strategy = strategy.WHOLE_GRAPH_CAPTURE if graphs else strategy.DISABLED
    # Kernels for a shape are compiled before its first run: by default others serve meanwhile, and bits change later.
    eager = library.DynamicShapesKernelSpecializationStrategy.EAGER
    config.dynamic_shapes_kernel_specialization_strategy = eager
    return engine.create_execution_context(config)


def dropped(_: Any) -> tuple[int]:
    """Give up an object of the library, which frees GPU memory: its last reference goes when this returns."""
    return (0,)

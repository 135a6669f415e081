"""Build the plans of a bundle: everything is parsed and checked before the first minute of building."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..boxcache import cache_directory, lock
from ..bundle import Bundle
from ..dialects import dialects_of
from ..errors import CacheDirectoryError, PlanError
from ..manifest import EngineEntry, ModelEntry
from .device import free_memory, plan_devices
from .interruptible import Interruptible
from .library import Backend, tensorrt
from .memory import Memory, predict_memory, refuse_if_too_large
from .network import Log, Parsed, parse_network
from .plans import FOLDER, Plan, PlanKey, key_of, publish_plan, read_plan, stored_plan
from .timing import TimingCache

__all__ = ["Build", "Built", "Progress"]

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Built:
    """A plan, and what making it took."""

    entry: EngineEntry
    plan: Plan
    seconds: float = 0.0  # 0 for a plan that was there
    remarks: tuple[str, ...] = ()  # what the library said while it built


class Build:
    """The building of a bundle's plans for one kind of device.

    Args:
        bundle: the bundle.
        backend: the library.
        devices: "current", or compute capabilities ("sm86,sm89") for TensorRT-RTX.
        max_batch: most rows of a pass of an engine with a dynamic batch.
        progress: told what is going on.

    Raises:
        PlanError: the library cannot take the bundle's dialect.
        BackendMissingError: the library, a driver or a GPU is missing.
        ParameterError: the library does not build for a device.
        CacheDirectoryError: no folder for the box's cache can be written.
    """

    def __init__(
        self,
        bundle: Bundle,
        backend: Backend = "tensorrt",
        devices: str = "current",
        *,
        max_batch: int = 8,
        progress: Progress = lambda _: None,
    ) -> None:
        self._trt: Any = tensorrt(backend)
        _refuse_dialects(self._trt, backend, bundle)
        self.bundle = bundle
        self.device = plan_devices(backend, devices)
        self.max_batch = max_batch
        self._here = devices == "current"
        self._progress = progress
        self._folder = cache_directory(bundle.path) / FOLDER
        with _explained(self._folder):
            self._folder.mkdir(exist_ok=True)

    def missing(self) -> list[EngineEntry]:
        """Return the engines that have no whole plan yet."""
        return [e for e in self.bundle.manifest.engines if self._whole_plan(e, lambda _: None) is None]

    def examine(self, entry: EngineEntry) -> Memory:
        """Parse and check the graph of ``entry``; return what its plan will need.

        Raises:
            PlanError: the graph or its network is not what may be built.
            MemoryBudgetError: it would not fit on the GPU that is built for, where that is this one.
        """
        self._progress(f"checking {entry.name}")
        log = Log()
        parsed = self._parsed(self._trt.Builder(log.logger(self._trt)), log, entry)
        memory = predict_memory(self._trt, parsed.network, entry, self._model(entry), self._key(entry).profiles)
        if self._here:
            refuse_if_too_large(entry.name, memory, *free_memory(self.device.backend))
        return memory

    def build(self, entry: EngineEntry) -> Built:
        """Return the plan of ``entry``, built unless it is there. One process builds at a time, others wait for it.

        A failed, interrupted or killed build leaves nothing that loads.

        Raises:
            PlanError: the build failed; says where.
            CacheDirectoryError: the plan cannot be written.
            KeyboardInterrupt: once the library has stopped.
        """
        with self._alone():
            plan = self._whole_plan(entry, self._progress)
            if plan is not None:
                return Built(entry, plan)
            start = time.perf_counter()
            self._progress(f"building {entry.name}")
            log = Log()
            data = Interruptible(lambda run: self._serialized(entry, log, run)).result()
            plan = publish_plan(self._folder, entry, self._key(entry), data)
            return Built(entry, plan, time.perf_counter() - start, log.remarks())

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        return lock(self._folder, lambda: self._progress("waiting for another build of this bundle"))

    def _whole_plan(self, entry: EngineEntry, progress: Progress) -> Plan | None:
        plan = stored_plan(self._folder, entry, self._key(entry))
        if plan is not None:
            try:
                read_plan(plan)
            except PlanError as error:
                progress(f"building anew: {error}")
                return None
        return plan

    def _serialized(self, entry: EngineEntry, log: Log, run: Interruptible[Any]) -> Any:
        """Return the library's plan of ``entry``."""
        trt = self._trt
        builder = trt.Builder(log.logger(trt))
        parsed = self._parsed(builder, log, entry)
        config = builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)  # a product in fp32 is what the manifest says it is
        if self.device.backend == "tensorrt-rtx":
            config.num_compute_capabilities = len(self.device.compute_capabilities)
            for i, name in enumerate(self.device.compute_capabilities):
                config.set_compute_capability(getattr(trt.ComputeCapability, name.upper()), i)
        config.progress_monitor = _monitor(trt, entry.name, run, self._progress)
        timing = TimingCache(self._folder, self.device)
        timing.load(config)
        if entry.batch is None:
            for profile in self._key(entry).profiles:
                refused = f"{entry.name}: the profile {profile.name} is refused"
                made = builder.create_optimization_profile()
                for name, bounds in profile.shapes(entry, self._model(entry)).items():
                    try:
                        made.set_shape(name, *bounds)
                    except (RuntimeError, TypeError):  # sizes that the library cannot count to
                        sizes = f"{name} of {bounds[0]} to {bounds[-1]}"
                        raise PlanError(f"{refused}: {sizes}; build with a smaller --max-batch") from None
                if config.add_optimization_profile(made) < 0:
                    raise PlanError(f"{refused}: {log.first_error()}")
        data = builder.build_serialized_network(parsed.network, config)
        if data is None or not data.nbytes:
            raise PlanError(f"{entry.name}: {self.device} could not build it: {log.first_error()}")
        log.refuse_unused(entry.name)
        timing.save(config)
        return data

    def _parsed(self, builder: Any, log: Log, entry: EngineEntry) -> Parsed:
        graph = self.bundle.path / entry.file.path
        return parse_network(self._trt, builder, log, graph, entry, self._model(entry))

    def _model(self, entry: EngineEntry) -> ModelEntry:
        return self.bundle.manifest.models[entry.model]

    def _key(self, entry: EngineEntry) -> PlanKey:
        return key_of(entry, self.bundle, self.device, self.max_batch)


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Say of a folder that cannot be used what to do about it."""
    try:
        yield
    except OSError as error:
        raise CacheDirectoryError(
            f"plans cannot be written to {folder}: {error.strerror or error}; make it a writable folder, or set "
            "KVRELAY_CACHE to another"
        ) from None


def _refuse_dialects(trt: Any, backend: Backend, bundle: Bundle) -> None:
    """Raise if the library cannot take the bundle's graphs.

    Raises:
        PlanError: names the export that it can take.
    """
    usable = dialects_of(backend, trt.__version__)
    other = sorted({e.dialect for e in bundle.manifest.engines} - set(usable))
    if other:
        raise PlanError(
            f"{bundle.path} is of dialect {', '.join(other)}, {trt.__name__} {trt.__version__} takes "
            f"{' and '.join(usable)}: on a workstation run "
            f"`kvrelay export {bundle.target.source} --dialect {usable[0]} --output {bundle.path}-{usable[0]}`"
        )


def _monitor(trt: Any, engine: str, run: Interruptible[Any], progress: Progress) -> Any:
    """Return the library's progress monitor, which tells ``progress`` and stops the build of a cancelled ``run``.

    What ``progress`` raises cannot pass through the library: it ends the build and is raised afterwards.
    """

    def tell(line: str) -> None:
        try:
            progress(line)
        except BaseException as error:
            run.cancel(error)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self._steps[name] = steps
            tell(f"building {engine}: {name}")

        def step_complete(self, name: str, step: int) -> bool:
            tell(f"building {engine}: {name} {step + 1}/{self._steps.get(name, 0)}")
            return not run.cancelled

        def phase_finish(self, name: str) -> None:
            self._steps.pop(name, None)

    return Monitor()

"""Load a bundle's engines at a place: one copy of each for the whole process."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from .bundle import Bundle
from .dialects import refusal
from .engine import LoadedEngine
from .errors import EngineError
from .identity import library_version
from .manifest import EngineEntry
from .ort import OrtEngine
from .ort.prepared import prepare
from .ort.tensorrt_options import tensorrt_engine_folder
from .place import Place
from .trt.device import this_device
from .trt.library import tensorrt
from .trt.plans import find_plan

__all__ = ["Loader"]

_loaded: WeakValueDictionary[tuple[str, str, str, Place], LoadedEngine] = WeakValueDictionary()
_loading = threading.Lock()


class Loader:
    """Loads engines and keeps them loaded for as long as it is in use itself.

    Args:
        bundle: the bundle.
        place: where they run.
        cache: the bundle's folder in the box's cache.
        max_batch: most rows of a pass of an engine with a dynamic batch.
        progress: told what takes long.
    """

    def __init__(
        self, bundle: Bundle, place: Place, cache: Path, max_batch: int, progress: Callable[[str], None]
    ) -> None:
        self._bundle = bundle
        self._place = place
        self._cache = cache
        self._max_batch = max_batch
        self._progress = progress
        self._engines: dict[str, tuple[LoadedEngine, str]] = {}

    def engine(self, entry: EngineEntry) -> LoadedEngine:
        """Return the engine of ``entry``.

        Raises:
            EngineError: the backend refuses it, or cannot run its dialect.
            PlanError: TensorRT has no plan for it.
        """
        return self._load(entry)[0]

    def sha256(self, entry: EngineEntry) -> str:
        """Return the digest of what runs: of the engine's file or, where it was compiled for the box, of that."""
        return self._load(entry)[1]

    def _load(self, entry: EngineEntry) -> tuple[LoadedEngine, str]:
        with _loading:
            if entry.name not in self._engines:  # else whatever became of the files since
                if (why := refusal(entry.dialect, self._place.backend, library_version(self._place))) is not None:
                    raise EngineError(f"engine {entry.name}: {why}")
                load = self._load_ort if self._place.backend == "onnxruntime" else self._load_plan
                self._engines[entry.name] = load(entry)
            return self._engines[entry.name]

    def _load_ort(self, entry: EngineEntry) -> tuple[LoadedEngine, str]:
        source = self._bundle.path / entry.file.path
        if self._place.on_gpu:
            return self._load_ort_on_gpu(entry, source)
        file = prepare(source, entry.file.sha256, self._cache)

        def load() -> LoadedEngine:
            try:
                return OrtEngine(entry, file, prepared=True)
            except EngineError as error:
                raise EngineError(f"{error}; if the box's cache is damaged, delete {file.parent}") from None

        return self._once(file, entry, entry.file.sha256, load), entry.file.sha256

    def _load_ort_on_gpu(self, entry: EngineEntry, file: Path) -> tuple[LoadedEngine, str]:
        from .ort.gpu import OrtGpu  # loads CUDA's bindings

        model = self._bundle.manifest.models[entry.model]
        gpu = OrtGpu(self._place.providers, self._cache, model, self._max_batch, self._progress)
        load = partial(OrtEngine, entry, file, prepared=False, gpu=gpu)
        engine = self._once(file, entry, entry.file.sha256, load)
        compiled = sorted(tensorrt_engine_folder(entry, self._cache).glob("*.engine"))
        if "tensorrt" not in self._place.providers or not compiled:
            return engine, entry.file.sha256
        digest = hashlib.sha256()
        for part in compiled:
            digest.update(part.read_bytes())
        return engine, digest.hexdigest()

    def _load_plan(self, entry: EngineEntry) -> tuple[LoadedEngine, str]:
        from .trt.engine import TrtEngine  # loads CUDA's bindings

        backend = self._place.trt_backend
        plan = find_plan(self._bundle, entry, this_device(backend), self._max_batch)
        model = self._bundle.manifest.models[entry.model]
        load = partial(TrtEngine, entry, model, plan, tensorrt(backend))
        return self._once(plan.path, entry, plan.sha256, load), plan.sha256

    def _once(self, file: Path, entry: EngineEntry, sha256: str, load: Callable[[], LoadedEngine]) -> LoadedEngine:
        key = (str(file.resolve()), sha256, entry.name, self._place)
        engine = _loaded.get(key)
        if engine is None:
            self._progress(f"loading {entry.name}")
            engine = _loaded[key] = load()
        return engine

"""Load a bundle's engines at a place: one copy of each for the whole process."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Source:
    """Where an engine comes from."""

    file: Path
    sha256: str
    load: Callable[[], LoadedEngine]
    compiled: Callable[[], str | None] = lambda: None  # digest of what a provider made of the file for this box


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
            if entry.name in self._engines:  # whatever became of the files since
                return self._engines[entry.name]
            if (why := refusal(entry.dialect, self._place.backend, library_version(self._place))) is not None:
                raise EngineError(f"engine {entry.name}: {why}")
            source = self._source_of(entry)
            key = (str(source.file.resolve()), source.sha256, entry.name, self._place)
            known = key in _loaded
        if not known:
            self._progress(f"loading {entry.name}")  # without the lock, which what it uses may need
        with _loading:
            engine = _loaded.get(key)
            if engine is None:
                engine = _loaded[key] = source.load()
            self._engines[entry.name] = engine, source.compiled() or source.sha256
            return self._engines[entry.name]

    def _source_of(self, entry: EngineEntry) -> _Source:
        file = self._bundle.path / entry.file.path
        if self._place.backend != "onnxruntime":
            return self._plan(entry)
        if self._place.on_gpu:
            return self._file_on_gpu(entry, file)
        prepared = prepare(file, entry.file.sha256, self._cache)

        def load() -> LoadedEngine:
            try:
                return OrtEngine(entry, prepared, prepared=True)
            except EngineError as error:
                raise EngineError(f"{error}; if the box's cache is damaged, delete {prepared.parent}") from None

        return _Source(prepared, entry.file.sha256, load)

    def _file_on_gpu(self, entry: EngineEntry, file: Path) -> _Source:
        from .ort.gpu import OrtGpu  # loads CUDA's bindings

        model = self._bundle.manifest.models[entry.model]
        gpu = OrtGpu(self._place.providers, self._cache, model, self._max_batch, self._progress)

        def compiled() -> str | None:
            parts = sorted(tensorrt_engine_folder(entry, self._cache).glob("*.engine"))
            if "tensorrt" not in self._place.providers or not parts:
                return None
            digest = hashlib.sha256()
            for part in parts:
                digest.update(part.read_bytes())
            return digest.hexdigest()

        load = partial(OrtEngine, entry, file, prepared=False, gpu=gpu)
        return _Source(file, entry.file.sha256, load, compiled)

    def _plan(self, entry: EngineEntry) -> _Source:
        from .trt.engine import TrtEngine  # loads CUDA's bindings

        backend = self._place.trt_backend
        plan = find_plan(self._bundle, entry, this_device(backend), self._max_batch)
        model = self._bundle.manifest.models[entry.model]
        return _Source(plan.path, plan.sha256, partial(TrtEngine, entry, model, plan, tensorrt(backend)))

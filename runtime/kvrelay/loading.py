"""Load a bundle's engines at a place: one copy of each for the whole process."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """Where an engine is loaded from."""

    file: Path
    sha256: str
    load: Callable[[], LoadedEngine]
    compiled: Callable[[], str] = str  # digest of what was compiled while it was loaded, empty if nothing was
    notes: list[str] = field(default_factory=list)  # what is to be told about it, afterwards


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
            if entry.name in self._engines:
                return self._engines[entry.name]  # whatever became of the files since
            if (why := refusal(entry.dialect, self._place.backend, library_version(self._place))) is not None:
                raise EngineError(f"engine {entry.name}: {why}")
            source = self._source(entry)
            key = (str(source.file.resolve()), source.sha256, entry.name, self._place)
            known = key in _loaded
        if not known:
            self._progress(f"loading {entry.name}")  # without the lock, which what it uses may need
        with _loading:
            engine = _loaded.get(key)
            if engine is None:
                engine = _loaded[key] = source.load()
            self._engines[entry.name] = (engine, source.compiled() or source.sha256)
        for note in source.notes:
            self._progress(note)
        return self._engines[entry.name]

    def _source(self, entry: EngineEntry) -> _Source:
        file, sha256 = self._bundle.path / entry.file.path, entry.file.sha256
        if self._place.backend != "onnxruntime":
            return self._plan(entry)
        if self._place.on_gpu:
            return self._session_on_gpu(entry, file)
        file = prepare(file, sha256, self._cache)

        def load() -> LoadedEngine:
            try:
                return OrtEngine(entry, file, prepared=True)
            except EngineError as error:
                raise EngineError(f"{error}; if the box's cache is damaged, delete {file.parent}") from None

        return _Source(file, sha256, load)

    def _session_on_gpu(self, entry: EngineEntry, file: Path) -> _Source:
        from .ort.gpu import OrtGpu  # loads CUDA's bindings

        notes: list[str] = []
        model = self._bundle.manifest.models[entry.model]
        gpu = OrtGpu(self._place.providers, self._cache, model, self._max_batch, notes.append)

        def compiled() -> str:
            """Return the digest of what the TensorRT provider compiled, empty without one."""
            parts = sorted(tensorrt_engine_folder(entry, self._cache).glob("*.engine"))
            digest = hashlib.sha256()
            for part in parts:
                digest.update(part.read_bytes())
            return digest.hexdigest() if parts and "tensorrt" in self._place.providers else ""

        load = partial(OrtEngine, entry, file, prepared=False, gpu=gpu)
        return _Source(file, entry.file.sha256, load, compiled, notes)

    def _plan(self, entry: EngineEntry) -> _Source:
        from .trt.engine import TrtEngine  # loads CUDA's bindings

        backend = self._place.trt_backend
        plan = find_plan(self._bundle, entry, this_device(backend), self._max_batch)
        model = self._bundle.manifest.models[entry.model]
        return _Source(plan.path, plan.sha256, partial(TrtEngine, entry, model, plan, tensorrt(backend)))

"""What this box knows about a bundle's engines: their shape classes and their costs, found once and stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from .boxcache import cache_directory
from .bundle import Bundle
from .costs import Pattern, engine_costs, measure
from .engine import BoundPass, LoadedEngine
from .errors import ParameterError
from .facts import Facts
from .findings import Findings
from .identity import identity_of
from .invariance import Verdict, check_shapes
from .kv import KVCache
from .loading import Loader
from .manifest import EngineEntry
from .ort import use_threads
from .place import HOST, Place
from .shapes import Shape

__all__ = ["Box", "boxes"]

Progress = Callable[[str], None]

_telling = threading.local()  # .now: this thread is in a progress function


class Box:
    """Loads a bundle's engines on this box and measures them on first use.

    Args:
        bundle: the bundle.
        threads: thread count of the process, None for the one in force.
        progress: told what takes long; may use what is open, but open nothing.
        place: where the engines run.
        max_batch: most rows of a pass of an engine with a dynamic batch.

    Raises:
        ParameterError: it is opened in a progress function.
        BackendMissingError: the backend is not installed.
        CudaError: a GPU is wanted and there is none.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int | None,
        progress: Progress = lambda _: None,
        place: Place = HOST,
        max_batch: int = 1,
    ) -> None:
        if getattr(_telling, "now", False):
            # The cache's lock may be held, for which this one would wait for ever.
            raise ParameterError(
                f"{bundle.path} is opened in a progress function, while another bundle is being opened: "
                "open it before or afterwards"
            )
        self.bundle = bundle
        self.place = place
        self.threads = _threads(place, threads)
        self.identity = identity_of(place)
        self._progress = partial(_tell, progress)
        self._cache: Path = cache_directory(bundle.path)
        self.findings = Findings(self._cache, (*self.identity.key(), str(self.threads)), self._progress)
        self._loader = Loader(bundle, place, self._cache, max_batch, self._progress)

    def engine(self, entry: EngineEntry) -> LoadedEngine:
        """Return the loaded engine of ``entry``; one copy for all boxes of the process."""
        return self._loader.engine(entry)

    def sha256(self, entry: EngineEntry) -> str:
        """Return the digest of what runs for ``entry``: its file or, compiled for this box, that."""
        return self._loader.sha256(entry)

    def key(self, shape: Shape) -> str:
        """Return the name under which findings about ``shape`` are stored: compiled anew, it is another shape."""
        return shape.name + self._compiled(shape.engine.entry)

    def _compiled(self, entry: EngineEntry) -> str:
        digest = self.sha256(entry)
        return "" if digest == entry.file.sha256 else f"-{digest[:12]}"

    def cache(self, entry: EngineEntry, slots: int = 1) -> KVCache:
        """Return a new cache of the model and the dtype of ``entry``, where its engine is bound to it."""
        model = self.bundle.manifest.models[entry.model]
        return KVCache(model, range(model.layers), entry.kv_dtype, slots, self.place.memory)

    def facts(self, precision: str, drafts: list[EngineEntry], draft_box: Box | None = None) -> Facts:
        """Return the facts about ``precision`` with these drafts, measured if they are not stored.

        Args:
            precision: of the target.
            drafts: engines that propose.
            draft_box: the box that they run on, None for this one.

        Raises:
            EngineError: an engine gives values that cannot be compared.
        """
        draft_box = draft_box or self
        verify = self.bundle.verify_engines(precision)
        prefill = self.bundle.engine("prefill", precision)
        decode = self.bundle.engine("decode", precision)
        steps = self.bundle.engines(role="step", precision=precision)
        verdicts = self.verdicts(precision, [self.shape(e) for e in (*verify, prefill, decode, *steps)])
        outside = {name: verdict.outside for name, verdict in verdicts.items()}

        def missing(stored: dict[str, Any]) -> dict[str, Any]:
            wanted = {e.name for e in drafts} - set(stored.get("draft_ms", {}))
            if stored and not wanted:
                return {}
            self._progress("first use on this box: measuring what each engine costs")
            caches: dict[tuple[str, str, str], KVCache] = {}
            bind, bind_draft = partial(self._bind, caches), partial(draft_box._bind, caches)
            return engine_costs(verify, decode, steps, drafts, bind, bind_draft, self._capacity)

        def read(stored: dict[str, Any]) -> Facts:
            return Facts(
                outside=outside,
                plain_ms=float(stored["plain_ms"]),
                step_ms=float(stored["step_ms"]),
                verify_ms={int(n): float(t) for n, t in stored["verify_ms"].items()},
                verify_after_draft_ms={int(n): float(t) for n, t in stored["verify_after_draft_ms"].items()},
                draft_ms={n: float(t) for n, t in stored["draft_ms"].items()},
                draft_width={n: int(w) for n, w in stored["draft_width"].items()},
            )

        kind = "costs" if draft_box is self else f"costs-with-{draft_box.findings.key}"
        return self.findings.completed(kind, precision, missing, read)

    def shape(self, entry: EngineEntry, batch: int = 1, width: int = 1, rows: int = 1) -> Shape:
        """Return a shape of ``entry``; one with fixed axes has its own."""
        fixed = (entry.batch, entry.sequence, entry.rows)
        if fixed[0] is not None and fixed[1] is not None and fixed[2] is not None:
            batch, width, rows = fixed[0], fixed[1], fixed[2]
        return Shape(self.engine(entry), batch, width, rows)

    def reference(self, precision: str) -> Shape:
        """Return the shape that the invariance check compares with: the widest verify shape of one row."""
        singles = self.bundle.verify_engines(precision)
        return self.shape(max(singles, key=lambda e: e.sequence or 0))

    def verdicts(self, precision: str, shapes: Sequence[Shape], *, again: bool = False) -> dict[str, Verdict]:
        """Return the invariance check's verdicts by shape name; shapes without a stored one are checked.

        Args:
            precision: of the target.
            shapes: what to check.
            again: check those with a stored verdict too.

        Raises:
            EngineError: an engine gives values that cannot be compared.
            MemoryBudgetError: there is no room to check the largest batch.
        """

        reference = self.reference(precision)

        def missing(stored: dict[str, Any]) -> dict[str, Any]:
            new = [s for s in shapes if again or self.key(s) not in stored]
            if not new:
                return {}
            when = "" if again else "first use on this box: "
            self._progress(f"{when}checking {len(new)} shapes of the {precision} engines bit for bit")
            found = check_shapes(self.bundle.target, new, reference, self._progress)
            return {self.key(s): asdict(found[s.name]) for s in new}

        def read(stored: dict[str, Any]) -> dict[str, Verdict]:
            return {s.name: Verdict(**stored[self.key(s)]) for s in shapes}

        # What it was compared with, where that was compiled for this box, is a part of each verdict.
        kind = "shapes" + self._compiled(reference.engine.entry)
        return self.findings.completed(kind, precision, missing, read)

    def batch_ms(self, precision: str, shapes: Sequence[Shape]) -> dict[str, float]:
        """Return the milliseconds of one run by shape name; shapes without a stored figure are measured."""

        def missing(stored: dict[str, Any]) -> dict[str, Any]:
            new = [s for s in shapes if s.name not in stored]
            if not new:
                return {}
            self._progress(f"first use on this box: measuring {len(new)} shapes of the {precision} engines")
            caches: dict[tuple[str, str], KVCache] = {}
            slots = max(s.batch for s in new)
            patterns = {}
            for s in new:
                entry = s.engine.entry
                if (entry.model, entry.kv_dtype) not in caches:
                    caches[entry.model, entry.kv_dtype] = self.cache(entry, slots)
                cache = caches[entry.model, entry.kv_dtype]
                bound = s.engine.bind(cache, s.width, s.rows, batch=s.batch)
                patterns[s.name] = Pattern(bound, bound)
            return dict(measure(patterns, self._capacity))

        def read(stored: dict[str, Any]) -> dict[str, float]:
            return {s.name: float(stored[s.name]) for s in shapes}

        return self.findings.completed("batch-costs", precision, missing, read)

    def _bind(self, caches: dict[tuple[str, str, str], KVCache], entry: EngineEntry, width: int) -> BoundPass:
        """Bind one row of ``entry`` to the cache of its kind among ``caches``, which is made if it is missing."""
        key = (entry.model, entry.kv_dtype, self.place.memory)
        if key not in caches:
            caches[key] = self.cache(entry)
        return self.engine(entry).bind(caches[key], width, entry.rows or 1)

    @property
    def _capacity(self) -> int:
        """Entries that a slot holds in the cache of every model."""
        return min(model.capacity for model in self.bundle.manifest.models.values())


def boxes(
    bundle: Bundle, threads: int | None, progress: Progress, place: Place, draft_place: Place, max_batch: int = 1
) -> tuple[Box, Box]:
    """Return the box of the target and that of drafts: the same one where they run at the same place.

    Raises:
        ParameterError: ``threads`` is given, and neither place has a thread pool.
    """
    if draft_place == place:
        box = Box(bundle, threads, progress, place, max_batch)
        return box, box
    both = (place, draft_place)
    pooled = [p.backend == "onnxruntime" for p in both]
    counts = [threads if own or not any(pooled) else None for own in pooled]
    target, draft = (Box(bundle, n, progress, p, max_batch) for n, p in zip(counts, both, strict=True))
    return target, draft


def _threads(place: Place, threads: int | None) -> int:
    """Return the thread count of passes at ``place``: TensorRT is driven by one thread and has no pool to set.

    Raises:
        ParameterError: ``threads`` is given where it means nothing.
        ThreadCountError: the process already runs its engines with another count.
    """
    if place.backend == "onnxruntime":
        return use_threads(threads)
    if threads is not None:
        raise ParameterError(f"threads={threads!r}: engines on {place} have no thread pool, leave it out")
    return 1


def _tell(progress: Progress, line: str) -> None:
    _telling.now = True
    try:
        progress(line)
    finally:
        _telling.now = False

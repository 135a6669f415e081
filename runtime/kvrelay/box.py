"""What this box knows about a bundle's engines: their shape classes and their costs, found once and stored."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from .boxcache import cache_directory, cpu_identity, lock, publish_json, read_json
from .bundle import Bundle
from .classes import Shape, find_class
from .costs import Pattern, measure
from .engine import BoundPass, Engine
from .errors import EngineError, ExactnessError
from .kv import KVCache
from .manifest import EngineEntry
from .ort import OrtEngine, use_threads
from .ort.library import onnxruntime
from .ort.prepared import prepare

__all__ = ["Box", "Facts"]

Progress = Callable[[str], None]
_STEP_WIDTHS = (1, 2, 4)

_loaded: WeakValueDictionary[tuple[str, str], OrtEngine] = WeakValueDictionary()
_loading = threading.Lock()


@dataclass(frozen=True, slots=True)
class Facts:
    """Measured facts about one precision of a bundle on this box."""

    outside: dict[str, str | None]  # by shape: None in the verifier's class, else the difference in words
    plain_ms: float  # the decode engine, one token
    verify_ms: dict[int, float]  # by window size, after another pass of the target
    verify_after_draft_ms: dict[int, float]  # by window size, after a draft engine
    draft_ms: dict[str, float]  # one step, by engine name
    draft_width: dict[str, int]  # the fastest width of a step, by engine name

    def in_class(self, entry: EngineEntry) -> bool:
        return self.outside[_name(entry, entry.sequence or 1)] is None


def _as_facts(stored: Any) -> Facts:
    return Facts(
        outside=dict(stored["outside"]),
        plain_ms=float(stored["plain_ms"]),
        verify_ms={int(n): float(t) for n, t in stored["verify_ms"].items()},
        verify_after_draft_ms={int(n): float(t) for n, t in stored["verify_after_draft_ms"].items()},
        draft_ms={n: float(t) for n, t in stored["draft_ms"].items()},
        draft_width={n: int(w) for n, w in stored["draft_width"].items()},
    )


def _stored_facts(file: Path) -> Facts | None:
    """Return the facts in ``file``, or None if it is absent or damaged (they are then measured again)."""
    try:
        return _as_facts(read_json(file))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _name(entry: EngineEntry, width: int) -> str:
    return f"{entry.name}@1x{width}"


class Box:
    """Loads a bundle's engines on this box and measures them on first use.

    Args:
        bundle: the bundle.
        threads: thread count of the process, None for the one in force.
        progress: told what takes long.
    """

    def __init__(self, bundle: Bundle, threads: int | None, progress: Progress = lambda _: None) -> None:
        self.bundle = bundle
        self.threads = use_threads(threads)
        self._progress = progress
        self._cache: Path = cache_directory(bundle.path)
        self._engines: dict[str, OrtEngine] = {}

    def engine(self, entry: EngineEntry) -> Engine:
        """Return the loaded engine of ``entry``; one copy for all boxes of the process."""
        with _loading:
            if entry.name in self._engines:
                return self._engines[entry.name]  # whatever became of the files since
            file = prepare(self.bundle.path / entry.file.path, entry.file.sha256, self._cache)
            key = (str(file.resolve()), entry.name)
            engine = _loaded.get(key)
            if engine is None:
                self._progress(f"loading {entry.name}")
                try:
                    engine = _loaded[key] = OrtEngine(entry, file, prepared=True)
                except EngineError as error:
                    raise EngineError(f"{error}; if the box's cache is damaged, delete {file.parent}") from None
            self._engines[entry.name] = engine  # keeps it loaded for as long as this box is in use
        return engine

    def facts(self, precision: str, drafts: list[EngineEntry]) -> Facts:
        """Return the facts about ``precision`` with these drafts, measured if they are not stored.

        Raises:
            ExactnessError: an engine gives values that cannot be compared.
        """
        verify = [e for e in self.bundle.engines(role="verify", precision=precision) if e.batch == 1]
        singles = [
            *verify,
            *self.bundle.engines(role="prefill", precision=precision),
            *self.bundle.engines(role="decode", precision=precision),
        ]
        file = self._cache / f"box-{precision}-{self._key(singles, drafts)}.json"
        facts = _stored_facts(file)
        if facts is None:
            with lock(self._cache):
                facts = _stored_facts(file)
                if facts is None:
                    measured = self._measure(verify, singles, drafts)
                    publish_json(file, measured)
                    facts = _as_facts(measured)
        return facts

    def _key(self, singles: list[EngineEntry], drafts: list[EngineEntry]) -> str:
        facts = [onnxruntime().__version__, cpu_identity(), str(self.threads)]
        facts += [e.file.sha256 for e in (*singles, *drafts)]
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]

    def _measure(
        self, verify: list[EngineEntry], singles: list[EngineEntry], drafts: list[EngineEntry]
    ) -> dict[str, object]:
        self._progress("first use on this box: finding the shape classes of the engines")
        shapes = [Shape(self.engine(e), e.sequence or 1, e.rows or 1) for e in singles]
        reference = max((s for s in shapes if s.engine.entry.role == "verify"), key=lambda s: s.width)
        outside = find_class(self.bundle.target, shapes, reference)

        self._progress("first use on this box: measuring what each engine costs")
        (decode,) = (e for e in singles if e.role == "decode")
        return {"outside": outside, **self._measure_costs(verify, decode, drafts)}

    def _measure_costs(
        self, verify: list[EngineEntry], decode: EngineEntry, drafts: list[EngineEntry]
    ) -> dict[str, object]:
        caches: dict[tuple[str, str], KVCache] = {}

        def bind(entry: EngineEntry, width: int) -> BoundPass:
            key = (entry.model, entry.kv_dtype)
            model = self.bundle.manifest.models[entry.model]
            if key not in caches:
                caches[key] = KVCache(model, range(model.layers), entry.kv_dtype)
            return self.engine(entry).bind(caches[key], width, entry.rows or 1)

        windows = {e.sequence: bind(e, e.sequence) for e in verify if e.sequence}
        plain = bind(decode, 1)
        middle = windows[sorted(windows)[len(windows) // 2]]
        steps = {(e.name, w): bind(e, w) for e in drafts for w in (_STEP_WIDTHS if e.role == "draft" else (1,))}
        other = next(iter(steps.values()), plain)
        patterns = {"plain": Pattern(plain, plain)}
        patterns |= {f"verify {n}": Pattern(bound, bound) for n, bound in windows.items()}
        patterns |= {f"verify {n} after draft": Pattern(other, bound) for n, bound in windows.items()}
        patterns |= {f"draft {name} {w}": Pattern(middle, bound, times=3) for (name, w), bound in steps.items()}
        ms = measure(patterns)
        best = {
            e.name: min((w for n, w in steps if n == e.name), key=lambda w: ms[f"draft {e.name} {w}"]) for e in drafts
        }
        return {
            "plain_ms": ms["plain"],
            "verify_ms": {n: ms[f"verify {n}"] for n in windows},
            "verify_after_draft_ms": {n: ms[f"verify {n} after draft"] for n in windows},
            "draft_ms": {name: ms[f"draft {name} {width}"] for name, width in best.items()},
            "draft_width": best,
        }


def exact_windows(facts: Facts, verify: list[EngineEntry]) -> list[EngineEntry]:
    """Return the verify engines that may commit when exact.

    Raises:
        ExactnessError: fewer than one engine keeps the promise on this box; says what differed.
    """
    kept = [e for e in verify if facts.in_class(e)]
    widest = max(verify, key=lambda e: e.sequence or 0)
    if widest not in kept:
        reason = facts.outside[_name(widest, widest.sequence or 1)]
        raise ExactnessError(
            f"exact=True cannot be kept on this box: {widest.name} does not agree with itself ({reason}); "
            "use exact=False, or export another precision"
        )
    return kept

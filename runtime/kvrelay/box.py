"""What this box knows about a bundle's engines: their shape classes and their costs, found once and stored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .boxcache import cache_directory, cpu_identity, lock, publish_json, read_json
from .bundle import Bundle
from .classes import Shape, find_class
from .costs import measure
from .engine import Engine
from .errors import ExactnessError
from .kv import KVCache
from .manifest import EngineEntry
from .ort import OrtEngine, use_threads
from .ort.prepared import prepare

__all__ = ["Box", "Facts"]

Progress = Callable[[str], None]
_STEP_WIDTHS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Facts:
    """Measured facts about one precision of a bundle on this box."""

    outside: dict[str, str | None]  # by shape: None in the verifier's class, else the difference in words
    plain_ms: float  # the decode engine, one token
    verify_ms: dict[int, float]  # by window size
    draft_ms: dict[str, float]  # one step, by engine name
    draft_width: dict[str, int]  # the fastest width of a step, by engine name

    def in_class(self, entry: EngineEntry) -> bool:
        return self.outside[_name(entry, entry.sequence or 1)] is None


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
        """Return the loaded engine of ``entry``; one copy for all who ask."""
        if entry.name not in self._engines:
            self._progress(f"loading {entry.name}")
            file = prepare(self.bundle.path / entry.file.path, entry.file.sha256, self._cache)
            self._engines[entry.name] = OrtEngine(entry, file, prepared=True)
        return self._engines[entry.name]

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
        stored = read_json(file)
        if stored is None:
            with lock(self._cache):
                stored = read_json(file)
                if stored is None:
                    stored = self._measure(verify, singles, drafts)
                    publish_json(file, stored)
        return Facts(
            outside=stored["outside"],
            plain_ms=stored["plain_ms"],
            verify_ms={int(n): t for n, t in stored["verify_ms"].items()},
            draft_ms=stored["draft_ms"],
            draft_width=stored["draft_width"],
        )

    def _key(self, singles: list[EngineEntry], drafts: list[EngineEntry]) -> str:
        import onnxruntime

        facts = [onnxruntime.__version__, cpu_identity(), str(self.threads)]
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
        passes = {}
        caches: dict[tuple[str, str], KVCache] = {}
        for entry in (*verify, *(e for e in singles if e.role == "decode"), *drafts):
            key = (entry.model, entry.kv_dtype)
            model = self.bundle.manifest.models[entry.model]
            if key not in caches:
                caches[key] = KVCache(model, range(model.layers), entry.kv_dtype)
            widths = [entry.sequence] if entry.sequence else [1] if entry.role == "decode" else _STEP_WIDTHS
            for width in widths:
                passes[_name(entry, width)] = self.engine(entry).bind(caches[key], width, entry.rows or 1)
        ms = measure(passes)
        best = {e.name: min(_STEP_WIDTHS, key=lambda w: ms[_name(e, w)]) for e in drafts if e.role == "draft"}
        best |= {e.name: 1 for e in drafts if e.role != "draft"}
        (decode,) = (e for e in singles if e.role == "decode")
        return {
            "outside": outside,
            "plain_ms": ms[_name(decode, 1)],
            "verify_ms": {str(e.sequence): ms[_name(e, e.sequence or 1)] for e in verify},
            "draft_ms": {e.name: ms[_name(e, best[e.name])] for e in drafts},
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

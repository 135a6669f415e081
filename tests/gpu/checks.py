"""The checks of one bundle at one place, each of which gives an outcome with figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvrelay import Engine, ExactnessError, Pipeline
from kvrelay.box import Box
from kvrelay.bundle import Bundle
from kvrelay.costs import Pattern, measure
from kvrelay.engine import BoundPass
from kvrelay.invariance import promise_of
from kvrelay.manifest import EngineEntry
from kvrelay.place import Place
from kvrelay.shapes import target_shapes
from seeded import RUN, succeeding

__all__ = ["Checks", "Outcome"]

_TOKENS = 96
_BATCH = 8
# Largest logit difference from the CPU, over the largest logit there.
_TOLERANCE = {"float16": 3e-2, "float32": 2e-3}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check found."""

    check: str
    status: str  # "passed", "failed" or "skipped"
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


class Checks:
    """Runs the checks one after the other.

    Args:
        bundle: a seeded bundle with its weights.
        place: where it is checked; what it is compared with is ONNX Runtime on the CPU.
        progress: told what takes long.
    """

    def __init__(self, bundle: Bundle, place: Place, progress: Callable[[str], None]) -> None:
        self.bundle = bundle
        self.place = place
        self.precision = bundle.precisions()[0]
        self.drafts = ["ngram", *(e.draft for e in bundle.manifest.engines if e.draft)]
        self._progress = progress
        self._options: dict[str, Any] = {"backend": place.backend, "provider": ",".join(place.providers) or None}
        self._pipelines: dict[tuple[str, bool], Pipeline] = {}

    def all(self) -> Iterator[Callable[[], Outcome]]:
        """Yield every check, the dearest last."""
        yield self.numerics
        yield self.invariance
        yield self.losslessness
        yield self.kv_copies
        yield self.cuda_graphs
        yield self.draft_on_the_cpu
        yield self.verify_over_decode
        yield self.speed
        yield self.batch_speed

    def prompt(self, length: int = 2 * RUN) -> list[int]:
        """A text that repeats, so that a lookup finds something, with some ids that break the count."""
        ids = np.full(length, 2 * RUN + 5)
        for i in range(1, length):
            ids[i] = succeeding(ids[i - 1]) if i % 17 else ids[i // 2]
        return [int(i) % self.bundle.target.vocab_size for i in ids]

    def _pipeline(self, draft: str, *, exact: bool = True) -> Pipeline:
        key = (draft, exact)
        if key not in self._pipelines:
            self._pipelines[key] = Pipeline(
                self.bundle.path,
                draft=draft,
                precision=self.precision,
                exact=exact,
                progress=self._progress,
                **self._options,
            )
        return self._pipelines[key]

    def _exact(self) -> bool:
        try:
            self._pipeline("none")
        except ExactnessError:
            return False
        return True

    # -- right -------------------------------------------------------------------------------------------------------

    def numerics(self) -> Outcome:
        """Compare two passes of every engine with the CPU: logits, most likely tokens, and that all is finite."""
        here, there = self._box(), Box(self.bundle, None)
        worst: dict[str, dict[str, float]] = {}
        bad = []
        for entry in self.bundle.manifest.engines:
            found, wanted = _two_passes(here, entry, self.prompt()), _two_passes(there, entry, self.prompt())
            finite = all(np.isfinite(a).all() for a in found)
            scale = max(np.abs(b).max() for b in wanted)
            difference = max(np.abs(a - b).max() for a, b in zip(found, wanted, strict=True)) / scale
            pairs = zip(found, wanted, strict=True)
            same = float(np.mean([np.mean(a.argmax(-1) == b.argmax(-1)) for a, b in pairs]))
            worst[entry.name] = {"relative difference": float(difference), "same choice": same}
            if not finite or not difference <= _TOLERANCE[entry.activations] or same < 0.9:
                bad.append(entry.name)
        largest = max(figures["relative difference"] for figures in worst.values())
        detail = f"{len(worst)} engines, largest difference {largest:.2g} of the largest logit"
        return Outcome("numerics", "failed" if bad else "passed", "; ".join([detail, *bad]), worst)

    def invariance(self) -> Outcome:
        """Run the invariance check on this device and say what it allows."""
        box = self._box()
        shapes = target_shapes(box, self.precision, 2)
        verdicts = box.verdicts(self.precision, shapes.all)
        promise = promise_of(verdicts, shapes)
        inside = [name for name, verdict in verdicts.items() if verdict.outside is None]
        windows = promise.windows or f"refused: {promise.refusal}"
        detail = f"{len(inside)} of {len(verdicts)} shapes in the verifier's class; deterministic windows {windows}"
        figures = {name: [v.outside, v.unstable] for name, v in verdicts.items()}
        return Outcome("invariance", "passed", detail, {"windows": windows, "verdicts": figures})

    def losslessness(self) -> Outcome:
        """Generate with every draft, greedy and sampled: ids and scores must be those of plain decoding."""
        if not self._exact():
            return Outcome("losslessness", "skipped", "exact cannot be kept at this place: see invariance")
        figures: dict[str, Any] = {}
        wrong = []
        for name, options in (("greedy", {}), ("sampled", {"temperature": 0.8, "top_k": 40, "seed": 5})):
            wanted = self._pipeline("none").generate(self.prompt(), max_new_tokens=_TOKENS, **options)
            for draft in self.drafts:
                found = self._pipeline(draft).generate(self.prompt(), max_new_tokens=_TOKENS, **options)
                figures[f"{draft}, {name}"] = found.stats.acceptance
                if (found.token_ids, found.scores) != (wanted.token_ids, wanted.scores):
                    wrong.append(f"{draft}, {name}")
        detail = f"{len(figures)} generations of {_TOKENS} tokens, {len(wrong)} differ from plain decoding"
        return Outcome("losslessness", "failed" if wrong else "passed", "; ".join([detail, *wrong]), figures)

    def kv_copies(self) -> Outcome:
        """Count the KV bytes that were copied: none, but for engines that cannot update a cache."""
        exact = self._exact()
        figures = {}
        for draft in ("none", *self.drafts):
            stats = self._pipeline(draft, exact=exact).generate(self.prompt(), max_new_tokens=32).stats
            figures[draft] = stats.kv_bytes_copied
        in_place = all(e.dialect != "decomposed" for e in self.bundle.manifest.engines)
        copied = sum(figures.values())
        detail = f"{copied} bytes copied" + ("" if in_place else ", of engines that cannot update a cache")
        return Outcome("zero KV copies", "failed" if in_place == bool(copied) else "passed", detail, figures)

    def cuda_graphs(self) -> Outcome:
        """Repeat passes, which are captured after the first: every run must give the bits of the first."""
        if not self.place.on_gpu:
            return Outcome("CUDA graphs", "skipped", "this place has no GPU")
        box = self._box()
        captured, changed = {}, []
        for entry in self.bundle.engines(precision=self.precision):
            bound = _bind(box, entry, box.cache(entry))
            _fill(bound, self.prompt(), 0)
            bound.run()
            first = bound.logits.copy()
            for _ in range(4):
                bound.run()
                if not np.array_equal(bound.logits.view(np.uint32), first.view(np.uint32)):
                    changed.append(entry.name)
            launcher = getattr(bound, "launcher", None)
            by_ort = getattr(box.engine(entry), "captured", False)
            captured[entry.name] = by_ort if launcher is None else launcher.graph is not None
        detail = f"{sum(captured.values())} of {len(captured)} engines run as CUDA graphs"
        if changed:
            detail += f"; replays changed bits in {', '.join(sorted(set(changed)))}"
        return Outcome("CUDA graphs", "failed" if changed else "passed", detail, captured)

    def draft_on_the_cpu(self) -> Outcome:
        """Draft on the CPU for a target on the GPU: the same text, and each KV entry handed over once."""
        if not self.place.on_gpu:
            return Outcome("draft on the CPU", "skipped", "this place has no GPU")
        exact = self._exact()
        wanted = self._pipeline("none", exact=exact).generate(self.prompt(), max_new_tokens=48)
        pipe = Pipeline(self.bundle.path, draft="skip", window=8, exact=exact, draft_provider="cpu", **self._options)
        found = pipe.generate(self.prompt(), max_new_tokens=48)
        entry = next(e for e in self.bundle.manifest.engines if e.draft == "skip")
        model = self.bundle.target
        size = 2 * len(entry.kv_layers) * model.kv_heads * model.head_dim * np.dtype(entry.kv_dtype).itemsize
        most = size * (len(self.prompt()) + len(found.token_ids))
        same = found.token_ids == wanted.token_ids or not exact
        good = same and 0 < found.stats.kv_bytes_copied <= most
        detail = f"{found.stats.kv_bytes_copied} bytes handed over, at most {most}" + ("" if same else "; other text")
        return Outcome(
            "draft on the CPU", "passed" if good else "failed", detail, {"acceptance": found.stats.acceptance}
        )

    # -- fast --------------------------------------------------------------------------------------------------------

    def verify_over_decode(self) -> Outcome:
        """Time a verify pass of each window over a pass of the decode engine, at context 128."""
        box = self._box()
        (decode,) = self.bundle.engines(role="decode", precision=self.precision)
        cache = box.cache(decode)
        passes = {1: _bind(box, decode, cache)}
        for entry in self.bundle.engines(role="verify", precision=self.precision):
            if entry.batch == 1 and entry.sequence:
                passes[entry.sequence] = _bind(box, entry, cache)
        ms = measure({str(n): Pattern(bound, bound) for n, bound in passes.items()})
        ratios = {n: ms[n] / ms["1"] for n in ms}
        detail = f"decode {ms['1']:.2f} ms; " + ", ".join(
            f"verify({n}) {r:.2f}x" for n, r in ratios.items() if n != "1"
        )
        return Outcome("verify over decode", "passed", detail, {"ms": ms, "ratio": ratios})

    def speed(self) -> Outcome:
        """Time plain decoding and every draft at batch 1, interleaved; medians of three rounds."""
        exact = self._exact()
        cases = {"none": exact, **({"none, not exact": False} if exact else {}), **dict.fromkeys(self.drafts, exact)}
        runs: dict[str, list[Any]] = {name: [] for name in cases}
        for turn in range(4):
            for name, case_exact in cases.items():
                pipe = self._pipeline(name.partition(",")[0], exact=case_exact)
                tokens = _TOKENS if turn else 16
                stats = pipe.generate(self.prompt(), max_new_tokens=tokens, ignore_eos=True).stats
                if turn:
                    runs[name].append(stats)
        rates = {name: statistics.median(s.tokens_per_second for s in mine) for name, mine in runs.items()}
        figures = {
            name: {
                "tokens per second": rates[name],
                "over plain": rates[name] / rates["none"],
                "acceptance": mine[-1].acceptance,
                "tokens per verify": mine[-1].tokens_per_verify,
                "share outside the engines": statistics.median(s.host_share for s in mine),
            }
            for name, mine in runs.items()
        }
        detail = ", ".join(f"{name} {rate:.0f}/s" for name, rate in rates.items())
        return Outcome("speed at batch 1", "passed", detail, figures)

    def batch_speed(self) -> Outcome:
        """Time eight requests at once, without and with drafts."""
        main = max(self.bundle.engines(role="verify", precision=self.precision), key=lambda e: (e.batch, e.sequence))
        figures = {}
        for draft in ("none", *self.drafts):
            with Engine(
                self.bundle.path,
                max_batch=_BATCH,
                precision=self.precision,
                draft=draft,
                window=main.sequence or 1,
                group=main.batch or 1,
                progress=self._progress,
                **self._options,
            ) as engine:
                for tokens in (8, _TOKENS):
                    started = time.perf_counter()
                    prompts = [self.prompt(RUN + 3 * i) for i in range(_BATCH)]
                    handles = [engine.submit(p, max_new_tokens=tokens, ignore_eos=True) for p in prompts]
                    made = sum(len(handle.result().token_ids) for handle in handles)
                    figures[draft] = made / (time.perf_counter() - started)
        detail = ", ".join(f"{name} {rate:.0f}/s" for name, rate in figures.items())
        return Outcome(f"speed at batch {_BATCH}", "passed", detail, figures)

    def _box(self) -> Box:
        return Box(self.bundle, None, self._progress, self.place, _BATCH)


def _bind(box: Box, entry: EngineEntry, cache: Any) -> BoundPass:
    return box.engine(entry).bind(cache, entry.sequence or 1, entry.rows or 1, batch=entry.batch or 1)


def _fill(bound: BoundPass, tokens: list[int], start: int) -> None:
    batch, width = bound.input_ids.shape
    for row in range(batch):
        bound.input_ids[row] = np.resize(tokens[row:], start + width)[start:]
    bound.write_index[:] = start
    bound.logit_rows[:] = np.arange(bound.logit_rows.shape[1])


def _two_passes(box: Box, entry: EngineEntry, tokens: list[int]) -> list[np.ndarray]:
    """Return the logits of a pass on an empty cache and of one behind it."""
    cache = box.cache(entry, entry.batch or 1)
    width = entry.sequence or 5
    bound = box.engine(entry).bind(cache, width, entry.rows or width, batch=entry.batch or 1)
    found = []
    for start in (0, width):
        _fill(bound, tokens, start)
        bound.run()
        found.append(bound.logits.copy())
    return found

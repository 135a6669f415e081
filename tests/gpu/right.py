"""Checks of what is computed: each takes a setting and gives an outcome with figures."""

from __future__ import annotations

from typing import Any

import numpy as np
from kvrelay import Pipeline
from kvrelay.box import Box
from kvrelay.engine import BoundPass
from kvrelay.invariance import promise_of
from kvrelay.manifest import EngineEntry
from kvrelay.shapes import target_shapes
from setting import TOKENS, Outcome, Setting, bind

__all__ = ["CHECKS"]

# Largest logit difference from the CPU, over the largest logit there.
_TOLERANCE = {"float16": 3e-2, "float32": 2e-3}


def numerics(s: Setting) -> Outcome:
    """Compare two passes of every engine with the CPU: logits, most likely tokens, and that all is finite."""
    here, there = s.box(), Box(s.bundle, None)
    worst: dict[str, dict[str, float]] = {}
    bad = []
    for entry in s.bundle.manifest.engines:
        found, wanted = _two_passes(here, entry, s.prompt()), _two_passes(there, entry, s.prompt())
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


def invariance(s: Setting) -> Outcome:
    """Run the invariance check on this device and say what it allows."""
    box = s.box()
    shapes = target_shapes(box, s.precision, 2)
    verdicts = box.verdicts(s.precision, shapes.all)
    promise = promise_of(verdicts, shapes)
    inside = [name for name, verdict in verdicts.items() if verdict.outside is None]
    windows = promise.windows or f"refused: {promise.refusal}"
    detail = f"{len(inside)} of {len(verdicts)} shapes in the verifier's class; deterministic windows {windows}"
    figures = {name: [v.outside, v.unstable] for name, v in verdicts.items()}
    return Outcome("invariance", "passed", detail, {"windows": windows, "verdicts": figures})


def losslessness(s: Setting) -> Outcome:
    """Generate with every draft, greedy and sampled: ids and scores must be those of plain decoding."""
    if not s.exact():
        return Outcome("losslessness", "skipped", "exact cannot be kept at this place: see invariance")
    figures: dict[str, Any] = {}
    wrong = []
    for name, options in (("greedy", {}), ("sampled", {"temperature": 0.8, "top_k": 40, "seed": 5})):
        wanted = s.pipeline("none").generate(s.prompt(), max_new_tokens=TOKENS, **options)
        for draft in s.drafts:
            found = s.pipeline(draft).generate(s.prompt(), max_new_tokens=TOKENS, **options)
            figures[f"{draft}, {name}"] = found.stats.acceptance
            if (found.token_ids, found.scores) != (wanted.token_ids, wanted.scores):
                wrong.append(f"{draft}, {name}")
    detail = f"{len(figures)} generations of {TOKENS} tokens, {len(wrong)} differ from plain decoding"
    return Outcome("losslessness", "failed" if wrong else "passed", "; ".join([detail, *wrong]), figures)


def kv_copies(s: Setting) -> Outcome:
    """Count the KV bytes that were copied: none, but for engines that cannot update a cache."""
    exact = s.exact()
    figures = {}
    for draft in ("none", *s.drafts):
        stats = s.pipeline(draft, exact=exact).generate(s.prompt(), max_new_tokens=32).stats
        figures[draft] = stats.kv_bytes_copied
    in_place = all(e.dialect != "decomposed" for e in s.bundle.manifest.engines)
    copied = sum(figures.values())
    detail = f"{copied} bytes copied" + ("" if in_place else ", of engines that cannot update a cache")
    return Outcome("zero KV copies", "failed" if in_place == bool(copied) else "passed", detail, figures)


def cuda_graphs(s: Setting) -> Outcome:
    """Repeat passes, which are captured after the first: every run must give the bits of the first."""
    if not s.place.on_gpu:
        return Outcome("CUDA graphs", "skipped", "this place has no GPU")
    box = s.box()
    captured, changed = {}, []
    for entry in s.bundle.engines(precision=s.precision):
        bound = bind(box, entry, box.cache(entry, entry.batch or 1))
        _fill(bound, s.prompt(), 0)
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


def draft_on_the_cpu(s: Setting) -> Outcome:
    """Draft on the CPU for a target on the GPU: the same text, and each KV entry handed over once."""
    if not s.place.on_gpu:
        return Outcome("draft on the CPU", "skipped", "this place has no GPU")
    exact = s.exact()
    wanted = s.pipeline("none", exact=exact).generate(s.prompt(), max_new_tokens=48)
    pipe = Pipeline(s.bundle.path, draft="skip", window=8, exact=exact, draft_provider="cpu", **s.options)
    found = pipe.generate(s.prompt(), max_new_tokens=48)
    entry = next(e for e in s.bundle.manifest.engines if e.draft == "skip")
    model = s.bundle.target
    size = 2 * len(entry.kv_layers) * model.kv_heads * model.head_dim * np.dtype(entry.kv_dtype).itemsize
    most = size * (len(s.prompt()) + len(found.token_ids))
    same = found.token_ids == wanted.token_ids or not exact
    good = same and 0 < found.stats.kv_bytes_copied <= most
    detail = f"{found.stats.kv_bytes_copied} bytes handed over, at most {most}" + ("" if same else "; other text")
    return Outcome("draft on the CPU", "passed" if good else "failed", detail, {"acceptance": found.stats.acceptance})


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


CHECKS = (numerics, invariance, losslessness, kv_copies, cuda_graphs, draft_on_the_cpu)

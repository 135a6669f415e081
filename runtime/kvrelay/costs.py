"""Measure what a pass costs on this box: the stored figures that the choice of drafts is made from.

A pass is cheaper right after another pass over the same weights, which a large cache then still holds. So each figure
is measured in the company it has in use: plain steps follow plain steps, a draft's steps follow a verify pass, and a
verify pass follows the draft's steps or, with a lookup, another verify pass.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .engine import BoundPass
from .manifest import EngineEntry

__all__ = ["Pattern", "engine_costs", "measure"]

Bind = Callable[[EngineEntry, int], BoundPass]  # an engine and its width

_CONTEXT = 128  # entries in the cache while measuring, where it holds so many
_ROUNDS = 9
_STEP_WIDTHS = (1, 2, 4)  # of a draft's step, the tokens behind the first being pads


@dataclass(frozen=True, slots=True)
class Pattern:
    """Runs to be timed, and the run that comes before them."""

    before: BoundPass
    timed: BoundPass
    times: int = 1


def measure(patterns: Mapping[str, Pattern], capacity: int) -> dict[str, float]:
    """Return the median milliseconds of one timed run of each pattern.

    Patterns take turns, so that a slow spell of the machine hits all alike.

    Args:
        patterns: what to time.
        capacity: KV entries that a slot of every cache holds.
    """
    widest = max(b.input_ids.shape[1] for p in patterns.values() for b in (p.before, p.timed))
    # One more: the step engine's attention writes a pad behind its token.
    context = min(_CONTEXT, capacity - widest - 1)
    for pattern in patterns.values():
        for bound in (pattern.before, pattern.timed):
            bound.input_ids[:] = 1 + np.arange(bound.input_ids.shape[1])
            bound.write_index[:] = context
            bound.logit_rows[:] = 0
    found: dict[str, list[float]] = {name: [] for name in patterns}
    for round_number in range(_ROUNDS + 1):
        for name, pattern in patterns.items():
            pattern.before.run()
            start = time.perf_counter()
            for _ in range(pattern.times):
                pattern.timed.run()
            if round_number:
                found[name].append((time.perf_counter() - start) / pattern.times)
    return {name: statistics.median(values) * 1000 for name, values in found.items()}


def engine_costs(
    verify: Sequence[EngineEntry],
    decode: EngineEntry,
    steps: Sequence[EngineEntry],
    drafts: Sequence[EngineEntry],
    bind: Bind,
    bind_draft: Bind,
    capacity: int,
) -> dict[str, object]:
    """Measure what one request's passes cost; return it as :class:`kvrelay.facts.Facts` has it, in a form for JSON.

    Args:
        verify: verify engines of one row.
        decode: the decode engine.
        steps: the step engine, if the bundle has one.
        drafts: engines that propose.
        bind: binds a target's engine to one row.
        bind_draft: binds a draft's, which may run elsewhere.
        capacity: KV entries that a slot of every cache holds.
    """
    windows = {e.sequence: bind(e, e.sequence) for e in verify if e.sequence}
    plain = bind(decode, 1)
    middle = windows[sorted(windows)[len(windows) // 2]]
    widths = {e.name: _STEP_WIDTHS if e.role == "draft" else (1,) for e in drafts}
    draft_steps = {(e.name, w): bind_draft(e, w) for e in drafts for w in widths[e.name]}
    other = next(iter(draft_steps.values()), plain)
    patterns = {"plain": Pattern(plain, plain)}
    for entry in steps:
        bound = bind(entry, 1)
        patterns["step"] = Pattern(bound, bound)
    patterns |= {f"verify {n}": Pattern(bound, bound) for n, bound in windows.items()}
    patterns |= {f"verify {n} after draft": Pattern(other, bound) for n, bound in windows.items()}
    patterns |= {f"draft {name} {w}": Pattern(middle, bound, times=3) for (name, w), bound in draft_steps.items()}
    ms = measure(patterns, capacity)
    best = {
        e.name: min((w for n, w in draft_steps if n == e.name), key=lambda w: ms[f"draft {e.name} {w}"]) for e in drafts
    }
    return {
        "plain_ms": ms["plain"],
        "step_ms": ms.get("step", math.inf),
        "verify_ms": {n: ms[f"verify {n}"] for n in windows},
        "verify_after_draft_ms": {n: ms[f"verify {n} after draft"] for n in windows},
        "draft_ms": {name: ms[f"draft {name} {width}"] for name, width in best.items()},
        "draft_width": best,
    }

"""Measure what a pass costs on this box: the stored figures that the choice of drafts is made from.

A pass is cheaper right after another pass over the same weights, which a large cache then still holds. So each figure
is measured in the company it has in use: plain steps follow plain steps, a draft's steps follow a verify pass, and a
verify pass follows the draft's steps or, with a lookup, another verify pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .engine import BoundPass

__all__ = ["Pattern", "measure"]

_CONTEXT = 128  # entries in the cache while measuring
_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Pattern:
    """Runs to be timed, and the run that comes before them."""

    before: BoundPass
    timed: BoundPass
    times: int = 1


def measure(patterns: Mapping[str, Pattern]) -> dict[str, float]:
    """Return the median milliseconds of one timed run of each pattern.

    Patterns take turns, so that a slow spell of the machine hits all alike.
    """
    for pattern in patterns.values():
        for bound in (pattern.before, pattern.timed):
            bound.input_ids[:] = 1 + np.arange(bound.input_ids.shape[1])
            bound.write_index[:] = _CONTEXT
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

"""Measure what a pass costs on this box: the stored figures that the choice of drafts is made from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import numpy as np

from .engine import BoundPass

__all__ = ["measure"]

_CONTEXT = 128  # entries in the cache while measuring
_ROUNDS = 9


def measure(passes: Mapping[str, BoundPass]) -> dict[str, float]:
    """Return the median milliseconds of each pass, measured in turn so that a slow spell hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for bound in passes.values():
        bound.input_ids[:] = 1 + np.arange(bound.input_ids.shape[1])
        bound.write_index[:] = _CONTEXT
        bound.logit_rows[:] = 0
    for round_number in range(_ROUNDS + 1):
        for name, bound in passes.items():
            bound.run()
            start = time.perf_counter()
            bound.run()
            if round_number:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1000 for name, values in times.items()}

"""Facts about one precision of a bundle on this box, and which of its engines may commit by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import ExactnessError
from .manifest import EngineEntry
from .shapes import shape_name

__all__ = ["Facts", "exact_refusal", "exact_windows"]


@dataclass(frozen=True, slots=True)
class Facts:
    """Measured facts about one precision of a bundle on this box, for one request at a time."""

    outside: dict[str, str | None]  # by shape: None in the verifier's class, else the difference in words
    plain_ms: float  # the decode engine, one token
    step_ms: float  # the step engine, one token; infinite without one
    verify_ms: dict[int, float]  # by window size, after another pass of the target
    verify_after_draft_ms: dict[int, float]  # by window size, after a draft engine
    draft_ms: dict[str, float]  # one step, by engine name
    draft_width: dict[str, int]  # the fastest width of a step, by engine name

    def in_class(self, entry: EngineEntry) -> bool:
        return self.outside[shape_name(entry.name, 1, entry.sequence or 1)] is None


def exact_refusal(outside: Mapping[str, str | None], verify: list[EngineEntry]) -> str | None:
    """Return why `exact` cannot be kept with these verify engines of one row, None if it can."""
    widest = max(verify, key=lambda e: e.sequence or 0)
    reason = outside[shape_name(widest.name, 1, widest.sequence or 1)]
    return None if reason is None else f"{widest.name} does not agree with itself ({reason})"


def exact_windows(facts: Facts, verify: list[EngineEntry]) -> list[EngineEntry]:
    """Return the verify engines that may commit when exact.

    Raises:
        ExactnessError: the widest does not keep the promise on this box; says what differed.
    """
    if (refusal := exact_refusal(facts.outside, verify)) is not None:
        raise ExactnessError(
            f"exact=True cannot be kept on this box: {refusal}; use exact=False, or export another precision"
        )
    return [e for e in verify if facts.in_class(e)]

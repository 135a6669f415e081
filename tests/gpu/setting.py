"""What the checks share: a bundle at a place, its pipelines, a prompt, and the form of an outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvrelay import ExactnessError, Pipeline
from kvrelay.box import Box
from kvrelay.bundle import Bundle
from kvrelay.engine import BoundPass
from kvrelay.manifest import EngineEntry
from kvrelay.place import Place
from seeded import RUN, succeeding

__all__ = ["BATCH", "TOKENS", "Outcome", "Setting", "bind"]

TOKENS = 96
BATCH = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check found."""

    check: str
    status: str  # "passed", "failed" or "skipped"
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


class Setting:
    """A bundle at a place, and what checks share.

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
        self.progress = progress
        self.options: dict[str, Any] = {"backend": place.backend, "provider": ",".join(place.providers) or None}
        self._pipelines: dict[tuple[str, bool], Pipeline] = {}

    def prompt(self, length: int = 2 * RUN) -> list[int]:
        """A text that repeats, so that a lookup finds something, with some ids that break the count."""
        ids = np.full(length, 2 * RUN + 5)
        for i in range(1, length):
            ids[i] = succeeding(ids[i - 1]) if i % 17 else ids[i // 2]
        return [int(i) % self.bundle.target.vocab_size for i in ids]

    def pipeline(self, draft: str, *, exact: bool = True) -> Pipeline:
        """Return the pipeline of a draft, the same one for the same arguments."""
        key = (draft, exact)
        if key not in self._pipelines:
            self._pipelines[key] = Pipeline(
                self.bundle.path,
                draft=draft,
                precision=self.precision,
                exact=exact,
                progress=self.progress,
                **self.options,
            )
        return self._pipelines[key]

    def exact(self) -> bool:
        """Whether exact generation can be kept at this place."""
        try:
            self.pipeline("none")
        except ExactnessError:
            return False
        return True

    def box(self) -> Box:
        """Return the box of this place."""
        return Box(self.bundle, None, self.progress, self.place, BATCH)


def bind(box: Box, entry: EngineEntry, cache: Any) -> BoundPass:
    """Bind an engine to ``cache`` in its own shape, or at one token."""
    return box.engine(entry).bind(cache, entry.sequence or 1, entry.rows or 1, batch=entry.batch or 1)

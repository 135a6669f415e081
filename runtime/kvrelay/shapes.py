"""Shapes: an engine at one batch and width, and those in which a target serves a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .engine import LoadedEngine

if TYPE_CHECKING:
    from .box import Box

__all__ = ["Shape", "TargetShapes", "shape_name", "target_shapes"]


def shape_name(engine: str, batch: int, width: int, rows: int = 1) -> str:
    """Name of an engine at one shape; ``rows``, if more than one, where the caller chooses how many logit rows."""
    return f"{engine}@{batch}x{width}" + (f"r{rows}" if rows > 1 else "")


@dataclass(frozen=True, slots=True)
class Shape:
    """An engine at one shape; for engines with dynamic axes batch and width are the caller's choice."""

    engine: LoadedEngine
    batch: int
    width: int
    rows: int  # logit rows of a row
    name: str = field(init=False)

    def __post_init__(self) -> None:
        entry = self.engine.entry
        chosen = self.rows if entry.rows is None else 1  # other rows may have other bits, and cost more
        object.__setattr__(self, "name", shape_name(entry.name, self.batch, self.width, chosen))


@dataclass(frozen=True, slots=True)
class TargetShapes:
    """Shapes of a target by use; those with a dynamic batch by batch size."""

    prefill: Shape
    verify: list[Shape]
    plain: dict[int, Shape]  # one token a row in the decode engine
    steps: dict[int, list[Shape]]  # one token a row in the step engine, if the bundle has one
    doubled: dict[int, Shape]  # one token a row in the decode engine, behind each a pad

    @property
    def main(self) -> Shape:
        """The verify shape of the widest window and, of those, the largest group."""
        return max(self.verify, key=lambda s: (s.width, s.batch))

    @property
    def dynamic(self) -> list[Shape]:
        return [s for b in self.plain for s in (self.plain[b], *self.steps[b], self.doubled[b])]

    @property
    def all(self) -> list[Shape]:
        return [*self.verify, self.prefill, *self.dynamic]

    def single_steps(self, batch: int) -> list[Shape]:
        """Return the shapes that can give each of ``batch`` rows one new token."""
        singles = [s for s in self.verify if s.batch == 1] if batch == 1 else []
        return [self.plain[batch], *self.steps[batch], self.doubled[batch], *singles]


def target_shapes(box: Box, precision: str, max_batch: int) -> TargetShapes:
    """Return the shapes of a target for batches up to ``max_batch``."""
    bundle = box.bundle
    decode = bundle.engine("decode", precision)
    prefill = bundle.engine("prefill", precision)
    steps = bundle.engines(role="step", precision=precision)
    batches = range(1, max_batch + 1)
    return TargetShapes(
        prefill=box.shape(prefill),
        verify=[box.shape(e) for e in bundle.engines(role="verify", precision=precision)],
        plain={b: box.shape(decode, b) for b in batches},
        steps={b: [box.shape(e, b) for e in steps] for b in batches},
        doubled={b: box.shape(decode, b, 2) for b in batches},
    )

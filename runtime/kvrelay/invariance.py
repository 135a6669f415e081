"""The invariance check: which shapes of a bundle's engines agree bit for bit on this box.

Matrix products of different shapes add in different orders, so the same context can give other bits at width 1 than
at width 8, or beside other rows. Shapes that agree form a *shape class*. `exact` and deterministic requests need the
engines that commit to lie in one, whatever the row, the other rows, the pads and the place in the window. All of that
is tested on the device, not assumed. Shapes outside the verifier's class are sorted into classes of their own for
information: what lies outside commits nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .engine import BoundPass
from .manifest import ModelEntry
from .prober import Prober
from .shapes import Shape, TargetShapes

__all__ = ["Promise", "Verdict", "check_shapes", "promise_of", "shape_classes", "windows_refusal"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the check found about one shape, in words; None where every bit agreed."""

    outside: str | None  # first difference from the reference shape, over rows, neighbours, pads, places and depths
    unstable: str | None  # first difference from itself when rows, neighbours and pads change and the place does not


@dataclass(frozen=True, slots=True)
class Promise:
    """How deterministic requests are committed, as the verdicts allow it."""

    windows: str | None  # "sliding", or "aligned" to multiples of the window's size; None: they are refused
    refusal: str | None  # why
    committing: list[Shape]  # what may commit them


def _variations(shape: Shape) -> Iterable[tuple[str, list[int | None], int]]:
    """Rows, neighbours and pads, with the window where it is."""
    yield "in repeated runs" if shape.batch == 1 else "when the neighbours change", [0] * shape.batch, shape.width
    for real in _real_widths(shape):
        yield "when the pads change", [0] * shape.batch, real
    if shape.batch > 1:
        for row in sorted({0, shape.batch // 2, shape.batch - 1}):
            alone: list[int | None] = [None] * shape.batch
            alone[row] = 0
            yield "when the row or its neighbours change", alone, shape.width


def _real_widths(shape: Shape) -> list[int]:
    return sorted({1, (shape.width + 1) // 2, shape.width - 1} - {0, shape.width})


def _outside(prober: Prober, bound: BoundPass, shape: Shape) -> str | None:
    """Compare with the reference: places, rows, neighbours, pads, and the same once more."""
    places = (0, 1, prober.reference.width // 2 + 1)
    for first in range(3):
        # The same tokens at other places of a window: starts move, tokens do not; every row at a place of its own.
        offsets: list[int | None] = [places[(first + row) % 3] for row in range(shape.batch)]
        if (found := prober.difference(bound, shape, offsets, shape.width)) is not None:
            return found
    for what, offsets, real in _variations(shape):
        if (found := prober.difference(bound, shape, offsets, real)) is not None:
            return f"{found} {what}"
    return None


def _unstable(prober: Prober, bound: BoundPass, shape: Shape) -> str | None:
    """Compare ``shape`` with itself at one place of the window while rows, neighbours and pads change."""
    prober.run(bound, shape, [0, *[None] * (shape.batch - 1)], shape.width)
    wanted = bound.logits[0].copy()
    if not np.isfinite(wanted).all() or not wanted.any():
        return f"logits are not finite or all zero at context {prober.depth}"
    entries = prober.cache.read(0, 0, prober.depth + prober.span)
    for what, offsets, real in _variations(shape):
        prober.run(bound, shape, offsets, real)
        for row, offset in enumerate(offsets):
            if offset is None:
                continue
            # A single row of logits moves with the pads: then only the entries can be compared.
            expected = wanted[:real] if shape.rows > 1 or real == shape.width else None
            found = prober.compare(bound, shape, row, 0, real, expected, entries)
            if found is not None:
                return f"{found} {what}"
    return None


def check_shapes(
    model: ModelEntry, shapes: Sequence[Shape], reference: Shape, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Verdict]:
    """Check each shape over row index, other rows, pads, place in the window, repetition and context depth.

    Args:
        model: sizes.
        shapes: what to check; ``reference`` may be among them.
        reference: a verify shape of one row, the widest.
        progress: told which context depth is at hand.

    Returns:
        A verdict for each shape's name.

    Raises:
        EngineError: the reference gives values that are not numbers, or nothing but zeros.
        MemoryBudgetError: there is no room for the largest batch's cache.
    """
    prober = Prober(model, shapes, reference)
    outside: dict[str, str | None] = dict.fromkeys((s.name for s in shapes), None)
    unstable = outside.copy()
    for depth in prober.depths:
        progress(f"checking {len(shapes)} shapes at context {depth}")
        prober.go_to(depth)
        for shape in shapes:
            bound = prober.bind(shape)
            outside[shape.name] = outside[shape.name] or _outside(prober, bound, shape)
            if outside[shape.name] is not None:  # what always agrees with the reference agrees with itself
                unstable[shape.name] = unstable[shape.name] or _unstable(prober, bound, shape)
    return {name: Verdict(outside[name], unstable[name]) for name in outside}


def shape_classes(
    model: ModelEntry,
    shapes: Sequence[Shape],
    verdicts: Mapping[str, Verdict],
    reference: Shape,
    progress: Callable[[str], None] = lambda _: None,
) -> list[list[str]]:
    """Sort shapes into classes whose members agree bit for bit, pair by pair.

    Args:
        model: sizes.
        shapes: what to sort.
        verdicts: what :func:`check_shapes` found about them against ``reference``.
        reference: the verify shape of one row behind the verdicts; it writes the contexts.
        progress: told which class is at hand.

    Returns:
        Names by class: the verifier's first, empty where the reference itself is in none. Shapes that do not agree
        with themselves are in no class.

    Raises:
        EngineError: a shape gives values that are not numbers, or nothing but zeros.
        MemoryBudgetError: there is no room for the largest batch's cache.
    """
    classes = [[s.name for s in shapes if verdicts[s.name].outside is None]]
    left = [s for s in shapes if verdicts[s.name].outside is not None and verdicts[s.name].unstable is None]
    while left:
        progress(f"comparing {len(left)} shapes with {left[0].name}")
        prober = Prober(model, left, left[0], filler=reference)
        # Where the place in the window matters a shape differs from itself at other places, and is a class alone.
        members = left[1:]
        for depth in prober.depths if members else ():
            prober.go_to(depth)
            members = [s for s in members if _outside(prober, prober.bind(s), s) is None]
        classes.append([left[0].name, *(s.name for s in members)])
        left = [s for s in left[1:] if s not in members]
    return classes


def windows_refusal(verdicts: Mapping[str, Verdict], shapes: Sequence[Shape]) -> str | None:
    """Return why windows may not be committed through ``shapes``, aligned ones included; None if they may."""
    for shape in shapes:
        verdict = verdicts[shape.name]
        if verdict.outside is not None and verdict.unstable is not None:
            return f"{shape.name} does not agree with itself ({verdict.unstable})"
    return None


def promise_of(verdicts: Mapping[str, Verdict], shapes: TargetShapes) -> Promise:
    """Return what can be promised with the largest window and group of a target."""
    fixed = (shapes.main, shapes.prefill)
    if (refusal := windows_refusal(verdicts, fixed)) is not None:
        return Promise(None, refusal, [])
    if any(verdicts[s.name].outside is not None for s in fixed):
        return Promise("aligned", None, list(fixed))
    return Promise("sliding", None, [s for s in shapes.all if verdicts[s.name].outside is None])

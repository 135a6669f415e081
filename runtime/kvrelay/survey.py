"""The survey of one precision of a bundle on this box: its shape classes, and what they allow to be promised."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from .box import Box
from .facts import exact_refusal
from .fingerprint import fingerprint, fingerprint_elsewhere
from .invariance import Promise, Verdict, promise_of, shape_classes
from .shapes import Shape, target_shapes

__all__ = ["Processes", "Survey", "survey"]

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Processes:
    """Whether other processes compute the same bits, for what may commit deterministic requests."""

    repeated: bool  # the same pass twice, in every process
    prefix_kept: bool  # a prompt continued from its middle, in every process
    process_changes: list[str]  # what has other bits in a second process
    other_threads: int  # 0 where the backend has no thread pool
    threads_change: list[str]  # what has other bits on that many threads


@dataclass(frozen=True, slots=True)
class Survey:
    """What the check found about one precision."""

    precision: str
    threads: int
    max_batch: int
    verdicts: dict[str, Verdict]  # by shape
    classes: list[list[str]]  # the verifier's first
    window: str  # the verify shape that windows are replayed in
    window_tokens: int
    windows: str | None  # "sliding" or "aligned"; None: deterministic requests are refused
    windows_refusal: str | None
    exact_refusal: str | None  # None: `exact` can be kept
    class_batches: list[int]  # batch sizes that can decode inside the verifier's class
    processes: Processes | None  # None where nothing may commit


def survey(box: Box, precision: str, max_batch: int, *, again: bool, progress: Progress) -> Survey:
    """Check the shapes of ``precision`` and what further processes compute; what is stored is taken from there.

    Args:
        box: the bundle on this box.
        precision: of the target.
        max_batch: most rows of a pass.
        again: find everything anew.
        progress: told what takes long.

    Raises:
        EngineError: an engine gives values that cannot be compared, or a process failed.
        MemoryBudgetError: there is no room to check the largest batch.
    """
    box.cache(box.bundle.engine("decode", precision), max_batch)  # or is refused, before a shape is made for each batch
    shapes = target_shapes(box, precision, max_batch)
    verdicts = box.verdicts(precision, shapes.all, again=again)
    outside = {name: verdict.outside for name, verdict in verdicts.items()}
    promise = promise_of(verdicts, shapes)

    def find_classes() -> list[list[str]]:
        return shape_classes(box.bundle.target, shapes.all, verdicts, box.reference(precision), progress)

    def read_classes(stored: list[list[str]]) -> list[list[str]]:
        return [[str(name) for name in names] for names in stored]

    classes = box.findings.remembered(
        "classes", precision, _key(box, shapes.all), find_classes, read_classes, again=again
    )
    singles = box.bundle.verify_engines(precision)
    return Survey(
        precision=precision,
        threads=box.threads,
        max_batch=max_batch,
        verdicts=verdicts,
        classes=classes,
        window=shapes.main.name,
        window_tokens=shapes.main.width,
        windows=promise.windows,
        windows_refusal=promise.refusal,
        exact_refusal=exact_refusal(outside, singles),
        class_batches=[b for b in shapes.plain if any(outside[s.name] is None for s in shapes.single_steps(b))],
        processes=_processes(box, precision, promise, again, progress) if promise.committing else None,
    )


def _processes(box: Box, precision: str, promise: Promise, again: bool, progress: Progress) -> Processes:
    names = [s.name for s in promise.committing]
    pooled = box.place.backend == "onnxruntime"
    other_threads = 0 if not pooled else 2 if box.threads == 1 else 1

    def find() -> dict[str, object]:
        progress(f"fingerprints of the {precision} engines in this process and two others")
        here = fingerprint(box, precision, promise.committing)
        again_here = fingerprint_elsewhere(box, precision, box.threads, names)
        elsewhere = fingerprint_elsewhere(box, precision, other_threads, names) if pooled else again_here
        every = (here, again_here, elsewhere)
        return asdict(
            Processes(
                repeated=all(f.repeated for f in every),
                prefix_kept=all(f.prefix_kept for f in every),
                process_changes=here.differences(again_here),
                other_threads=other_threads,
                threads_change=here.differences(elsewhere) if pooled else [],
            )
        )

    return box.findings.remembered(
        "processes", precision, _key(box, promise.committing), find, lambda stored: Processes(**stored), again=again
    )


def _key(box: Box, shapes: Sequence[Shape]) -> str:
    return hashlib.sha256("\n".join(map(box.key, shapes)).encode()).hexdigest()[:16]

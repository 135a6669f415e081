"""Fingerprints: digests of what a target's engines compute, to compare processes and thread counts bit for bit.

``python -m kvrelay.fingerprint BUNDLE --precision P`` prints one as a line of JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from .box import Box
from .bundle import open_bundle
from .engine import BoundPass
from .errors import EngineError, KvrelayError, ParameterError
from .invariance import promise_of
from .kv import KVCache
from .place import place_of
from .prober import Prober
from .shapes import Shape, target_shapes
from .target import Target

__all__ = ["Fingerprint", "fingerprint", "fingerprint_elsewhere"]

PREFIX = "a prompt"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the engines of one process computed over one random context, at several depths."""

    precision: str
    threads: int
    sha256: dict[str, str]  # over logits and KV entries, by shape name, and of a whole prompt
    repeated: bool  # every pass gave the same bits when it was run again
    prefix_kept: bool  # a prompt continued from its middle has the bits of one processed from its beginning

    def differences(self, other: Fingerprint) -> list[str]:
        """Return what has other bits there."""
        return [name for name in self.sha256 if self.sha256[name] != other.sha256.get(name)]


def fingerprint(box: Box, precision: str, shapes: Sequence[Shape]) -> Fingerprint:
    """Take the fingerprint of ``shapes`` in this process.

    Raises:
        EngineError: an engine gives values that are not numbers, or nothing but zeros.
        MemoryBudgetError: there is no room for the largest batch's cache.
    """
    prober = Prober(box.bundle.target, shapes, box.reference(precision))
    digests = {s.name: hashlib.sha256() for s in shapes}
    repeated = True
    for depth in prober.depths:
        prober.go_to(depth)
        for shape in shapes:
            bound = prober.bind(shape)
            first = _pass_bytes(prober, bound, shape)
            repeated = repeated and first == _pass_bytes(prober, bound, shape)
            digests[shape.name].update(first)
    cold, warm = _prompt_digests(box, precision, shapes)
    sha256 = {name: digest.hexdigest() for name, digest in digests.items()}
    return Fingerprint(precision, box.threads, {**sha256, PREFIX: cold}, repeated, cold == warm)


def _pass_bytes(prober: Prober, bound: BoundPass, shape: Shape) -> bytes:
    """Run ``shape`` over the same window in every row; return the bytes of its logits and new KV entries."""
    prober.run(bound, shape, [0] * shape.batch, shape.width)
    _require_numbers(shape.name, bound.logits)
    entries = [prober.cache.read(b, prober.depth, prober.depth + shape.width) for b in range(shape.batch)]
    return b"".join(array.tobytes() for array in (bound.logits, *entries))


def _prompt_digests(box: Box, precision: str, shapes: Sequence[Shape]) -> tuple[str, str]:
    """Return the digest of a prompt processed at once, and of one continued from its middle as a kept prefix is."""
    model = box.bundle.target
    entry = box.bundle.engine("prefill", precision)
    cache = KVCache(model, range(model.layers), entry.kv_dtype, memory=box.engine(entry).memory)

    def bind(shape: Shape) -> BoundPass:
        return shape.engine.bind(cache, shape.width, shape.rows)

    prefill = bind(box.shape(entry))
    verify = {s.width: bind(s) for s in shapes if s.engine.entry.role == "verify" and s.batch == 1}
    target = Target(cache, verify, prefill, prefill, mixed_prefill=bool(verify))
    chunk = prefill.input_ids.shape[1]
    length = min(model.context - 1, 5 * chunk + chunk // 2 + 1)
    tokens = np.random.default_rng(20261).integers(0, model.vocab_size, length).tolist()
    middle = length // 2 - (length // 2) % chunk + 1  # inside a chunk

    def digest(starts: Sequence[int]) -> str:
        cache.clear(0)
        for start, end in zip(starts, [*starts[1:], length], strict=True):
            logits = target.prefill(tokens[:end], start)
        _require_numbers("a prompt", logits.whole)
        found = hashlib.sha256(logits.whole.tobytes())
        found.update(cache.read(0, 0, length).tobytes())
        return found.hexdigest()

    return digest([0]), digest([0, middle])


def _require_numbers(what: str, logits: np.ndarray) -> None:
    if not np.isfinite(logits).all() or not logits.any():
        raise EngineError(f"{what} gives logits that are not finite or all zero")


def fingerprint_elsewhere(box: Box, precision: str, threads: int, names: Sequence[str]) -> Fingerprint:
    """Take the fingerprint of the shapes ``names`` at the place of ``box``, in a process of its own.

    Raises:
        EngineError: that process failed; says how.
    """
    place = box.place
    options = ["--precision", precision, "--backend", place.backend]
    if place.backend == "onnxruntime":
        options += ["--provider", place.provider, "--threads", str(threads)]
    most = max(int(name.rpartition("@")[2].partition("x")[0]) for name in names)
    options += ["--max-batch", str(most), "--shapes", ",".join(names)]
    command = [sys.executable, "-m", "kvrelay.fingerprint", str(box.bundle.path.resolve()), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        raise EngineError(f"a process that checks {precision} on {threads} thread(s) failed: {lines[-1]}")
    return Fingerprint(**json.loads(done.stdout))


def _named(box: Box, name: str) -> Shape:
    """Return the shape that :attr:`Shape.name` calls ``name``."""
    engine, _, sizes = name.rpartition("@")
    entry = next((e for e in box.bundle.manifest.engines if e.name == engine), None)
    given = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:r([1-9]\d*))?", sizes)
    shape = box.shape(entry, *(int(size or 1) for size in given.groups())) if entry and given else None
    if shape is None or shape.name != name:
        raise ParameterError(
            f"--shapes {name}: this bundle has no such shape, give ENGINE@BATCHxWIDTH, and behind it rROWS if a "
            "dynamic engine gives more than one row of logits"
        )
    return shape


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvrelay.fingerprint", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--provider")
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--shapes", help="shapes, comma-separated; default: what may commit deterministic requests")
    given = parser.parse_args()
    try:
        bundle = open_bundle(given.bundle)
        if given.precision not in bundle.precisions():
            raise ParameterError(f"--precision {given.precision}: this bundle has {', '.join(bundle.precisions())}")
        box = Box(bundle, given.threads, place=place_of(given.backend, given.provider), max_batch=given.max_batch)
        if given.shapes is not None:
            shapes = [_named(box, name) for name in given.shapes.split(",")]
        else:
            every = target_shapes(box, given.precision, max_batch=given.max_batch)
            promise = promise_of(box.verdicts(given.precision, every.all), every)
            if promise.refusal is not None:
                raise ParameterError(f"--precision {given.precision}: nothing may commit: {promise.refusal}")
            shapes = promise.committing
        print(json.dumps(asdict(fingerprint(box, given.precision, shapes))))
    except KvrelayError as error:
        print(f"kvrelay: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    _main()

"""The plan cache: built engines of this box, found by everything that a plan depends on.

A plan is two files: ``NAME-KEY.plan`` with what the library made, and ``NAME-KEY.json``, written last, with its key,
size and SHA-256. Only what the second one vouches for is ever handed to the library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..boxcache import PART, cache_candidates, publish_bytes, publish_json, read_json
from ..bundle import Bundle
from ..errors import PlanError
from ..manifest import EngineEntry
from .device import ANY_GPU, PlanDevice
from .profiles import Profile, profiles_of

__all__ = ["FOLDER", "OPTIONS", "Plan", "PlanKey", "find_plan", "key_of", "publish_plan", "read_plan", "stored_plan"]

FOLDER = "plans"  # in the bundle's folder of the box's cache

# How kvrelay builds. Whatever changes a plan for equal graphs and profiles is named here, so that old plans are left.
OPTIONS = ("strongly typed", "f32 attention decomposable", "no tf32", "top 64", "log sum")

_REBUILD = "run `kvrelay build` again"


@dataclass(frozen=True, slots=True)
class PlanKey:
    """Everything that a plan depends on. The bundle's weights are part of the folder's name."""

    library: str  # "tensorrt" or "tensorrt-rtx"
    library_version: str
    compute_capability: tuple[str, ...]  # ("sm87",); several for plans of TensorRT-RTX
    gpu_name: str
    graph_sha256: str
    profiles: tuple[Profile, ...]
    options: tuple[str, ...]

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan on disk. :func:`read_plan` compares size and content."""

    path: Path
    key: PlanKey
    sha256: str
    size: int


def key_of(entry: EngineEntry, bundle: Bundle, device: PlanDevice, max_batch: int) -> PlanKey:
    """Return the key of the plan of ``entry`` for ``device``."""
    profiles = profiles_of(entry, bundle.manifest.models[entry.model], max_batch)
    return PlanKey(
        library=device.backend,
        library_version=device.library_version,
        compute_capability=device.compute_capabilities,
        gpu_name=device.gpu_name,
        graph_sha256=entry.file.sha256,
        profiles=profiles,
        options=OPTIONS,
    )


def stored_plan(folder: Path, entry: EngineEntry, key: PlanKey) -> Plan | None:
    """Return the plan of exactly this key in ``folder``, unread, or None."""
    return next((plan for plan in _stored(folder, entry) if plan.key == key), None)


def find_plan(bundle: Bundle, entry: EngineEntry, device: PlanDevice, max_batch: int = 1) -> Plan:
    """Return the plan of ``entry`` that runs on ``device`` in batches of up to ``max_batch``.

    It is looked for in every folder that may be the box's cache, so that plans in a read-only folder serve too.

    Raises:
        PlanError: there is none. The message says what the plans at hand are for, and how to build.
    """
    command = f"kvrelay build {bundle.path}"
    if device.backend != "tensorrt":
        command += f" --backend {device.backend}"
    stored = [plan for place in cache_candidates(bundle.path) for plan in _stored(place / FOLDER, entry)]
    wanted = key_of(entry, bundle, device, max_batch)
    here = [plan for plan in stored if _difference(plan.key, wanted) is None]
    large_enough = [plan for plan in here if _most_rows(plan.key) >= _most_rows(wanted)]
    if large_enough:
        return min(large_enough, key=lambda plan: _most_rows(plan.key))
    if here:
        most = max(_most_rows(plan.key) for plan in here)
        raise PlanError(
            f"the plan of {entry.name} holds batches of up to {most}, {max_batch} are needed: "
            f"`{command} --max-batch {max_batch}`"
        )
    if not stored:
        raise PlanError(f"{entry.name} has no plan for {device}: build it on this box with `{command}`")
    found = "; ".join(dict.fromkeys(str(_difference(plan.key, wanted)) for plan in stored))
    raise PlanError(f"{entry.name} has no plan for {device}; what is stored is {found}: rebuild with `{command}`")


def read_plan(plan: Plan) -> bytes:
    """Return the plan's bytes, which are what was built: nothing else is ever deserialised.

    Raises:
        PlanError: the file is missing, cut off or altered.
    """
    try:
        data = plan.path.read_bytes()
    except OSError as error:
        raise PlanError(f"{plan.path} cannot be read ({error.strerror or error}): {_REBUILD}") from None
    if hashlib.sha256(data).hexdigest() == plan.sha256:
        return data
    if not data:
        what = "is empty"
    elif len(data) != plan.size:
        what = f"has {len(data)} bytes"
    else:
        what = "has other content"
    raise PlanError(f"{plan.path} {what}, {plan.size} bytes with SHA-256 {plan.sha256[:12]}... were built: {_REBUILD}")


def publish_plan(folder: Path, entry: EngineEntry, key: PlanKey, data: Any) -> Plan:
    """Write a plan so that readers find it whole or not at all. The caller holds the folder's lock.

    Args:
        folder: of the plans.
        entry: its engine.
        key: what it was built for.
        data: what the library made, anything with the buffer protocol.

    Raises:
        CacheDirectoryError: the folder cannot be written, or is full.
    """
    for left in folder.glob(f"*{PART}"):  # by a killed build: under the lock nobody else is at work
        left.unlink(missing_ok=True)
    content = memoryview(data)
    path = folder / f"{entry.name}-{key.digest()}.plan"
    publish_bytes(path, content)
    plan = Plan(path, key, hashlib.sha256(content).hexdigest(), content.nbytes)
    facts = {"engine": entry.name, "key": asdict(key), "sha256": plan.sha256, "size": plan.size}
    publish_json(path.with_suffix(".json"), facts)
    return plan


def _stored(folder: Path, entry: EngineEntry) -> Iterator[Plan]:
    """Yield the plans of ``entry`` that a record vouches for."""
    for record in sorted(folder.glob("*.json")):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            facts: Any = read_json(record)
            if facts["engine"] == entry.name:
                yield Plan(record.with_suffix(".plan"), _read_key(facts["key"]), facts["sha256"], facts["size"])


def _read_key(facts: dict[str, Any]) -> PlanKey:
    profiles = [
        Profile(name=p["name"], batch=tuple(p["batch"]), sequence=tuple(p["sequence"]), rows=tuple(p["rows"]))
        for p in facts["profiles"]
    ]
    lists = {name: tuple(facts[name]) for name in ("compute_capability", "options")}
    return PlanKey(**{**facts, **lists, "profiles": tuple(profiles)})


def _most_rows(key: PlanKey) -> int:
    return max(profile.batch[2] for profile in key.profiles)


def _difference(found: PlanKey, wanted: PlanKey) -> str | None:
    """Return what ``found`` is for, if it does not serve; how many rows it holds is not looked at."""
    if (found.library, found.library_version) != (wanted.library, wanted.library_version):
        return f"for {found.library} {found.library_version}"
    if not set(wanted.compute_capability) <= set(found.compute_capability):
        return f"for {', '.join(found.compute_capability)}"
    if found.gpu_name not in (ANY_GPU, wanted.gpu_name):
        return f"for {found.gpu_name}"
    if found.graph_sha256 != wanted.graph_sha256:
        return f"of another graph ({found.graph_sha256[:12]}...)"
    if found.options != wanted.options:
        return "built by another version of kvrelay"
    if [(p.name, p.sequence, p.rows) for p in found.profiles] != [
        (p.name, p.sequence, p.rows) for p in wanted.profiles
    ]:
        return "for other shapes"
    return None

"""The box's cache: facts and files that belong to this machine and not to a bundle.

``$KVRELAY_CACHE`` names the folder; otherwise ``kvrelay-cache`` beside the bundle is used or, where that cannot be
written, ``$XDG_CACHE_HOME/kvrelay`` (``~/.cache/kvrelay``).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from .errors import CacheDirectoryError

__all__ = [
    "PART",
    "cache_candidates",
    "cache_directory",
    "cpu_identity",
    "cpu_name",
    "lock",
    "publish_bytes",
    "publish_json",
    "read_json",
]

PART = ".part"  # ends the name of a file that is being written; what a killed run left behind may be deleted


def cache_directory(bundle: Path) -> Path:
    """Return the folder for what this box knows about ``bundle``, created and writable.

    Raises:
        CacheDirectoryError: none of the candidates can be written; the message lists them.
    """
    problems = []
    for folder in cache_candidates(bundle):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
    raise CacheDirectoryError(
        f"no folder for the box's cache can be written ({'; '.join(problems)}); "
        "set KVRELAY_CACHE to a writable folder with room for about twice the bundle"
    )


def cache_candidates(bundle: Path) -> list[Path]:
    """Return the folders that may hold what this box knows about ``bundle``, in the order in which they are tried."""
    named = os.environ.get("KVRELAY_CACHE")
    digest = hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
    places = [Path(named)] if named else [bundle.parent / "kvrelay-cache", *_user_cache()]
    return [place / digest[:16] for place in places]


def _user_cache() -> list[Path]:
    if named := os.environ.get("XDG_CACHE_HOME"):
        return [Path(named) / "kvrelay"]
    try:
        return [Path.home() / ".cache" / "kvrelay"]
    except RuntimeError:  # the user of a service may have no home
        return []


@lru_cache(maxsize=1)
def cpu_identity() -> str:
    """Return a digest of the CPU model and its instruction sets: packed weights and bits depend on both."""
    facts = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "flags", "Features", "CPU part"):
                facts.append(" ".join(sorted(value.split())))
            if not key.strip() and len(facts) > 2:
                break
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """Return the CPU's name, for people."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware"):
                return value.strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def lock(folder: Path, blocked: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the cache's lock: one process prepares, builds or probes at a time, the others find its result.

    ``blocked`` is called before waiting for another holder.

    Raises:
        CacheDirectoryError: the folder's lock cannot be taken: it is another user's, or the file system has none.
    """
    path = folder / "lock"
    with contextlib.ExitStack() as held:
        try:
            handle = held.enter_context(open(path, "a+b"))
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                blocked()
                fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            raise CacheDirectoryError(
                f"cannot lock {path}: {error.strerror or error}; set KVRELAY_CACHE to a folder of your own"
            ) from None
        held.callback(fcntl.flock, handle, fcntl.LOCK_UN)
        yield


def publish_json(path: Path, data: Any) -> None:
    """Write ``data`` to ``path`` so that a reader sees the old file or the new one, whole.

    Raises:
        CacheDirectoryError: the folder cannot be written, or is full.
    """
    publish_bytes(path, json.dumps(data, indent=1).encode())


def publish_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write ``content`` to ``path`` so that a reader, also after a power cut, sees the old file or the new one, whole.

    Raises:
        CacheDirectoryError: the folder cannot be written, or is full.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{PART}")
    try:
        with open(part, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink()
        if isinstance(error, OSError):
            raise CacheDirectoryError(
                f"cannot write {path}: {error.strerror or error}; "
                "free space there or set KVRELAY_CACHE to another folder"
            ) from None
        raise


def read_json(path: Path) -> Any | None:
    """Return the content of ``path``, or None if it is absent or not JSON (it is then made again)."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None

"""What was found out about a bundle on this box, by kind and precision, in the box's cache."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from .boxcache import lock, publish_json, read_json

__all__ = ["Findings"]

_T = TypeVar("_T")

# Of what is stored. 2: the names of shapes tell their logit rows; before, shapes of other rows shared findings.
_FORMAT = "2"


class Findings:
    """Findings under one kvrelay and one place: each combination has files of its own.

    Args:
        folder: of the bundle in the box's cache.
        place: what they hold for: library and version, provider, device, threads.
        progress: told of waiting for another process.
    """

    def __init__(self, folder: Path, place: Sequence[str], progress: Callable[[str], None] = lambda _: None) -> None:
        self._folder = folder
        self._progress = progress
        self.key = hashlib.sha256("\n".join((_FORMAT, version("kvrelay"), *place)).encode()).hexdigest()[:16]

    def remembered(
        self, kind: str, precision: str, key: str, find: Callable[[], Any], read: Callable[[Any], _T], *, again: bool
    ) -> _T:
        """Return what is stored under ``kind`` and ``key``; if nothing is, or ``again``, find and store it.

        Other processes are not kept waiting while it is found: ``find`` may start some that use this cache.

        Args:
            kind: of fact.
            precision: of the target.
            key: what the fact is about.
            find: returns it in a form that JSON has.
            read: turns that form into the fact.
            again: find it although it is stored.
        """
        file = self._file(kind, precision)
        if not again:
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):  # absent or damaged
                return read((read_json(file) or {})[key])
        found = find()
        with lock(self._folder):
            stored = read_json(file)
            publish_json(file, {**(stored if isinstance(stored, dict) else {}), key: found})
        return read(found)

    def _file(self, kind: str, precision: str) -> Path:
        return self._folder / f"{kind}-{precision}-{self.key}.json"

    def completed(
        self,
        kind: str,
        precision: str,
        missing: Callable[[dict[str, Any]], dict[str, Any]],
        read: Callable[[dict[str, Any]], _T],
    ) -> _T:
        """Read what is stored under ``kind``, after adding what ``missing`` finds that it lacks."""
        file = self._file(kind, precision)

        def attempt(stored: dict[str, Any]) -> _T:
            found = missing(stored)
            result = read({**stored, **found})
            if found:
                publish_json(file, {**stored, **found})
            return result

        # One process measures, the others find its figures.
        with lock(
            self._folder, lambda: self._progress(f"waiting for what another process finds out in {self._folder}")
        ):
            stored = read_json(file)
            try:
                return attempt(stored or {})
            except (KeyError, TypeError, ValueError, AttributeError):
                if not stored:
                    raise
                return attempt({})  # the file was damaged: measure again

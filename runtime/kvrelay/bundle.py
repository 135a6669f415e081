"""Open a bundle: everything is validated before anything is loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from .boxcache import cache_directory, publish_json, read_json
from .errors import BundleError
from .manifest import SCHEMA_VERSION, EngineEntry, FileEntry, Manifest, ModelEntry

__all__ = ["Bundle", "file_sha256", "open_bundle"]

_REBUILD = "export it again with `kvrelay export`"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A validated bundle on disk."""

    path: Path
    manifest: Manifest

    @property
    def target(self) -> ModelEntry:
        return self.manifest.models[self.manifest.target]

    def engines(self, *, role: str | None = None, precision: str | None = None) -> list[EngineEntry]:
        """Return the target's and drafts' engines that match."""
        return [
            e
            for e in self.manifest.engines
            if (role is None or e.role == role) and (precision is None or e.precision == precision)
        ]

    def engine(self, role: str, precision: str) -> EngineEntry:
        """Return the one engine of the target in a role.

        Raises:
            BundleError: there is none, or there are several.
        """
        found = self.engines(role=role, precision=precision)
        if len(found) != 1:
            raise BundleError(
                f"{self.path} has {len(found)} {precision} engines of role {role}, 1 is needed; {_REBUILD}"
            )
        return found[0]

    def verify_engines(self, precision: str) -> list[EngineEntry]:
        """Return the target's verify engines of one row.

        Raises:
            BundleError: there is none.
        """
        found = [e for e in self.engines(role="verify", precision=precision) if e.batch == 1]
        if not found:
            raise BundleError(f"{self.path} has no {precision} verify engine of one row; {_REBUILD}")
        return found

    def precisions(self) -> list[str]:
        """Return the precisions in which the target has verify engines, in manifest order.

        Raises:
            BundleError: it has none.
        """
        found = [e.precision for e in self.manifest.engines if e.role == "verify"]
        if not found:
            raise BundleError(f"{self.path} has no verify engine; {_REBUILD}")
        return list(dict.fromkeys(found))

    def files(self) -> Iterator[FileEntry]:
        """All files that the manifest names."""
        m = self.manifest
        yield from (m.weights, m.tokenizer, *(e.file for e in m.engines))
        if m.chat_template is not None:
            yield m.chat_template


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(handle)


def _digest(handle: object) -> str:
    digest = hashlib.sha256()
    while chunk := handle.read(1 << 20):  # type: ignore[attr-defined]
        digest.update(chunk)
    return digest.hexdigest()


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Open and validate the bundle at ``path``.

    Sizes are compared at every opening; contents are hashed once for each version of a file on a box (its device,
    inode, size and times), since hashing a large bundle costs seconds.

    Raises:
        BundleError: a file is missing, truncated or altered, or the manifest is not one that this version reads.
    """
    try:
        folder = Path(path)
    except TypeError:
        raise BundleError(f"bundle={path!r}: the path of a folder is needed, as text or a Path") from None
    bundle = Bundle(folder, _read_manifest(folder))
    for entry in bundle.files():
        _check_size(folder, entry)
    _check_hashes(bundle)
    return bundle


def _read_manifest(folder: Path) -> Manifest:
    file = folder / "manifest.json"
    if not folder.is_dir():
        raise BundleError(f"no bundle at {folder}: the folder does not exist; make one with `kvrelay export`")
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise BundleError(f"{folder} is not a bundle: it has no manifest.json; {_REBUILD}") from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{file} cannot be read: {error}; {_REBUILD}") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BundleError(
            f"{file} has schema version {version}, this kvrelay reads up to {SCHEMA_VERSION}: "
            "upgrade kvrelay or export the bundle with this version"
        )
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "manifest"
        raise BundleError(f"{file} is not valid at {where}: {first['msg']}; {_REBUILD}") from None


def _check_size(folder: Path, entry: FileEntry) -> None:
    file = folder / entry.path
    if Path(entry.path).is_absolute() or ".." in Path(entry.path).parts:
        raise BundleError(f"the manifest names {entry.path!r}, which lies outside the bundle; {_REBUILD}")
    try:
        size = file.stat().st_size
    except OSError as error:
        raise BundleError(f"{file} is missing ({error.strerror}); copy the whole bundle or {_REBUILD}") from None
    if size != entry.bytes:
        raise BundleError(
            f"{file} has {size} bytes, the manifest says {entry.bytes}: truncated or replaced; {_REBUILD}"
        )


def _check_hashes(bundle: Bundle) -> None:
    stamps_file = cache_directory(bundle.path) / "verified.json"
    stamps = read_json(stamps_file)
    known = dict(stamps) if isinstance(stamps, dict) else {}
    for entry in bundle.files():
        file = bundle.path / entry.path
        info = file.stat()
        stamp = [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns, entry.sha256]
        key = str(file.resolve())
        if known.get(key) == stamp:
            continue
        try:
            found = file_sha256(file)
        except OSError as error:
            raise BundleError(f"{file} cannot be read ({error.strerror}); make it readable or {_REBUILD}") from None
        if found != entry.sha256:
            raise BundleError(
                f"{file} has SHA-256 {found[:12]}..., the manifest says {entry.sha256[:12]}...: altered; {_REBUILD}"
            )
        known[key] = stamp
    if known != stamps:
        publish_json(stamps_file, known)

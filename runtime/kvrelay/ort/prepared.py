"""Prepare engines for this box: optimise once, keep packed weights once.

ONNX Runtime packs weights into this CPU's layout, privately for each session: two sessions of one model would hold
them twice. Its optimised model can be saved with the packed weights in an external file that later sessions map.
Here all engines of a bundle share one such file, the pool: tensors and packed weights are kept by content hash, so
that every engine, a layer-skipping draft included, maps the same pages.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from ..boxcache import cpu_identity, lock, publish_json, read_json
from ..errors import CacheDirectoryError, EngineError
from .external_data import ExternalData, redirect
from .library import onnxruntime
from .threads import load_session

__all__ = ["prepare"]

# Pages: packed weights that do not begin at a multiple of 128 bytes are copied into every session (seen in 1.32).
_ALIGNMENT = 4096
_PACKED = re.compile(r"(?P<head>.*\|)(?P<offset>\d+);(?P<length>\d+);(?P<tail>[^;]*)")


def prepare(model: Path, sha256: str, cache: Path) -> Path:
    """Return the prepared form of the ONNX file ``model``, made on first use.

    Args:
        model: an engine of a bundle.
        sha256: its hash, part of the key.
        cache: the bundle's folder in the box's cache.

    Raises:
        EngineError: ONNX Runtime refuses the model, or the cache was damaged.
        CacheDirectoryError: the cache ran out of space.
    """
    ort = onnxruntime()
    folder = cache / f"ort-{ort.__version__}-{cpu_identity()}"
    prepared = folder / f"{sha256[:32]}.onnx"
    if prepared.exists() and not _Pool(folder).changed():
        return prepared
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder):
        # Another process may have been adding to it, or was killed while it was; or somebody changed it.
        if (pool := _Pool(folder)).changed():
            pool.verify()
        if not prepared.exists():
            for left in folder.glob("work-*"):  # by a killed run: under the lock nobody else is at work
                shutil.rmtree(left, ignore_errors=True)
            try:
                _prepare(model, prepared)
            except OSError as error:
                raise CacheDirectoryError(
                    f"cannot prepare {model.name} in {folder}: {error.strerror or error}; "
                    "free space there or set KVRELAY_CACHE to another folder"
                ) from None
    return prepared


def _prepare(model: Path, prepared: Path) -> None:
    ort = onnxruntime()
    work = Path(tempfile.mkdtemp(dir=prepared.parent, prefix="work-"))
    try:
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(work / "model.onnx")
        for key, value in (
            ("session.optimized_model_external_initializers_file_name", "weights.bin"),
            ("session.optimized_model_external_initializers_min_size_in_bytes", "1024"),
            ("session.save_external_prepacked_constant_initializers", "1"),
        ):
            options.add_session_config_entry(key, value)
        load_session(model, options)
        pool = _Pool(prepared.parent)
        (work / "weights.bin").touch()  # a model without large tensors has none
        with open(work / "weights.bin", "rb") as data:
            graph = redirect((work / "model.onnx").read_bytes(), lambda entry: pool.adopt(entry, data))
        pool.publish()
        (work / "model.onnx").write_bytes(graph)
        os.replace(work / "model.onnx", prepared)
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _Pool:
    """An append-only file of tensors, found by content."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "weights.bin"
        self.index_file = folder / "weights.json"
        self.tensors: dict[str, list[int]] = {}  # by content: offset and length
        self.modified = 0  # of the data file, in ns, when the index was written
        with contextlib.suppress(KeyError, TypeError, ValueError):
            stored: Any = read_json(self.index_file)
            self.tensors = {key: [int(offset), int(length)] for key, (offset, length) in stored["tensors"].items()}
            self.modified = int(stored["modified"])
        # Bytes after the last indexed tensor are what a killed run left behind; new tensors go over them. Without an
        # index nothing is known to be free.
        self.end = max((sum(place) for place in self.tensors.values()), default=self._size())

    def _size(self) -> int:
        return self.data.stat().st_size if self.data.exists() else 0

    def changed(self) -> bool:
        """Whether the data file is not the one that the index was written for."""
        return bool(self.tensors) and (not self.data.exists() or self.data.stat().st_mtime_ns != self.modified)

    def verify(self) -> None:
        """Read every tensor again; if all are intact, as after a killed run, remember the file as it is.

        Raises:
            EngineError: a tensor is not what it was: packed weights have no checksum that ONNX Runtime would look at.
        """
        intact = self._size() >= self.end
        if intact:
            with open(self.data, "rb") as data:
                for key, (offset, length) in self.tensors.items():
                    data.seek(offset)
                    intact = intact and _content_key(data.read(length)) == key
        if not intact:
            raise EngineError(
                f"{self.data} has {self._size()} bytes, its index names {self.end} of other content: "
                f"the box's cache is damaged, delete {self.data.parent}"
            )
        self.publish()

    def adopt(self, entry: ExternalData, source: BinaryIO) -> ExternalData:
        """Keep what ``entry`` points to in ``source`` and return the entry that points into the pool."""
        new = dict(entry)
        new["location"] = self.data.name
        new["offset"] = str(self._keep(source, int(entry["offset"]), int(entry["length"])))
        for key in [k for k in entry if k.startswith("prepacked")]:
            match = _PACKED.fullmatch(entry[key])
            if match is None:
                raise EngineError(f"this ONNX Runtime writes packed weights in an unknown form: {entry[key]!r}")
            offset = self._keep(source, int(match["offset"]), int(match["length"]))
            new[key] = f"{match['head']}{offset};{match['length']};{match['tail']}"
        return new

    def _keep(self, source: BinaryIO, offset: int, length: int) -> int:
        source.seek(offset)
        content = source.read(length)
        key = _content_key(content)
        if key not in self.tensors:
            at = -(-self.end // _ALIGNMENT) * _ALIGNMENT
            with open(self.data, "r+b" if self.data.exists() else "w+b") as pool:
                pool.seek(at)
                pool.write(content)
            self.tensors[key] = [at, length]
            self.end = at + length
        return self.tensors[key][0]

    def publish(self) -> None:
        """Write the index; what it names is on the disk before it."""
        if not self.data.exists():
            return
        with open(self.data, "rb") as data:
            os.fsync(data.fileno())
        self.modified = self.data.stat().st_mtime_ns
        publish_json(self.index_file, {"modified": self.modified, "tensors": self.tensors})


def _content_key(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=20).hexdigest()

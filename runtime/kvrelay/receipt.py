"""Receipts: what a deterministic output depended on, in a form that it can be made again from."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from .box import Box
from .bundle import file_sha256
from .errors import ParameterError
from .manifest import EngineEntry, Strict
from .request import Request
from .sampling import SamplingParams

__all__ = ["Conditions", "Receipt", "conditions_of", "output_digest", "read_receipt", "receipt_of"]


_OPTIONS = {*SamplingParams.__slots__, "seed", "max_new_tokens", "stop", "ignore_eos"}


class Conditions(Strict):
    """What the bits of an output depend on besides the request."""

    kvrelay: str
    backend: str  # library and version
    provider: str  # of ONNX Runtime, in order of preference; the backend's name for others
    libraries: str = ""  # CUDA's library and driver
    device: str  # name of the CPU or the GPU
    device_id: str  # digest of its model, and of a CPU's instruction sets
    threads: int
    manifest_sha256: str
    precision: str
    engines: dict[str, str]  # SHA-256 of each engine that may have committed, of its plan on TensorRT, by name
    windows: str  # "sliding", or "aligned to N": windows then begin at absolute multiples of N

    def differences(self, other: Conditions) -> dict[str, tuple[Any, Any]]:
        """Return the fields that differ, with both values."""
        mine, theirs = self.model_dump(), other.model_dump()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


class Receipt(Strict):
    """One deterministic output: what it was made from and under, and its digest."""

    schema_version: Literal[1] = 1
    bundle: str  # folder
    conditions: Conditions
    group: int
    window: int
    prompt_ids: list[int]
    options: dict[str, Any]  # as for Engine.submit
    finish_reason: str
    tokens: int = Field(ge=0)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")  # SHA-256 over ids and scores, bit for bit

    @field_validator("options")
    @classmethod
    def _options_are_known(cls, options: dict[str, Any]) -> dict[str, Any]:
        if odd := sorted(set(options) ^ _OPTIONS):
            raise ValueError(f"{odd[0]!r} is {'unknown' if odd[0] in options else 'missing'}")
        return options

    def save(self, path: str | PathLike[str]) -> None:
        """Write the receipt as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read_receipt(path: str | PathLike[str]) -> Receipt:
    """Read a receipt.

    Raises:
        ParameterError: the file cannot be read, or is no receipt.
    """
    try:
        return Receipt.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise ParameterError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ParameterError(f"{path} is not a receipt of this version, at {where}: {first['msg']}") from None


def output_digest(token_ids: list[int], scores: list[float]) -> str:
    """Return the digest of an output: int64 ids and float64 scores, little-endian."""
    count = len(token_ids)
    return hashlib.sha256(struct.pack(f"<{count}q{count}d", *token_ids, *scores)).hexdigest()


def conditions_of(box: Box, precision: str, engines: list[EngineEntry], windows: str) -> Conditions:
    """Return the conditions on this box."""
    return Conditions(
        kvrelay=version("kvrelay"),
        **asdict(box.identity),
        threads=box.threads,
        manifest_sha256=file_sha256(box.bundle.path / "manifest.json"),
        precision=precision,
        engines={e.name: box.sha256(e) for e in sorted(engines, key=lambda e: e.name)},
        windows=windows,
    )


def receipt_of(
    request: Request, *, folder: str, conditions: Conditions, group: int, window: int, options: dict[str, Any]
) -> Receipt:
    """Return the receipt of a request that has ended; ``folder`` is the bundle's, wherever the process stands."""
    return Receipt(
        bundle=folder,
        conditions=conditions,
        group=group,
        window=window,
        prompt_ids=request.tokens[: request.prompt_tokens],
        options=json.loads(json.dumps(options)),
        finish_reason=request.finish_reason or "",
        tokens=len(request.output),
        digest=output_digest(request.output, request.scores),
    )

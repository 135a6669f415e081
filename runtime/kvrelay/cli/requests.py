"""Requests as JSON objects: one a line in a file, checked before any is run."""

from __future__ import annotations

import inspect
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import KvrelayError, ParameterError
from ..serving import Engine

__all__ = ["OPTIONS", "BatchRequest", "check_requests", "read_requests"]

Scalar = str | int | float | bool | None

# Whatever `Engine.submit` takes besides the prompt and `deterministic`.
OPTIONS = tuple(inspect.signature(Engine.submit).parameters)[3:]
_KEYS = ("prompt", "id", "deterministic", *OPTIONS)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line."""

    where: str  # file and line, for errors
    id: Scalar
    prompt: Any
    deterministic: bool
    options: dict[str, Any]


def read_requests(path: Path, *, chat: bool, deterministic: bool) -> list[BatchRequest]:
    """Read one request a line; blank lines are left out.

    Args:
        path: the file, "-" for standard input.
        chat: text prompts become a user's message.
        deterministic: mark all.

    Raises:
        ParameterError: the file cannot be read, a line is not a JSON object of known keys, or there is none.
    """
    name = "standard input" if str(path) == "-" else str(path)
    found = []
    # At newlines alone: JSON may hold the other characters that Python takes for the end of a line.
    for number, line in enumerate(_read(path, name).split(b"\n"), 1):
        if line.strip():
            found.append(_parse(line, f"{name}, line {number}", chat=chat, deterministic=deterministic))
    if not found:
        raise ParameterError(f"{name} has no requests: give one JSON object a line, with a prompt")
    return found


def check_requests(engine: Engine, requests: list[BatchRequest]) -> None:
    """Refuse every request that ``engine`` would refuse.

    Raises:
        ParameterError: names the line and what is wrong.
    """
    for request in requests:
        try:
            engine.check(request.prompt, deterministic=request.deterministic, **request.options)
        except KvrelayError as error:
            raise ParameterError(f"{request.where}: {error}") from None


def _read(path: Path, name: str) -> bytes:
    try:
        if str(path) != "-":
            return path.read_bytes()
        if sys.stdin is None:
            raise ParameterError("the requests are to be read from standard input, which is closed")
        return sys.stdin.buffer.read()
    except OSError as error:
        raise ParameterError(f"{name} cannot be read: {error.strerror or error}") from None


def _parse(line: bytes, where: str, *, chat: bool, deterministic: bool) -> BatchRequest:
    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is no JSON number")

    def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ParameterError(f"{where}: key {key!r} is given more than once")
            found[key] = value
        return found

    try:
        data = json.loads(line.decode("utf-8-sig"), parse_constant=refuse_constant, object_pairs_hook=each_key_once)
    except ParameterError:
        raise
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8
        raise ParameterError(f"{where}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ParameterError(f"{where}: a JSON object is needed, got {type(data).__name__}")
    unknown = sorted(set(data) - set(_KEYS))
    if unknown:
        raise ParameterError(f"{where}: unknown key {unknown[0]!r}; a request has {', '.join(_KEYS)}")
    if "prompt" not in data:
        raise ParameterError(f"{where}: no prompt")
    name = data.get("id")
    if not isinstance(name, Scalar) or (isinstance(name, float) and not math.isfinite(name)):
        raise ParameterError(f"{where}: id is {name!r}: text, a finite number, true, false or null")
    own = data.get("deterministic", False)
    if not isinstance(own, bool):
        raise ParameterError(f"{where}: deterministic={own!r}: true or false")
    prompt = data["prompt"]
    return BatchRequest(
        where=where,
        id=name,
        prompt=[{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt,
        deterministic=deterministic or own,
        options={key: data[key] for key in OPTIONS if key in data},
    )

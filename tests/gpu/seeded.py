"""A model whose weights are made from a seed, so that only its graphs need to travel to a box.

Each weight is a whole number of -7 to 7 times a power of two: the same bytes come from every version of numpy, and
int4 holds it exactly. The head is the embedding with its rows moved on by one within runs of 64 ids, so that the model
tends to count; its layers add enough of their own that drafts which leave some out are sometimes wrong.

A bundle without weights has ``seeded.json`` in their place: for each tensor of the weights file where it lies, which
weight it is and in which form. What is made again has the hash that the manifest names.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

__all__ = ["FORMS", "RECIPE", "Piece", "make_weights", "seeded_weight", "succeeding"]

RECIPE = "seeded.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
BLOCK = 32
RUN = 64  # ids that follow one another in a circle
_SCALES = {EMBEDDING: 2.0**-3, HEAD: 2.0**-6}
_LAYER_SCALE = 2.0**-7

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a weights file."""

    offset: int
    length: int
    weight: str  # of the checkpoint; empty for a constant, which is kept as it is
    shape: tuple[int, ...]  # of the weight
    form: str  # one of FORMS, or the constant in base64


def succeeding(ids: Array) -> Array:
    """Return the id that the model tends to give after each of ``ids``."""
    return ids - ids % RUN + (ids + 1) % RUN


def _whole(name: str, shape: tuple[int, ...]) -> Array:
    """Return whole numbers ``[out, in]`` of -7 to 7 that a weight's name decides, each block of 32 holding a 7."""
    bits = np.random.PCG64(zlib.crc32(name.encode()))
    count = int(np.prod(shape))
    raw = bits.random_raw(-(-count // 8)).view(np.uint8)[:count]
    numbers = (raw % 15).astype(np.int8).reshape(shape) - 7
    numbers[:, ::BLOCK] = np.where(numbers[:, ::BLOCK] < 0, -7, 7)
    return numbers


def _numbers(name: str, shape: tuple[int, ...]) -> Array:
    if name != HEAD:
        return _whole(name, shape)
    rows = np.arange(shape[0])
    known = rows < shape[0] - shape[0] % RUN
    numbers = _whole(EMBEDDING, shape)
    moved = np.empty_like(numbers)
    moved[np.where(known, succeeding(rows), rows)] = numbers
    return moved


def _scale(name: str) -> np.float32:
    return np.float32(_SCALES.get(name, _LAYER_SCALE))


def seeded_weight(name: str, shape: tuple[int, ...]) -> Array:
    """Return the weight ``name`` of the checkpoint, float32."""
    if len(shape) == 1:  # norms
        return np.ones(shape, np.float32)
    return _numbers(name, shape).astype(np.float32) * _scale(name)


def _int4(name: str, shape: tuple[int, ...]) -> bytes:
    flat = np.ascontiguousarray(_numbers(name, shape).T).reshape(-1)
    return ((flat[0::2] & 0xF) | ((flat[1::2] & 0xF) << 4)).astype(np.uint8).tobytes()


def _int4_scales(name: str, shape: tuple[int, ...]) -> bytes:
    scale = np.float32(7) * _scale(name) * np.float32(1 / 7)
    return np.full((shape[1] // BLOCK, shape[0]), np.float32(np.float16(scale))).tobytes()


# How the exporter stores a weight [out, in]; "kn" is [in, out].
FORMS: dict[str, Callable[[str, tuple[int, ...]], bytes]] = {
    "float32": lambda name, shape: seeded_weight(name, shape).tobytes(),
    "float16": lambda name, shape: seeded_weight(name, shape).astype(np.float16).tobytes(),
    "float32 kn": lambda name, shape: np.ascontiguousarray(seeded_weight(name, shape).T).tobytes(),
    "float16 kn": lambda name, shape: np.ascontiguousarray(seeded_weight(name, shape).astype(np.float16).T).tobytes(),
    "int4 kn": _int4,
    "int4 scales kn": _int4_scales,
}


def write_recipe(folder: Path, file: str, pieces: list[Piece]) -> None:
    """Write the recipe of the weights file ``file`` of a bundle."""
    (folder / RECIPE).write_text(json.dumps({"file": file, "pieces": [asdict(p) for p in pieces]}))


def make_weights(folder: Path) -> Path:
    """Make the weights file of the bundle in ``folder`` again, if it is not there; return it."""
    recipe = json.loads((folder / RECIPE).read_text())
    path = folder / recipe["file"]
    if not path.exists():
        part = path.with_suffix(".part")
        with open(part, "wb") as out:
            for offset, content in _contents(recipe["pieces"]):
                out.write(b"\0" * (offset - out.tell()))
                out.write(content)
        part.rename(path)
    return path


def _contents(pieces: list[dict[str, object]]) -> Iterator[tuple[int, bytes]]:
    for fields in pieces:
        piece = Piece(**{**fields, "shape": tuple(fields["shape"])})  # type: ignore[arg-type]
        made = FORMS[piece.form](piece.weight, piece.shape) if piece.weight else base64.b64decode(piece.form)
        if len(made) != piece.length:
            raise ValueError(f"{piece.weight} as {piece.form} has {len(made)} bytes, the recipe says {piece.length}")
        yield piece.offset, made

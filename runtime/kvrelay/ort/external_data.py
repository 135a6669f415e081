"""Read and redirect the external data of an ONNX file, without the onnx package.

An ONNX file is a protobuf message (onnx.proto3; wire format: protobuf.dev/programming-guides/encoding). Only the path
model -> graph -> initializer -> external_data is looked at; all other bytes are passed on as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

__all__ = ["ExternalData", "redirect"]

ExternalData = dict[str, str]  # location, offset, length, and what ONNX Runtime adds

_MODEL_GRAPH = 7
_GRAPH_INITIALIZER = 5
_TENSOR_EXTERNAL_DATA = 13
_ENTRY_KEY = 1
_ENTRY_VALUE = 2
_LENGTH_DELIMITED = 2


def redirect(model: bytes, change: Callable[[ExternalData], ExternalData]) -> bytes:
    """Return ``model`` with the external data entry of each initializer replaced by ``change(entry)``.

    Raises:
        ValueError: ``model`` is not a protobuf message.
    """
    return _rewrite(model, _MODEL_GRAPH, lambda g: _rewrite(g, _GRAPH_INITIALIZER, lambda t: _tensor(t, change)))


def _tensor(tensor: bytes, change: Callable[[ExternalData], ExternalData]) -> bytes:
    entry: ExternalData = {}
    rest = bytearray()
    for number, whole, payload in _fields(tensor):
        if number == _TENSOR_EXTERNAL_DATA:
            pair = {n: p.decode() for n, _, p in _fields(payload)}
            entry[pair[_ENTRY_KEY]] = pair.get(_ENTRY_VALUE, "")
        else:
            rest += whole
    if not entry:
        return tensor
    for key, value in change(entry).items():
        pair_bytes = _field(_ENTRY_KEY, key.encode()) + _field(_ENTRY_VALUE, value.encode())
        rest += _field(_TENSOR_EXTERNAL_DATA, pair_bytes)
    return bytes(rest)


def _rewrite(message: bytes, number: int, change: Callable[[bytes], bytes]) -> bytes:
    out = bytearray()
    for found, whole, payload in _fields(message):
        out += _field(number, change(payload)) if found == number else whole
    return bytes(out)


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (field number, the field's bytes, its payload) for each field; payload is empty for plain numbers."""
    at = 0
    while at < len(message):
        start = at
        tag, at = _varint(message, at)
        payload = b""
        kind = tag & 7
        if kind == 0:
            _, at = _varint(message, at)
        elif kind == 1:
            at += 8
        elif kind == _LENGTH_DELIMITED:
            size, at = _varint(message, at)
            payload = message[at : at + size]
            at += size
        elif kind == 5:
            at += 4
        else:
            raise ValueError(f"wire type {kind} at byte {start} is not protobuf 3")
        if at > len(message):
            raise ValueError(f"field at byte {start} is cut off")
        yield tag >> 3, message[start:at], payload


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message):
            raise ValueError("number is cut off")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _field(number: int, payload: bytes) -> bytes:
    return _encode(number << 3 | _LENGTH_DELIMITED) + _encode(len(payload)) + payload


def _encode(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)

"""Protobuf's wire format, as far as reading and changing ONNX files without the onnx package needs it.

See protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["encode_field", "fields", "number_of"]

_LENGTH_DELIMITED = 2


def fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (field number, the field's bytes, its payload) for each field; payload is empty for plain numbers.

    Raises:
        ValueError: ``message`` is not a protobuf message.
    """
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


def number_of(field: bytes) -> int:
    """Return the value of a field of a whole number, given the field's bytes."""
    _, at = _varint(field, 0)
    return _varint(field, at)[0]


def encode_field(number: int, payload: bytes) -> bytes:
    """Return the bytes of a field that holds text, bytes or a message."""
    return _encode(number << 3 | _LENGTH_DELIMITED) + _encode(len(payload)) + payload


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


def _encode(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)

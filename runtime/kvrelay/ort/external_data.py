"""Read and redirect the external data of an ONNX file, without the onnx package.

An ONNX file is a protobuf message (onnx.proto3). Only the path model -> graph -> initializer -> external_data is looked
at; all other bytes are passed on as they are.
"""

from __future__ import annotations

from collections.abc import Callable

from ..wire import encode_field, fields

__all__ = ["ExternalData", "redirect"]

ExternalData = dict[str, str]  # location, offset, length, and what ONNX Runtime adds

_MODEL_GRAPH = 7
_GRAPH_INITIALIZER = 5
_TENSOR_EXTERNAL_DATA = 13
_ENTRY_KEY = 1
_ENTRY_VALUE = 2


def redirect(model: bytes, change: Callable[[ExternalData], ExternalData]) -> bytes:
    """Return ``model`` with the external data entry of each initializer replaced by ``change(entry)``.

    Raises:
        ValueError: ``model`` is not a protobuf message.
    """
    return _rewrite(model, _MODEL_GRAPH, lambda g: _rewrite(g, _GRAPH_INITIALIZER, lambda t: _tensor(t, change)))


def _tensor(tensor: bytes, change: Callable[[ExternalData], ExternalData]) -> bytes:
    entry: ExternalData = {}
    rest = bytearray()
    for number, whole, payload in fields(tensor):
        if number == _TENSOR_EXTERNAL_DATA:
            pair = {n: p.decode() for n, _, p in fields(payload)}
            entry[pair[_ENTRY_KEY]] = pair.get(_ENTRY_VALUE, "")
        else:
            rest += whole
    if not entry:
        return tensor
    for key, value in change(entry).items():
        pair_bytes = encode_field(_ENTRY_KEY, key.encode()) + encode_field(_ENTRY_VALUE, value.encode())
        rest += encode_field(_TENSOR_EXTERNAL_DATA, pair_bytes)
    return bytes(rest)


def _rewrite(message: bytes, number: int, change: Callable[[bytes], bytes]) -> bytes:
    out = bytearray()
    for found, whole, payload in fields(message):
        out += encode_field(number, change(payload)) if found == number else whole
    return bytes(out)

"""The weights file of a bundle: every tensor of every engine once, found by content."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

import onnx_ir as ir

__all__ = ["WeightsFile"]

_ALIGNMENT = 64
_INLINE_LIMIT = 1024  # bytes; smaller tensors stay in the graph


class WeightsFile:
    """Collects the tensors of several engines in one file.

    Folding renames tensors, so they are shared by content, not by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 - closed by close(), after many saves
        self._offsets: dict[bytes, int] = {}

    def save(self, model: ir.Model, path: Path) -> None:
        """Write ``model`` to ``path``, its large tensors moved to the weights file (``model`` keeps its own)."""
        moved: list[tuple[ir.Value, ir.TensorProtocol]] = []
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.nbytes >= _INLINE_LIMIT:
                moved.append((value, tensor))
                value.const_value = self._external(tensor)
        self._file.flush()
        try:
            ir.save(model, path)
        finally:
            for value, tensor in moved:
                value.const_value = tensor

    def _external(self, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
        content = tensor.tobytes()
        key = hashlib.blake2b(content, digest_size=20).digest()
        if key not in self._offsets:
            self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
            self._offsets[key] = self._file.tell()
            self._file.write(content)
        return ir.ExternalTensor(
            self.path.name,
            self._offsets[key],
            len(content),
            tensor.dtype,
            shape=ir.Shape(tensor.shape),
            name=tensor.name or "",
            base_dir=self.path.parent,
        )

    def close(self) -> None:
        self._file.close()

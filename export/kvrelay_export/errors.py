"""Errors of the exporter."""

from __future__ import annotations

from kvrelay.errors import KvrelayError

__all__ = ["CheckError", "ExportError"]


class ExportError(KvrelayError):
    """A checkpoint cannot be exported as asked; the message says why and what can be."""


class CheckError(ExportError):
    """An exported engine does not compute what the torch model computes."""

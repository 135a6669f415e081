"""The engine protocol: what the loop needs of a backend."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from .kv import KVCache, Memory
from .logits import Top
from .manifest import EngineEntry

__all__ = ["BoundPass", "LoadedEngine"]


class BoundPass(Protocol):
    """One engine bound to one run of slots at one width.

    The arrays are the engine's own input and output memory: write the inputs in place, call :meth:`run`, read
    :meth:`top` or ``logits``. Not thread-safe. ``logits`` is a view that the next run of a pass over the same cache
    may overwrite; where it lies on a device, reading it copies whole rows to the host.
    """

    input_ids: npt.NDArray[np.int64]  # [B, S]
    write_index: npt.NDArray[np.int64]  # [B]
    logit_rows: npt.NDArray[np.int64]  # [B, R]
    seconds: float  # time spent inside the engine so far
    runs: int
    kv_bytes_copied: int  # KV bytes that the backend wrote for an engine that cannot (dialect `decomposed`)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """The logits ``[B, R, V]`` of the last run."""
        ...

    def top(self) -> Top | None:
        """Return the largest logits of the last run's rows; None where ``logits`` lies on the host anyway."""
        ...

    def run(self) -> None:
        """Run the engine once.

        Raises:
            EngineError: the backend reports a failure.
        """
        ...


class LoadedEngine(Protocol):
    """An engine of a bundle, loaded. Thread-safe: each thread binds its own passes."""

    entry: EngineEntry
    memory: Memory  # where the caches lie that it binds

    def bind(
        self,
        cache: KVCache,
        width: int,
        rows: int,
        *,
        slot: int = 0,
        batch: int = 1,
        logits: npt.NDArray[np.float32] | None = None,
    ) -> BoundPass:
        """Bind ``batch`` neighbouring slots from ``slot`` on, ``width`` tokens a row, ``rows`` logit rows a row.

        ``logits`` is flat memory for the logits, which passes may share that run one after the other.

        Raises:
            EngineError: the shape is not one that the engine has, or the cache does not fit it.
        """
        ...

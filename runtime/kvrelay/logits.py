"""Rows of logits, of which a GPU backend hands over whole rows only where their largest values do not decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .engine import BoundPass

__all__ = ["LogitRow", "Top", "TopRow", "rows_of"]


@dataclass(frozen=True, slots=True)
class Top:
    """The largest logits of every row of a pass, as the device found them. Views that the next run overwrites."""

    values: npt.NDArray[np.float32]  # [B, R, K], in any order
    ids: npt.NDArray[np.int32]  # [B, R, K]; which of several equal to the least value are here is open
    log_sum: npt.NDArray[np.float32]  # [B, R]: log of the sum of exp(logit - the row's largest)


@dataclass(frozen=True, slots=True)
class TopRow:
    """One row of a :class:`Top`."""

    values: npt.NDArray[np.float32]  # [K]
    ids: npt.NDArray[np.int32]  # [K]
    log_sum: np.float32


@dataclass(frozen=True, slots=True)
class LogitRow:
    """One row of logits of a pass's last run."""

    bound: BoundPass
    batch: int
    row: int

    @property
    def whole(self) -> npt.NDArray[np.float32]:
        """All logits ``[V]``, copied from the device if they lie there."""
        row: npt.NDArray[np.float32] = self.bound.logits[self.batch, self.row]
        return row

    @property
    def top(self) -> TopRow | None:
        """The largest logits; None where whole rows lie on the host anyway."""
        top = self.bound.top()
        if top is None:
            return None
        at = (self.batch, self.row)
        return TopRow(top.values[at], top.ids[at], top.log_sum[at])


def rows_of(bound: BoundPass) -> list[list[LogitRow]]:
    """Return the rows of a pass ``[B][R]``; read them before its next run."""
    batch, rows = bound.logit_rows.shape
    return [[LogitRow(bound, b, r) for r in range(rows)] for b in range(batch)]

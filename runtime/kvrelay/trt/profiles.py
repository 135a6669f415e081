"""Optimisation profiles: the shapes that a plan is built for, taken from the manifest."""

from __future__ import annotations

from dataclasses import dataclass

from .. import contract
from ..manifest import EngineEntry, ModelEntry

__all__ = ["DECODE_WIDTH", "Bounds", "Profile", "profiles_of"]

Bounds = tuple[int, int, int]  # least, most usual, most

DECODE_WIDTH = 16  # most tokens a row in the profile "decode" of an engine with dynamic axes
_FEED_WIDTH = 64  # the runtime feeds a draft up to this many tokens at once, however short the bundle's prefill chunk


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile: bounds of the axes B, S and R of the engine contract."""

    name: str  # "decode", "prefill" or "static"
    batch: Bounds
    sequence: Bounds
    rows: Bounds

    def holds(self, batch: int, sequence: int, rows: int) -> bool:
        """Whether a pass of this shape runs in the profile."""
        pairs = ((self.batch, batch), (self.sequence, sequence), (self.rows, rows))
        return all(least <= size <= most for (least, _, most), size in pairs)

    def shapes(self, entry: EngineEntry, model: ModelEntry) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Return the least, most usual and largest shape of every input by name."""

        def sized(b: int, s: int, r: int) -> dict[str, tuple[int, ...]]:
            cache = (b, model.kv_heads, model.capacity, model.head_dim)
            return {
                contract.INPUT_IDS: (b, s),
                contract.WRITE_INDEX: (b,),
                contract.LOGIT_ROWS: (b, r),
                **dict.fromkeys(contract.past_names(entry.kv_layers), cache),
            }

        least, usual, most = (sized(*axes) for axes in zip(self.batch, self.sequence, self.rows, strict=True))
        return {name: (least[name], usual[name], most[name]) for name in most}


def profiles_of(entry: EngineEntry, model: ModelEntry, max_batch: int) -> tuple[Profile, ...]:
    """Return the profiles of an engine: one "static", or "decode" and "prefill" for dynamic axes.

    Args:
        entry: the engine.
        model: its model.
        max_batch: most rows of a pass of an engine with a dynamic batch.
    """
    if entry.batch is not None and entry.sequence is not None and entry.rows is not None:
        b, s, r = entry.batch, entry.sequence, entry.rows
        return (Profile("static", (b, b, b), (s, s, s), (r, r, r)),)
    rows = (1, 1, DECODE_WIDTH)
    decode = Profile("decode", (1, 1, max_batch), (1, 1, DECODE_WIDTH), rows)
    # No pass is wider than what lies between context and capacity, or one that ends the context would not fit.
    widest = max(_FEED_WIDTH, model.capacity - model.context)
    return decode, Profile("prefill", (1, 1, 1), (1, widest, widest), rows)

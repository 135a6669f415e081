"""Noise that is a pure function of (seed, position, token id): nothing is carried from draw to draw."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["gumbel", "noise_bits"]


def gumbel(seed: int, position: int, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """Return the noise of ``ids`` at ``position``: standard Gumbel, a pure function of its arguments."""
    bits = noise_bits(seed, position, ids)
    uniform = (bits.astype(np.float64) + 0.5) / 2.0**32  # in the open interval (0, 1)
    return -np.log(-np.log(uniform))


def noise_bits(seed: int, position: int, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """32-bit hash of (seed, position, id): two rounds of the MurmurHash3 finaliser around a SplitMix64 key."""
    key = _splitmix(_splitmix(seed) ^ position)
    x = ids * np.uint32(0x9E3779B1) + np.uint32(key & 0xFFFFFFFF)
    for add in (key >> 32, 0):
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x85EBCA6B)
        x ^= x >> np.uint32(13)
        x *= np.uint32(0xC2B2AE35)
        x ^= x >> np.uint32(16)
        x += np.uint32(add)
    return x


def _splitmix(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)

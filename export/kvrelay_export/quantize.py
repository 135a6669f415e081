"""Weight quantisation: symmetric int4 and int8 in blocks of 32, and int8 a column for dynamic activations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .errors import ExportError

__all__ = ["BLOCK", "BlockQuantized", "dequantize_blocks", "quantize_blocks", "quantize_columns"]

BLOCK = 32
# Shrinking the range a little trades clipping of the largest weight for finer steps; the best of these by squared
# error is taken for each block.
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)


@dataclass(frozen=True, slots=True)
class BlockQuantized:
    """A weight ``[K, N]`` as integers and positive scales along K."""

    values: np.ndarray  # int8 [N, K], in -2**(bits-1) .. 2**(bits-1) - 1
    scales: np.ndarray  # float32 [N, K / BLOCK]
    bits: int


def quantize_blocks(
    weight: np.ndarray, bits: int, name: str = "a weight", *, scale_dtype: np.typing.DTypeLike = np.float32
) -> BlockQuantized:
    """Quantise ``weight`` ``[K, N]`` (float32) in blocks of 32 along K to ``bits`` bits.

    Args:
        weight: the weight.
        bits: 8 or 4.
        name: what it is, for the error.
        scale_dtype: float32 or float16; scales are rounded to it first, and the integers fit the rounded ones.

    Raises:
        ExportError: K is not a multiple of 32; the message has ``name``.
    """
    k, n = weight.shape
    if k % BLOCK:
        raise ExportError(
            f"{name.removesuffix('.weight_t')} cannot be stored as int{bits}: its input width {k} is not divisible by "
            f"the block size {BLOCK}; fp32 has no such limit, nor has int8-dynamic"
        )
    blocks = torch.from_numpy(np.ascontiguousarray(weight.T)).view(n, k // BLOCK, BLOCK)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    best_error: torch.Tensor | None = None
    for shrink in _SHRINK if bits == 4 else (1.0,):
        scale = _in_range(largest * (shrink / high), scale_dtype)
        q = torch.clamp(torch.round(blocks / scale), low, high)
        error = (q * scale - blocks).square().sum(-1, keepdim=True)
        if best_error is None:
            best_error, best_scale, best_q = error, scale, q
        else:
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best_scale = torch.where(better, scale, best_scale)
            best_q = torch.where(better, q, best_q)
    values = best_q.to(torch.int8).view(n, k).numpy()
    return BlockQuantized(values, best_scale.squeeze(-1).float().contiguous().numpy(), bits)


def _in_range(scale: torch.Tensor, dtype: np.typing.DTypeLike) -> torch.Tensor:
    """Round positive scales to ``dtype``: never to zero, never to infinity."""
    if np.dtype(dtype) == np.float32:
        return scale
    limits = np.finfo(np.dtype(dtype))
    return scale.clamp(float(limits.smallest_subnormal), float(limits.max)).half().float()


def dequantize_blocks(quantized: BlockQuantized) -> np.ndarray:
    """Return the float32 weight ``[K, N]`` that ``quantized`` stands for."""
    n, k = quantized.values.shape
    blocks = quantized.values.reshape(n, -1, BLOCK).astype(np.float32) * quantized.scales[..., None]
    return np.ascontiguousarray(blocks.reshape(n, k).T)


def quantize_columns(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise ``weight`` ``[K, N]`` to int8 with one positive scale a column.

    Returns:
        int8 ``[K, N]`` and float32 scales ``[N]``.
    """
    scale = np.maximum(np.abs(weight).max(axis=0), 1e-12).astype(np.float32) / np.float32(127)
    return np.clip(np.rint(weight / scale), -127, 127).astype(np.int8), scale

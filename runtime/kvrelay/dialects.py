"""Which dialects a backend's version runs: what fails late or is silently wrong is refused before a file is read."""

from __future__ import annotations

import re

__all__ = ["dialects_of", "refusal"]

# The release whose parser knows every operator of a dialect; None: any that kvrelay supports.
_SINCE: dict[str, dict[str, tuple[int, ...] | None]] = {
    # Of GroupQueryAttention, the input `query_seqlens`: rows of several tokens that continue from different lengths.
    "ort": {"onnxruntime": (1, 32)},
    # TensorRT: Attention came with 10.14, TensorScatter, RotaryEmbedding and RMSNormalization with 10.15.
    "standard": {"onnxruntime": None, "tensorrt": (10, 15), "tensorrt-rtx": None},
    "decomposed": {"onnxruntime": None, "tensorrt": (10, 3), "tensorrt-rtx": None},
}


def refusal(dialect: str, backend: str, version: str) -> str | None:
    """Return why ``version`` of ``backend`` cannot run engines of ``dialect``, None if it can."""
    others = " or ".join(d for d in dialects_of(backend, version)) or "none"
    if backend not in _SINCE[dialect]:
        return f"the dialect {dialect} is not for {backend}: export the bundle again with --dialect {others}"
    since = _SINCE[dialect][backend]
    if since is None or _numbers(version) >= since:
        return None
    return (
        f"{backend} {version} cannot run the dialect {dialect}, which needs {'.'.join(map(str, since))}: "
        f"upgrade it, or export the bundle again with --dialect {others}"
    )


def dialects_of(backend: str, version: str) -> list[str]:
    """Return the dialects that ``version`` of ``backend`` runs."""
    found = []
    for dialect, backends in _SINCE.items():
        if backend in backends:
            since = backends[backend]
            if since is None or _numbers(version) >= since:
                found.append(dialect)
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])

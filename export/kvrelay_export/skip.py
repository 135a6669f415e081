"""Search the sublayers that a layer-skipping draft can leave out (Draft & Verify, arXiv 2309.08168).

Teacher-forced: a candidate is one forward pass over fixed text, judged by how often its most likely token is the
full model's. First every sublayer alone, then growth: at each step the candidates that hurt least alone are tried on
top of what is skipped already, and the best one is kept while agreement stays above the floor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
from kvrelay import contract
from transformers import PreTrainedModel

from .errors import ExportError
from .reference import reference_logits
from .source import Checkpoint

__all__ = ["parse_skip_list", "search_skip", "stored_skip_list"]


def search_skip(
    model: PreTrainedModel,
    ids: np.ndarray,
    *,
    floor: float = 0.8,
    beam: int = 6,
    progress: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Return the skip list found, possibly empty.

    Args:
        model: the target.
        ids: int64 ``[rows, T]``, the text to judge by.
        floor: least agreement of the grown list.
        beam: candidates tried at each step of growth.
        progress: told what happens.
    """
    full = reference_logits(model, ids).argmax(-1)

    def agreement(skip: Collection[str]) -> float:
        return float((reference_logits(model, ids, skip=skip).argmax(-1) == full).mean())

    layers = model.config.num_hidden_layers
    names = [f"{kind}.{i}" for i in range(layers) for kind in (contract.ATTENTION, contract.MLP)]
    alone: dict[str, float] = {}
    for count, name in enumerate(names, 1):
        alone[name] = agreement([name])
        progress(f"skip search: {count}/{len(names)} {name} alone keeps {alone[name]:.3f}")
    rest = sorted(names, key=lambda n: -alone[n])
    chosen: list[str] = []
    while rest and len(chosen) < len(names) - 1:
        scores = {name: agreement([*chosen, name]) for name in rest[:beam]}
        best = max(scores, key=lambda n: scores[n])
        if scores[best] < floor:
            break
        chosen.append(best)
        rest.remove(best)
        progress(f"skip search: {len(chosen)} sublayers skipped, agreement {scores[best]:.3f}")
    return sorted(chosen, key=lambda n: (int(n.split(".")[1]), n))


def parse_skip_list(skip: Collection[str], layers: int) -> list[str]:
    """Return ``skip`` validated: names are "attention.I" or "mlp.I".

    Raises:
        ExportError: the list is empty, a name is unknown or repeated, or nothing of the model would be left.
    """
    if not skip:
        raise ExportError("skip list: it names no sublayer, which makes the draft the target itself (draft self)")
    known = {f"{kind}.{i}" for i in range(layers) for kind in (contract.ATTENTION, contract.MLP)}
    for name in skip:
        if name not in known:
            raise ExportError(
                f"skip list: {name!r} is no sublayer of this model; they are attention.0 to attention.{layers - 1} "
                f"and mlp.0 to mlp.{layers - 1}"
            )
    if len(set(skip)) != len(skip):
        raise ExportError(f"skip list: a sublayer is named twice in {', '.join(skip)}")
    if known == set(skip):
        raise ExportError("skip list: it names every sublayer, which leaves no draft")
    return list(skip)


def stored_skip_list(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the skip list that was found for ``checkpoint`` and is stored beside this file.

    Raises:
        ExportError: none is stored.
    """
    lists: dict[str, list[str]] = json.loads(Path(__file__).with_name("skip_lists.json").read_text())
    if checkpoint.sha256 not in lists:
        raise ExportError(
            f"draft skip: no skip list is stored for {checkpoint.name}; "
            "give one with --skip, find one with --search-skip, or leave skip out of --drafts"
        )
    return tuple(parse_skip_list(lists[checkpoint.sha256], checkpoint.model.config.num_hidden_layers))

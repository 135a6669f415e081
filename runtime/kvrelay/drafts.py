"""The drafts that a bundle offers: their names, their engines, and what acceptance to expect of them."""

from __future__ import annotations

from .bundle import Bundle
from .manifest import EngineEntry

__all__ = ["acceptance_prior", "draft_entry", "draft_names"]

# What acceptance to expect before a request has shown its own.
_NGRAM_PRIOR = {1: 0.15, 2: 0.35, 3: 0.5, 4: 0.65}  # by length of the match
_OTHER_MODEL_PRIOR = 0.7
_SELF_PRIOR = 0.97


def draft_names(bundle: Bundle, precision: str) -> list[str]:
    """Names of the drafts that a bundle offers to a target of ``precision``."""
    names = ["none", "ngram", "self"]
    for entry in bundle.manifest.engines:
        if entry.draft is not None and (entry.draft != "skip" or entry.precision == precision):
            names.append(entry.draft)
        elif entry.role == "decode" and entry.precision in ("int8", "int4") and entry.precision != precision:
            names.append(entry.precision)
    return list(dict.fromkeys(names))


def draft_entry(bundle: Bundle, precision: str, name: str) -> EngineEntry:
    """Return the engine behind a draft's name, for a target of ``precision``."""
    for entry in bundle.manifest.engines:
        if name != "self" and entry.draft == name and (name != "skip" or entry.precision == precision):
            return entry
    (entry,) = bundle.engines(role="decode", precision=precision if name == "self" else name)
    return entry


def acceptance_prior(bundle: Bundle, precision: str, name: str, grade: int) -> float:
    """Return the acceptance to expect of a draft's proposals of a grade."""
    if name in ("ngram", "self"):
        return _NGRAM_PRIOR[grade] if name == "ngram" else _SELF_PRIOR
    entry = draft_entry(bundle, precision, name)
    if entry.model != bundle.manifest.target or entry.check is None:
        return _OTHER_MODEL_PRIOR
    # Measured against the checkpoint's own weights; a quantised target is a little away from those itself.
    target = draft_entry(bundle, precision, "self").check
    return entry.check.agreement * (target.agreement if target is not None else 1.0)

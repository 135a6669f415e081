"""The drafts that a bundle offers: their names, their engines, and what acceptance to expect of them."""

from __future__ import annotations

from .bundle import Bundle
from .errors import ParameterError
from .kv import HandOver, KVCache, Memory
from .manifest import EngineEntry

__all__ = ["acceptance_prior", "check_draft", "draft_cache", "draft_entry", "draft_names"]

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
    return bundle.engine("decode", precision if name == "self" else name)


def check_draft(bundle: Bundle, precision: str, draft: str) -> list[str]:
    """Return the names of the drafts, ``draft`` being "auto" or one of them.

    Raises:
        ParameterError: it is not; lists what there is.
    """
    names = draft_names(bundle, precision)
    if draft != "auto" and draft not in names:
        raise ParameterError(f"draft={draft!r}: this bundle has auto, {', '.join(names)}")
    return names


def draft_cache(bundle: Bundle, entry: EngineEntry, cache: KVCache, memory: Memory) -> tuple[KVCache, HandOver | None]:
    """Return the cache of a draft engine in ``memory``, and what hands verified entries over to it.

    That is the target's ``cache`` itself or, for another dtype, memory or model, a new one of as many slots; another
    model's cache holds what was fed to it, and nothing is handed over.
    """
    own_model = entry.model != bundle.manifest.target
    if not own_model and (entry.kv_dtype, memory) == (cache.dtype.name, cache.memory):
        return cache, None
    own = KVCache(bundle.manifest.models[entry.model], entry.kv_layers, entry.kv_dtype, cache.slots, memory)
    return own, None if own_model else HandOver(cache, own)


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

"""What the runtime tests share: scripted drafts in real pipelines, and fresh caches to compare with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kvrelay import Pipeline, Result
from kvrelay.drafters import Drafter, EngineDrafter
from kvrelay.kv import KVCache
from kvrelay.manifest import EngineEntry
from kvrelay.request import Request

PROMPT = [50, 60, 70, 80, 90, 100]
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "seed": 42}
VOCAB = 260


class Scripted:
    """Proposes the right tokens up to a given count, then wrong ones.

    Args:
        right: prompt and output that the target will give.
        accept: how many right tokens the proposals hold, window after window.
        wrong: makes a wrong token of a right one.
    """

    name = "self"
    grade = 0

    def __init__(
        self,
        right: Sequence[int],
        accept: Iterable[int],
        wrong: Callable[[int], int] = lambda token: (token + 1) % VOCAB,
    ) -> None:
        self._right = list(right)
        self._accept = iter(accept)
        self._wrong = wrong

    def begin(self, request: Request) -> None:
        """Nothing to forget."""

    def propose(self, request: Request, count: int) -> list[int]:
        """Return ``count`` tokens, fewer at the end of what is known."""
        at, good = len(request.tokens), next(self._accept)
        tokens = self._right[at : at + count]
        return [t if i < good else self._wrong(t) for i, t in enumerate(tokens)]

    def commit(self, request: Request) -> None:
        """Nothing to learn."""


def oracle(right: Sequence[int]) -> Scripted:
    """A draft that is always right."""
    return Scripted(right, itertools.repeat(10**6))


def anti_oracle(right: Sequence[int]) -> Scripted:
    """A draft that is always wrong."""
    return Scripted(right, itertools.repeat(0))


def with_drafter(pipe: Pipeline, drafter: Drafter) -> Pipeline:
    """Put ``drafter`` in the place of the draft "self" of ``pipe``."""
    assert pipe.draft == "self"
    drafter.name = "self"
    for lane in pipe._lanes.free:
        lane.drafters["self"] = drafter
    return pipe


def scripted(bundle: Path, drafter: Drafter, window: int, precision: str = "fp32") -> Pipeline:
    """A pipeline with a fixed window whose only draft is ``drafter``."""
    return with_drafter(Pipeline(bundle, draft="self", window=window, precision=precision), drafter)


def plain(bundle: Path, precision: str = "fp32") -> Pipeline:
    """The reference: no draft, exact."""
    return Pipeline(bundle, draft="none", precision=precision)


def target_cache(pipe: Pipeline) -> KVCache:
    """The target's cache in the pipeline's first slot."""
    return pipe._lanes.free[0].target.cache


def engine_drafter(pipe: Pipeline, entry: EngineEntry, *, own_cache: bool, step_width: int = 2) -> EngineDrafter:
    """A drafter on ``entry`` that steps in the verifier's shape class."""
    engine = pipe._lanes.box.engine(entry)
    model = pipe._bundle.manifest.models[entry.model]
    cache = KVCache(model, entry.kv_layers, entry.kv_dtype) if own_cache else target_cache(pipe)
    return EngineDrafter("self", lambda width: engine.bind(cache, width, 1), step_width=step_width, own_model=own_cache)


def decode_entry(pipe: Pipeline) -> EngineEntry:
    """The target's decode engine, whose axes are dynamic."""
    (entry,) = pipe._bundle.engines(role="decode", precision=pipe.precision)
    return entry


def fresh_cache(pipe: Pipeline, tokens: Sequence[int], entry: EngineEntry | None = None) -> KVCache:
    """A new cache that ``tokens`` were fed to, two at a time, through the target's decode engine or ``entry``."""
    entry = entry or decode_entry(pipe)
    cache = KVCache(pipe._bundle.manifest.models[entry.model], entry.kv_layers, entry.kv_dtype)
    bound = pipe._lanes.box.engine(entry).bind(cache, 2, 1)
    for start in range(0, len(tokens), 2):
        part = list(tokens[start : start + 2])
        bound.input_ids[0] = part if len(part) == 2 else part * 2
        bound.write_index[0] = start
        bound.logit_rows[0] = 0
        bound.run()
    return cache


def assert_same_entries(found: KVCache, wanted: KVCache, length: int, tolerance: float = 1e-5) -> None:
    """Compare the first ``length`` entries of every layer of two caches."""
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in found.tensors.items():
        a, b = tensor[0, :, :length], wanted.tensors[name][0, :, :length]
        assert np.allclose(a, b, atol=tolerance), f"{name} differs by {np.abs(a - b).max()}"


def assert_same(found: Result, wanted: Result) -> None:
    """Compare everything that a caller sees of two generations."""
    assert found.token_ids == wanted.token_ids
    assert found.scores == wanted.scores
    assert found.text == wanted.text
    assert found.finish_reason == wanted.finish_reason

"""What the runtime tests share: scripted drafts in real pipelines, and fresh caches to compare with."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from kvrelay import Engine, Handle, KvrelayError, Pipeline, Result
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


class Solo:
    """What requests give alone: no draft, exact. Results are kept, since many tests ask the same."""

    def __init__(self, bundle: Path, precision: str = "fp32", eos_ids: Iterable[int] | None = None) -> None:
        self.pipe = plain(bundle, precision)
        if eos_ids is not None:
            self.pipe._intake._eos_ids = frozenset(eos_ids)
        self._kept: dict[str, Result] = {}

    def __call__(self, prompt: Sequence[int], **options: Any) -> Result:
        """Return the result; for a request without a seed give the seed that it was served with."""
        key = repr((list(prompt), sorted(options.items())))
        if key not in self._kept:
            self._kept[key] = self.pipe.generate(list(prompt), **options)
        return self._kept[key]

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits ``[T, V]`` behind each of ``tokens``, in the verifier's shape class."""
        target = self.pipe._lanes.free[0].target
        width = target.windows[-1]
        rows = []
        for i in range(0, len(tokens), width):
            rows += [row.whole.copy() for row in target.replay(tokens[i : i + width], i, width)]
        for lane in self.pipe._lanes.free:
            lane.tokens = []  # its entries were written over
        return np.stack(rows)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    """Some prompt."""
    return [(seed * 31 + i * (2 * seed + 5)) % 250 + 4 for i in range(length)]


def engine_of(solo: Solo, **options: Any) -> Engine:
    """An engine on what ``solo`` runs on."""
    engine = Engine(solo.pipe._bundle.path, precision=solo.pipe.precision, **options)
    engine._intake._eos_ids = solo.pipe._intake._eos_ids
    return engine


class Stepped:
    """Lets an engine's loop take one turn at a time, so that a schedule is the same each time it is run."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._scheduler = engine._scheduler
        self._turn = self._scheduler._turn
        self._free = False
        self._go, self._went = threading.Semaphore(0), threading.Semaphore(0)
        self._scheduler._turn = self._gated
        engine.submit([5], max_new_tokens=1).result(60)  # the loop leaves the turn in which it waits for work

    def _gated(self) -> bool:
        if not self._free:
            self._go.acquire()
        try:
            return self._turn()
        finally:
            self._went.release()

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        scheduler = self._scheduler
        return bool(scheduler._waiting or scheduler._slots.occupied or not scheduler._arrived.empty())

    def turn(self, times: int = 1) -> None:
        """Take turns, as long as there is anything to do."""
        for _ in range(times):
            if self.busy:
                self._go.release()
                assert self._went.acquire(timeout=60), "the loop hangs"

    def drain(self, most: int = 5000) -> None:
        """Take turns until nothing is left to do."""
        self.turn(most)
        assert not self.busy, f"after {most} turns there is still something to do"

    def let_go(self) -> None:
        """Let the loop run by itself again."""
        self._free = True
        self._go.release()

    def __enter__(self) -> Stepped:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.let_go()
        self.engine.close()


def make_drafting_pay(engine: Engine, *names: str) -> None:
    """Store costs by which every draft pays in every shape; keep only the drafts of these names, if any are given."""
    engine._target._ms = dict.fromkeys(engine._target._ms, 1.0)
    drafting = engine._scheduler._drafting
    if names:
        drafting._drafters = [d for d in drafting._drafters if d.name in names]
        assert {d.name for d in drafting._drafters} == set(names)
    for drafter in drafting._drafters:
        drafter.ms = lambda batch: 1e-3


def assert_idle(engine: Engine) -> None:
    """Nothing of any request is left: no slot, no place in a queue, no state of a draft."""
    scheduler = engine._scheduler
    assert scheduler._slots.free == list(range(len(scheduler._slots.kept)))
    assert not scheduler._waiting and not scheduler._commits.open
    drafting = scheduler._drafting
    assert not drafting._acceptance and not drafting._looked_up and not drafting._used
    for drafter in drafting._drafters:
        assert not vars(drafter).get("_fed") and not vars(drafter).get("_lookups")


def assert_counted(result: Result) -> None:
    """Compare a request's counters with each other and with its output."""
    stats = result.stats
    assert stats.proposed >= stats.evaluated >= stats.accepted >= 0
    assert stats.emitted == stats.first + stats.accepted + stats.corrections + stats.bonus
    assert stats.emitted == len(result.token_ids) == len(result.scores)
    assert stats.rollbacks == stats.corrections
    assert stats.passes == stats.corrections + stats.bonus or result.finish_reason == "stop"


def assert_valid(result: Result, solo: Solo, prompt: Sequence[int], **options: Any) -> None:
    """Every token of an ordinary output is what the target picks there, give or take a rounding error.

    In int4 activations are rounded to eight bits on the way: an error in the last bit may become a step of that.
    """
    error = {"fp32": 1e-4, "int4": 0.1}[solo.pipe.precision]
    ids = result.token_ids
    assert len(result.scores) == len(ids)
    if not ids:
        return
    request = solo.pipe._intake.request(list(prompt), **{**options, "seed": result.seed})
    logits = solo.logits([*prompt, *ids[:-1]])[len(prompt) - 1 :]
    text = ""
    for row, token, score in zip(logits, ids, result.scores, strict=True):
        assert request.finish_reason is None, "the output goes on behind its end"
        position = len(request.tokens)
        if request.sampler.pick(row, position) != token:
            nudged = row.copy()
            nudged[token] += error
            assert request.sampler.pick(nudged, position) == token, f"token {token} at {position} is not the target's"
        known = row[: request.sampler.vocab_size].astype(np.float64)
        known -= known.max()
        assert abs(known[token] - np.log(np.exp(known).sum()) - score) < error
        request.tokens.append(token)
        request.sampler.observe(token)
        text += request.advance_text()
    if result.finish_reason != "cancelled":
        assert result.finish_reason == request.finish_reason
    assert result.text == text + request.stream.finish()


def outcome(handle: Handle) -> Result | KvrelayError:
    """The result, or the error that the request ended with."""
    try:
        return handle.result(60)
    except KvrelayError as error:
        return error


def read_all(handle: Handle) -> tuple[str, Result]:
    """The stream's text and the result."""
    text = "".join(handle.stream())
    return text, handle.result(60)

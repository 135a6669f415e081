"""The Python API: one bundle, one request at a time for each caller, streamed."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike

import numpy as np

from .box import Box, Facts, exact_windows
from .bundle import Bundle, open_bundle
from .drafters import Drafter, EngineDrafter, NgramDrafter
from .errors import EngineError, ParameterError, PromptError
from .kv import HandOver, KVCache, kv_bytes
from .loop import Event, generate
from .manifest import EngineEntry
from .policy import Costs, Policy, break_even
from .request import Request
from .sampling import Sampler, SamplingParams
from .stats import Stats
from .target import Target
from .text import TextStream
from .tokenizer import Prompt, Tokenizer

__all__ = ["Pipeline", "Result", "Stream"]

# What acceptance to expect before a request has shown its own.
_NGRAM_PRIOR = {1: 0.15, 2: 0.35, 3: 0.5, 4: 0.65}  # by length of the match
_OTHER_MODEL_PRIOR = 0.7
# A draft that pays only from here on is not loaded by "auto": nothing reaches it for long.
_HOPELESS = 0.97


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation. Text, ids, scores and reason always agree with each other."""

    text: str
    token_ids: list[int]  # the output, an EOS id at its end included
    scores: list[float]  # float32 log-probability of each output token, before filters
    finish_reason: str  # "stop", "length" or "cancelled"
    seed: int
    stats: Stats


@dataclass(slots=True)
class _Lane:
    """One slot with everything bound to it."""

    target: Target
    drafters: dict[str, Drafter]
    tokens: list[int] = field(default_factory=list)  # whose KV is in the slot


class Stream:
    """Iterator over the text of one generation, and the handle to cancel it. Use it from one thread at a time."""

    def __init__(self, request: Request, pieces: Iterator[str], seed: int) -> None:
        self._request = request
        self._pieces = pieces
        self._seed = seed
        self._busy = threading.Lock()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """Return the next piece of text, never empty.

        Raises:
            ParameterError: another thread is inside this stream.
        """
        if not self._busy.acquire(blocking=False):
            raise ParameterError("this stream is in use by another thread; give each thread a stream of its own")
        try:
            while not (piece := next(self._pieces)):
                pass
            return piece
        finally:
            self._busy.release()

    def cancel(self) -> None:
        """End the generation after the current window. Any thread may call this at any time."""
        self._request.cancelled.set()

    def close(self) -> None:
        """Give the slot back without finishing.

        Raises:
            ParameterError: another thread is inside this stream.
        """
        if not self._busy.acquire(blocking=False):
            raise ParameterError("this stream is in use by another thread; cancel() ends it from any thread")
        try:
            self._pieces.close()  # type: ignore[attr-defined]
        finally:
            self._busy.release()

    @property
    def result(self) -> Result:
        """The finished generation.

        Raises:
            ParameterError: the stream has not been read to its end.
        """
        request = self._request
        if request.finish_reason is None:
            raise ParameterError("the stream has no result yet: read it to its end, or cancel it first")
        return Result(
            request.stream.text, request.output, list(request.scores), request.finish_reason, self._seed, request.stats
        )


class Pipeline:
    """Draft-verify generation from a bundle. Thread-safe: each generation takes a slot of its own.

    Args:
        bundle: the bundle's folder.
        draft: "auto", or one of :attr:`drafts`.
        window: tokens of a verify window, one of the exported sizes, or None to let costs decide. A fixed window with
            a named draft always drafts; otherwise drafting is switched off where it does not pay.
        precision: of the target; None for the bundle's first.
        threads: thread count of the process; None for the count in force.
        exact: commit only through verify engines of one shape class, so that the output does not depend, bit for bit,
            on the draft, its length or the window. False lets plain steps use the faster decode engine.
        progress: told what takes long on first use.

    Raises:
        KvrelayError: the bundle, a parameter or the box does not allow it; the message says which and what would.
    """

    def __init__(
        self,
        bundle: str | PathLike[str],
        *,
        draft: str = "auto",
        window: int | None = None,
        precision: str | None = None,
        threads: int | None = None,
        exact: bool = True,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._bundle = open_bundle(bundle)
        self.precision = _one_of("precision", precision, self._bundle.precisions())
        self.exact = exact
        self.drafts = _draft_names(self._bundle, self.precision)
        if draft != "auto" and draft not in self.drafts:
            raise ParameterError(f"draft={draft!r}: this bundle has auto, {', '.join(self.drafts)}")
        self.draft = draft
        self._tokenizer = Tokenizer(self._bundle)
        self._eos_ids = frozenset(self._bundle.manifest.generation.eos_ids)
        self._verify = [
            e for e in self._bundle.engines(role="verify", precision=self.precision) if e.batch == 1 and e.sequence
        ]
        sizes = [e.sequence for e in self._verify if e.sequence]
        if window is not None and window not in sizes:
            raise ParameterError(f"window={window!r}: this bundle has verify windows of {sizes} tokens, or None")
        self.window = window
        self._box = Box(self._bundle, threads, progress)
        self.threads = self._box.threads
        self._facts: Facts = self._box.facts(self.precision, self._draft_entries())
        if exact:
            self._verify = exact_windows(self._facts, self._verify)
            if window is not None and window not in [e.sequence for e in self._verify]:
                raise ParameterError(f"window={window}: on this box its engine lies outside the exact shape class")
        self._costs = self._stored_costs()
        self._lanes: list[_Lane] = []
        self._lanes_lock = threading.Lock()
        self._release(self._new_lane())

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, as :meth:`generate` would process them.

        Raises:
            PromptError: the prompt is empty or malformed.
        """
        return self._tokenizer.encode(prompt)

    # -- generation ---------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        trace: Callable[[Event], None] | None = None,
    ) -> Stream:
        """Return an iterator over the text of the answer.

        Args:
            prompt: text (taken as it is), chat messages (put through the chat template), or token ids.
            max_new_tokens: most tokens of output; the context may end it earlier.
            temperature: 0 takes the most likely token. This and the next six: see
                :class:`kvrelay.sampling.SamplingParams`.
            top_k: see there.
            top_p: see there.
            min_p: see there.
            repetition_penalty: see there.
            frequency_penalty: see there.
            presence_penalty: see there.
            seed: 0 to 2**64 - 1; None draws one, which the result records.
            stop: strings that end the text and are not part of it.
            ignore_eos: go on after an end-of-sequence token.
            trace: takes one event a window.

        Raises:
            ParameterError: a parameter is out of range.
            PromptError: the prompt is empty, or does not fit the context.
        """
        params = SamplingParams(
            temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty
        )
        if not _is_whole(max_new_tokens) or max_new_tokens < 1:
            raise ParameterError(f"max_new_tokens={max_new_tokens!r}: a whole number of at least 1")
        if seed is None:
            seed = secrets.randbits(63)
        elif not _is_whole(seed) or not 0 <= seed < 2**64:
            raise ParameterError(f"seed={seed!r}: a whole number, 0 to 2**64 - 1, or None")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(not isinstance(s, str) or not s for s in stops):
            raise ParameterError(f"stop={stop!r}: strings of at least one character")
        tokens = self._tokenizer.encode(prompt)
        context = self._bundle.target.context
        if len(tokens) >= context:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens, the context is {context} and must hold at least one more: "
                "shorten the prompt, or export with a larger --context"
            )
        request = Request(
            tokens=tokens,
            limit=min(context, len(tokens) + int(max_new_tokens)),
            sampler=Sampler(params, int(seed), self._bundle.target.vocab_size, tokens),
            stream=TextStream(self._tokenizer.decode, stops),
            eos_ids=frozenset() if ignore_eos else self._eos_ids,
        )
        return Stream(request, self._pieces(request, trace), int(seed))

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        trace: Callable[[Event], None] | None = None,
        callback: Callable[[str], None] | None = None,
    ) -> Result:
        """Return the whole answer; parameters as for :meth:`stream`, and ``callback``, told each piece of text."""
        stream = self.stream(
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            seed=seed,
            stop=stop,
            ignore_eos=ignore_eos,
            trace=trace,
        )
        for piece in stream:
            if callback is not None:
                callback(piece)
        return stream.result

    def _pieces(self, request: Request, trace: Callable[[Event], None] | None) -> Iterator[str]:
        lane = self._take(request)
        try:
            yield from generate(request, lane.target, self._policy(lane), trace)
            lane.tokens = request.tokens[: request.kv_length]
        except EngineError:
            # What the failed pass wrote is unknown; a NaN behind a mask would leak into later requests.
            lane.target.cache.clear(0)
            raise
        finally:
            if request.finish_reason is None:
                request.finish_reason = "cancelled"
            self._release(lane)

    # -- slots --------------------------------------------------------------------------------------------------

    def _take(self, request: Request) -> _Lane:
        """Take a free slot, one that holds the prompt's beginning if there is one, or make a slot."""
        with self._lanes_lock:
            lane = None
            if self._lanes:
                lane = max(self._lanes, key=lambda free: self._reusable(free, request))
                self._lanes.remove(lane)
        if lane is None:
            lane = self._new_lane()
        request.kv_length = request.stats.reused_tokens = self._reusable(lane, request)
        lane.tokens = []
        target = self._bundle.target
        request.stats.kv_bytes = kv_bytes(target, target.layers, lane.target.cache.dtype.itemsize, target.capacity)
        request.stats.plain_ms = self._costs.plain
        return lane

    def _reusable(self, lane: _Lane, request: Request) -> int:
        """Entries of a slot that a prompt can use: only where every committing pass gives the same bits."""
        if not self._one_class:
            return 0
        same = 0
        for a, b in zip(lane.tokens, request.tokens[:-1], strict=False):
            if a != b:
                break
            same += 1
        return same

    def _release(self, lane: _Lane) -> None:
        with self._lanes_lock:
            self._lanes.append(lane)

    def _new_lane(self) -> _Lane:
        target = self._bundle.target
        cache = KVCache(target, range(target.layers))
        verify = {}
        for entry in self._verify:
            assert entry.sequence is not None and entry.rows is not None
            verify[entry.sequence] = self._box.engine(entry).bind(cache, entry.sequence, entry.rows)
        (prefill_entry,) = self._bundle.engines(role="prefill", precision=self.precision)
        assert prefill_entry.sequence is not None
        prefill = self._box.engine(prefill_entry).bind(cache, prefill_entry.sequence, 1)
        # Exact plain steps stay in the verifier's shape class, at its narrowest, behind the token a pad.
        plain = verify[min(verify)] if self.exact else self._box.engine(self._decode_entry()).bind(cache, 1, 1)
        bound = Target(cache, verify, prefill, plain, mixed_prefill=self._facts.in_class(prefill_entry))
        return _Lane(bound, {name: self._new_drafter(name, cache) for name in self._wanted_drafts()})

    @property
    def _one_class(self) -> bool:
        (prefill_entry,) = self._bundle.engines(role="prefill", precision=self.precision)
        return self.exact and self._facts.in_class(prefill_entry)

    # -- drafts -------------------------------------------------------------------------------------------------

    def _wanted_drafts(self) -> list[str]:
        if self.draft == "none":
            return []
        if self.draft != "auto":
            return [self.draft]
        hopeful = []
        for name in self.drafts:
            needed = None if name in ("none", "self") else break_even(self._costs, name)
            if needed is not None and needed <= _HOPELESS:
                hopeful.append(name)
        return hopeful

    def _new_drafter(self, name: str, cache: KVCache) -> Drafter:
        if name == "ngram":
            return NgramDrafter()
        entry = self._draft_entry(name)
        engine = self._box.engine(entry)
        model = self._bundle.manifest.models[entry.model]
        own_model = entry.model != self._bundle.manifest.target
        hand_over = None
        if own_model or entry.kv_dtype != cache.dtype.name:
            own = KVCache(model, entry.kv_layers, entry.kv_dtype)
            hand_over = None if own_model else HandOver(cache, own)
            cache = own
        return EngineDrafter(
            name,
            lambda width: engine.bind(cache, width, 1),
            step_width=self._facts.draft_width.get(entry.name, 1),
            own_model=own_model,
            hand_over=hand_over,
        )

    def _draft_entries(self) -> list[EngineEntry]:
        """Engines behind the drafts of this precision."""
        return [self._draft_entry(n) for n in self.drafts if n not in ("none", "ngram", "self")]

    def _draft_entry(self, name: str) -> EngineEntry:
        if name == "self":
            return self._decode_entry()
        for entry in self._bundle.manifest.engines:
            if entry.draft == name and (name != "skip" or entry.precision == self.precision):
                return entry
        (entry,) = self._bundle.engines(role="decode", precision=name)
        return entry

    def _decode_entry(self) -> EngineEntry:
        (entry,) = self._bundle.engines(role="decode", precision=self.precision)
        return entry

    # -- policy -------------------------------------------------------------------------------------------------

    def _stored_costs(self) -> Costs:
        facts = self._facts
        windows = sorted(e.sequence for e in self._verify if e.sequence)
        verify = {n: facts.verify_ms[n] for n in windows}
        after_draft = {n: facts.verify_after_draft_ms[n] for n in windows}
        plain = verify[min(verify)] if self.exact else facts.plain_ms
        draft = {
            n: facts.draft_ms[self._draft_entry(n).name] for n in self.drafts if n not in ("none", "ngram", "self")
        }
        return Costs(plain, verify, after_draft, {**draft, "ngram": 0.0, "self": facts.plain_ms})

    def _policy(self, lane: _Lane) -> Policy:
        windows = [self.window] if self.window is not None else list(self._costs.verify)
        return Policy(
            drafters=list(lane.drafters.values()),
            costs=self._costs,
            windows=windows,
            prior=self._prior,
            fixed=self.window is not None and self.draft != "auto",
        )

    def _prior(self, name: str, grade: int) -> float:
        if name in ("ngram", "self"):
            return _NGRAM_PRIOR[grade] if name == "ngram" else _HOPELESS
        entry = self._draft_entry(name)
        if entry.model != self._bundle.manifest.target or entry.check is None:
            return _OTHER_MODEL_PRIOR
        # Measured against the checkpoint's own weights; a quantised target is a little away from those itself.
        decode = self._decode_entry()
        return entry.check.agreement * (decode.check.agreement if decode.check is not None else 1.0)


def _draft_names(bundle: Bundle, precision: str) -> list[str]:
    """Names of the drafts that a bundle offers to a target of ``precision``."""
    names = ["none", "ngram", "self"]
    for entry in bundle.manifest.engines:
        if entry.draft is not None and (entry.draft != "skip" or entry.precision == precision):
            names.append(entry.draft)
        elif entry.role == "decode" and entry.precision in ("int8", "int4") and entry.precision != precision:
            names.append(entry.precision)
    return list(dict.fromkeys(names))


def _one_of(name: str, value: str | None, allowed: list[str]) -> str:
    if value is None:
        return allowed[0]
    if value not in allowed:
        raise ParameterError(f"{name}={value!r}: this bundle has {', '.join(allowed)}")
    return value


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)

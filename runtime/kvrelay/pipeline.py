"""The Python API: one bundle, one request at a time for each caller, streamed."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from .bundle import open_bundle
from .errors import EngineError, ParameterError, PromptError
from .lanes import Lanes
from .loop import Event, generate
from .request import Request
from .sampling import Sampler, SamplingParams
from .stats import Stats
from .text import TextStream
from .tokenizer import Prompt, Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["GenerationOptions", "Pipeline", "Result", "Stream"]


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation. Text, ids, scores and reason always agree with each other."""

    text: str
    token_ids: list[int]  # the output, an EOS id at its end included
    scores: list[float]  # float32 log-probability of each output token, before filters
    finish_reason: str  # "stop", "length" or "cancelled"
    seed: int
    stats: Stats


class GenerationOptions(TypedDict, total=False):
    """Options of :meth:`Pipeline.stream` and :meth:`Pipeline.generate`."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int | None
    stop: Sequence[str]
    ignore_eos: bool
    trace: Callable[[Event], None] | None


class Stream:
    """Iterator over the text of one generation, and the handle to cancel it. Use it from one thread at a time."""

    def __init__(self, request: Request, pieces: Iterator[str], seed: int) -> None:
        self._request = request
        self._pieces = pieces
        self._seed = seed
        self._busy = threading.Lock()
        self._ended = False

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
        except StopIteration:
            self._ended = True
            raise
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
            self._ended = True
        finally:
            self._busy.release()

    @property
    def result(self) -> Result:
        """The finished generation.

        Raises:
            ParameterError: the stream has not been read to its end.
        """
        request = self._request
        if not self._ended or request.finish_reason is None:
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
        _check_flag("exact", exact)
        self._bundle = open_bundle(bundle)
        self.precision = _one_of("precision", precision, self._bundle.precisions())
        self.draft = draft
        self.window = window
        self.exact = exact
        self._tokenizer = Tokenizer(self._bundle)
        self._eos_ids = frozenset(self._bundle.manifest.generation.eos_ids)
        self._lanes = Lanes(
            self._bundle,
            precision=self.precision,
            draft=draft,
            window=window,
            threads=threads,
            exact=exact,
            progress=progress,
        )
        self.drafts = self._lanes.drafts
        self.threads = self._lanes.box.threads

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, as :meth:`generate` would process them.

        Raises:
            PromptError: the prompt is empty or malformed.
        """
        return self._tokenizer.encode(prompt)

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
        if not isinstance(stop, Iterable):
            raise ParameterError(f"stop={stop!r}: a string or a list of strings, () for none")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(not isinstance(s, str) or not s for s in stops):
            raise ParameterError(f"stop={stop!r}: strings of at least one character")
        _check_flag("ignore_eos", ignore_eos)
        _check_callable("trace", trace)
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
        self, prompt: Prompt, *, callback: Callable[[str], None] | None = None, **options: Unpack[GenerationOptions]
    ) -> Result:
        """Return the whole answer; options as for :meth:`stream`, and ``callback``, told each piece of text."""
        _check_callable("callback", callback)
        stream = self.stream(prompt, **options)
        try:
            for piece in stream:
                if callback is not None:
                    callback(piece)
        finally:
            stream.close()  # an error of the callback, kept by its catcher, would keep the slot
        return stream.result

    def _pieces(self, request: Request, trace: Callable[[Event], None] | None) -> Iterator[str]:
        lane = self._lanes.take(request)
        usable = True
        try:
            yield from generate(request, lane.target, self._lanes.policy(lane), trace)
            lane.tokens = request.tokens[: request.kv_length]
        except EngineError:
            # What the failed pass wrote is unknown, and a NaN behind a mask would leak into later requests.
            usable = False
            raise
        finally:
            if request.finish_reason is None:
                request.finish_reason = "cancelled"
            request.stream.finish()
            if usable:
                self._lanes.release(lane)


def _one_of(name: str, value: str | None, allowed: list[str]) -> str:
    if value is None:
        return allowed[0]
    if value not in allowed:
        raise ParameterError(f"{name}={value!r}: this bundle has {', '.join(allowed)}")
    return value


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, (bool, np.bool_)):
        raise ParameterError(f"{name}={value!r}: True or False")


def _check_callable(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise ParameterError(f"{name}={value!r}: a function, or None")


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)

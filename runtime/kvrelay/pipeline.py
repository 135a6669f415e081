"""The Python API: one bundle, one request at a time for each caller, streamed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, TypedDict

from .bundle import open_bundle
from .errors import EngineError, KvrelayError, ParameterError
from .intake import Intake, Result, check_callable, check_flag, one_of, result_of
from .lanes import Lanes
from .loop import Event, generate
from .place import draft_place_of, place_of
from .request import Request
from .tokenizer import Prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["GenerationOptions", "Pipeline", "Result", "Stream"]


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

    def __init__(self, request: Request, pieces: Iterator[str]) -> None:
        self._request = request
        self._pieces = pieces
        self._busy = threading.Lock()
        self._ended = False
        self._error: KvrelayError | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """Return the next piece of text, never empty.

        Raises:
            ParameterError: another thread is inside this stream.
            KvrelayError: the generation failed.
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
        except KvrelayError as error:
            self._error = error
            raise
        finally:
            self._busy.release()

    def cancel(self) -> None:
        """End the generation after the pass at hand. Any thread may call this at any time."""
        self._request.cancelled = True

    def close(self) -> None:
        """Give the slot back without finishing; what was committed so far is the result.

        Raises:
            ParameterError: another thread is inside this stream.
        """
        if not self._busy.acquire(blocking=False):
            raise ParameterError("this stream is in use by another thread; cancel() ends it from any thread")
        try:
            self._pieces.close()  # type: ignore[attr-defined]
            if self._request.finish_reason is None:  # it was never begun
                self._request.finish_reason = "cancelled"
            self._ended = True
        finally:
            self._busy.release()

    @property
    def result(self) -> Result:
        """The finished generation.

        Raises:
            ParameterError: the stream has neither been read to its end nor closed.
            KvrelayError: the generation failed.
        """
        request = self._request
        if self._error is not None:
            raise self._error
        if not self._ended or request.finish_reason is None:
            raise ParameterError("the stream has no result yet: read it to its end, or close it")
        return result_of(request)


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
        backend: what runs the target: "onnxruntime", "tensorrt" or "tensorrt-rtx"; the last two run plans that
            ``kvrelay build`` made on this box.
        provider: of ONNX Runtime: "cpu" (the default), "cuda", "tensorrt", or several in order of preference,
            separated by commas: operators that "cuda" lacks are an error unless "cuda,cpu" allows them on the CPU.
        draft_backend: of drafts with an engine, as ``backend``; None with ``draft_provider`` None for the target's.
        draft_provider: of drafts with an engine, as ``provider``. KV entries that a draft elsewhere lacks are copied
            to it, each once, and counted.
        progress: told what takes long on first use; may use what is open, but open nothing.

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
        backend: str = "onnxruntime",
        provider: str | None = None,
        draft_backend: str | None = None,
        draft_provider: str | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        check_flag("exact", exact)
        place = place_of(backend, provider)
        self._bundle = open_bundle(bundle)
        self.precision = one_of("precision", precision, self._bundle.precisions())
        self.draft = draft
        self.window = window
        self.exact = exact
        self._intake = Intake(self._bundle)
        self._lanes = Lanes(
            self._bundle,
            precision=self.precision,
            draft=draft,
            window=window,
            threads=threads,
            exact=exact,
            place=place,
            draft_place=draft_place_of(place, draft_backend, draft_provider),
            progress=progress,
        )
        self.drafts = self._lanes.drafts
        self.threads = self._lanes.box.threads

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, as :meth:`generate` would process them.

        Raises:
            PromptError: the prompt is empty or malformed.
        """
        return self._intake.tokenizer.encode(prompt)

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
        check_callable("trace", trace)
        request = self._intake.request(
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
        )
        return Stream(request, self._pieces(request, trace))

    def generate(
        self, prompt: Prompt, *, callback: Callable[[str], None] | None = None, **options: Unpack[GenerationOptions]
    ) -> Result:
        """Return the whole answer; options as for :meth:`stream`, and ``callback``, told each piece of text."""
        check_callable("callback", callback)
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

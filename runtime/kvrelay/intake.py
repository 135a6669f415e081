"""From a caller's prompt and options to a checked request, and from a finished request to its result."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .bundle import Bundle
from .errors import ParameterError, PromptError
from .receipt import Receipt
from .request import Request
from .sampling import Sampler, SamplingParams
from .stats import Stats
from .text import TextStream
from .tokenizer import Prompt, Tokenizer

__all__ = ["Intake", "Result", "check_callable", "check_flag", "is_whole", "one_of", "result_of"]


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation. Text, ids, scores and reason always agree with each other."""

    text: str
    token_ids: list[int]  # the output, an EOS id at its end included
    scores: list[float]  # float32 log-probability of each output token, before filters
    finish_reason: str  # "stop", "length" or "cancelled"
    seed: int
    stats: Stats
    receipt: Receipt | None = None  # of a deterministic request in an Engine


class Intake:
    """Makes requests for one bundle; everything that a caller may get wrong is refused here."""

    def __init__(self, bundle: Bundle) -> None:
        self.tokenizer = Tokenizer(bundle)
        self._model = bundle.target
        self._eos_ids = frozenset(bundle.manifest.generation.eos_ids)

    def request(
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
    ) -> Request:
        """Return a checked request; parameters as for :meth:`kvrelay.Pipeline.stream`.

        Raises:
            ParameterError: a parameter is out of range.
            PromptError: the prompt is empty, or does not fit the context.
        """
        params = SamplingParams(
            temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty
        )
        if not is_whole(max_new_tokens) or max_new_tokens < 1:
            raise ParameterError(f"max_new_tokens={max_new_tokens!r}: a whole number of at least 1")
        if seed is None:
            seed = secrets.randbits(63)
        elif not is_whole(seed) or not 0 <= seed < 2**64:
            raise ParameterError(f"seed={seed!r}: a whole number, 0 to 2**64 - 1, or None")
        if not isinstance(stop, Iterable) or isinstance(stop, Mapping):
            raise ParameterError(f"stop={stop!r}: a string or a list of strings, () for none")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(not isinstance(s, str) or not s for s in stops):
            raise ParameterError(f"stop={stop!r}: strings of at least one character")
        if any("\ud800" <= c <= "\udfff" for s in stops for c in s):
            raise ParameterError(f"stop={stop!r}: holds half of a character: the text was not UTF-8")
        check_flag("ignore_eos", ignore_eos)
        tokens = self.tokenizer.encode(prompt)
        context = self._model.context
        if len(tokens) >= context:
            raise PromptError(
                f"the prompt has {len(tokens)} tokens, the context is {context} and must hold at least one more: "
                "shorten the prompt, or export with a larger --context"
            )
        return Request(
            tokens=tokens,
            limit=min(context, len(tokens) + int(max_new_tokens)),
            sampler=Sampler(params, int(seed), self._model.vocab_size, tokens),
            stream=TextStream(self.tokenizer.decode, stops),
            eos_ids=frozenset() if ignore_eos else self._eos_ids,
        )


def result_of(request: Request) -> Result:
    """Return the result of a request that has ended."""
    assert request.finish_reason is not None
    return Result(
        text=request.stream.text,
        token_ids=request.output,
        scores=list(request.scores),
        finish_reason=request.finish_reason,
        seed=request.sampler.seed,
        stats=request.stats,
    )


def one_of(name: str, value: str | None, allowed: list[str]) -> str:
    """Return ``value``, or the first that is allowed for None.

    Raises:
        ParameterError: it is not allowed; lists what is.
    """
    if value is None:
        return allowed[0]
    if value not in allowed:
        raise ParameterError(f"{name}={value!r}: this bundle has {', '.join(allowed)}")
    return value


def check_flag(name: str, value: object) -> None:
    """Refuse what is not a truth value."""
    if not isinstance(value, (bool, np.bool_)):
        raise ParameterError(f"{name}={value!r}: True or False")


def check_callable(name: str, value: object) -> None:
    """Refuse what is neither a function nor None."""
    if value is not None and not callable(value):
        raise ParameterError(f"{name}={value!r}: a function, or None")


def is_whole(value: object) -> bool:
    """Whether ``value`` is an integer, numpy's included."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)

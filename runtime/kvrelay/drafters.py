"""What proposes tokens: an engine, or a lookup in the request's own text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .engine import BoundPass
from .kv import HandOver
from .logits import LogitRow
from .request import Request

__all__ = ["Drafter", "EngineDrafter", "NgramDrafter"]


class Drafter(Protocol):
    """Proposes candidates for one request at a time."""

    name: str
    grade: int  # kind of the last proposal; proposals of one grade are about equally good

    def begin(self, request: Request) -> None:
        """Start on a new request."""
        ...

    def propose(self, request: Request, count: int) -> list[int]:
        """Return up to ``count`` candidates for the positions after the request's last committed token."""
        ...

    def commit(self, request: Request) -> None:
        """Learn that a window was committed: entries behind the request's ``kv_length`` are rolled back."""
        ...


class EngineDrafter:
    """Drafts with an engine, token after token.

    Three ways to a cache, one rule for each:

    - *shared*: the engine reads and writes the target's own cache, which the verifier has filled and will overwrite;
    - *handed over*: the same model with a cache of another dtype; verified entries are copied to it;
    - *its own*: another model; its cache holds what was fed, so after a full match its last candidate, sampled but
      never fed, is fed with the next proposal.

    Args:
        name: the draft's name.
        bind: makes the bound pass of a width.
        step_width: tokens of a step; behind the first they are pads. An engine may be faster at two than at one.
        own_model: the cache is the engine's own.
        hand_over: copies verified entries to the engine's cache.
        chunk: tokens fed at once while catching up.
    """

    def __init__(
        self,
        name: str,
        bind: Callable[[int], BoundPass],
        *,
        step_width: int = 1,
        own_model: bool = False,
        hand_over: HandOver | None = None,
        chunk: int = 64,
    ) -> None:
        self.name = name
        self.grade = 0
        self._bind = bind
        self._passes: dict[int, BoundPass] = {}
        self._step_width = step_width
        self._own_model = own_model
        self._hand_over = hand_over
        self._widths = [w for w in (chunk, 16, 4, 2) if step_width < w <= chunk] + [step_width]
        self._length = 0  # valid entries of the engine's own cache

    def begin(self, request: Request) -> None:
        """Forget the former request's entries."""
        self._length = 0
        if self._hand_over is not None:
            self._hand_over.restart()

    def propose(self, request: Request, count: int) -> list[int]:
        """Draft ``count`` tokens, fewer after one that would end the request."""
        stats = request.stats
        spent = sum(p.seconds for p in self._passes.values())
        runs = sum(p.runs for p in self._passes.values())
        written = sum(p.kv_bytes_copied for p in self._passes.values())
        if self._hand_over is not None:
            copied = self._hand_over.bytes
            self._hand_over.advance(request.kv_length)
            stats.kv_bytes_copied += self._hand_over.bytes - copied
        position = len(request.tokens) - 1  # of the token that is fed next
        if self._own_model:
            self._catch_up(request.tokens, position)
        drafted: list[int] = []
        token = request.tokens[position]
        while len(drafted) < count:
            step = self._step(token, position)
            token = request.sampler.choose(LogitRow(step, 0, 0), position + 1)
            drafted.append(token)
            request.sampler.observe(token)
            position += 1
            if token in request.eos_ids:
                break
        for candidate in drafted:
            request.sampler.forget(candidate)
        self._length = position
        stats.draft_seconds += sum(p.seconds for p in self._passes.values()) - spent
        stats.draft_runs += sum(p.runs for p in self._passes.values()) - runs
        stats.kv_bytes_copied += sum(p.kv_bytes_copied for p in self._passes.values()) - written
        return drafted

    def commit(self, request: Request) -> None:
        """Keep the entries of committed tokens; what was fed behind them is rolled back."""
        self._length = min(self._length, request.kv_length)

    def _catch_up(self, tokens: Sequence[int], end: int) -> None:
        """Feed the tokens before ``end`` that the engine's own cache lacks."""
        while self._length < end:
            missing = end - self._length
            width = next((w for w in self._widths if w <= missing), self._widths[-1])
            part = list(tokens[self._length : self._length + min(width, missing)])
            self._feed(width, part, self._length)
            self._length += len(part)

    def _step(self, token: int, position: int) -> BoundPass:
        return self._feed(self._step_width, [token], position)

    def _feed(self, width: int, part: Sequence[int], position: int) -> BoundPass:
        bound = self._passes.get(width)
        if bound is None:
            bound = self._passes[width] = self._bind(width)
        # Pads repeat a real token: an engine that quantises activations with one scale a tensor reads it from them.
        bound.input_ids[0, :] = part[-1]
        bound.input_ids[0, : len(part)] = part
        bound.write_index[0] = position
        bound.logit_rows[0, 0] = len(part) - 1
        bound.run()
        return bound


class NgramDrafter:
    """Prompt lookup: proposes what followed the same last tokens earlier in the request's own text.

    The longest match of ``longest`` to 1 tokens is used, at its latest place; its length is the proposal's grade.
    """

    name = "ngram"

    def __init__(self, longest: int = 4) -> None:
        self.grade = 0
        self._sizes = range(longest, 0, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def begin(self, request: Request) -> None:
        """Forget the former request's text."""
        self._after.clear()
        self._indexed = 0

    def propose(self, request: Request, count: int) -> list[int]:
        """Return the continuation of the longest match, or nothing."""
        tokens = request.tokens
        # An n-gram is indexed once a token follows it, so the end of the text never matches itself.
        for end in range(max(self._indexed, 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._indexed = len(tokens)
        for size in self._sizes:
            start = self._after.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if start is not None:
                self.grade = size
                return tokens[start : start + count]
        return []

    def commit(self, request: Request) -> None:
        """Nothing to keep: the text itself is the state."""

"""Slots with everything bound to them, and the choice of engines behind a pipeline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from .box import boxes
from .bundle import Bundle
from .drafters import Drafter, EngineDrafter, NgramDrafter
from .drafts import acceptance_prior, check_draft, draft_cache, draft_entry
from .errors import ParameterError
from .facts import exact_windows
from .kv import KVCache, kv_bytes
from .manifest import EngineEntry
from .place import Place
from .policy import Costs, Policy, break_even
from .request import Request, common_prefix
from .target import Target

__all__ = ["Lane", "Lanes"]

# A draft that pays only from here on is not loaded by "auto": nothing reaches it for long.
_HOPELESS = 0.97


@dataclass(slots=True)
class Lane:
    """One slot with everything bound to it."""

    target: Target
    drafters: dict[str, Drafter]
    tokens: list[int] = field(default_factory=list)  # whose KV is in the slot


class Lanes:
    """Hands out lanes: each generation has one for itself, and more are made as they are needed.

    Args:
        bundle: the bundle.
        precision: of the target, one that the bundle has.
        draft: "auto", or one of :func:`kvrelay.drafts.draft_names`.
        window: a fixed verify window, or None.
        threads: thread count of the process; None for the count in force.
        exact: commit only through verify engines of one shape class.
        place: where the target runs.
        draft_place: where drafts run.
        progress: told what takes long on first use.

    Raises:
        ParameterError: the draft or the window is not one that the bundle has.
        ExactnessError: this box cannot keep what ``exact`` promises.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        precision: str,
        draft: str,
        window: int | None,
        threads: int | None,
        exact: bool,
        place: Place,
        draft_place: Place,
        progress: Callable[[str], None],
    ) -> None:
        self._bundle = bundle
        self._precision = precision
        self._draft = draft
        self._exact = exact
        self.drafts = check_draft(bundle, precision, draft)
        self._verify = bundle.verify_engines(precision)
        sizes = [e.sequence for e in self._verify]
        if window is not None and (not isinstance(window, (int, np.integer)) or window not in sizes):
            raise ParameterError(f"window={window!r}: this bundle has verify windows of {sizes} tokens, or None")
        self._window = None if window is None else int(window)
        self._prefill = bundle.engine("prefill", precision)
        self._decode = bundle.engine("decode", precision)
        self.box, self.draft_box = boxes(bundle, threads, progress, place, draft_place)
        drafts = [draft_entry(self._bundle, self._precision, n) for n in self._engine_drafts()]
        self.facts = self.box.facts(precision, drafts, self.draft_box)
        if exact:
            self._verify = exact_windows(self.facts, self._verify)
            if window is not None and window not in [e.sequence for e in self._verify]:
                raise ParameterError(f"window={window}: on this box its engine lies outside the exact shape class")
        self._plain = self._plain_step()
        # Where prefill gives the same bits as verify, short ends of a prompt may go through verify engines, and what
        # an earlier request left in a slot may serve a later one.
        self._one_class = self.facts.in_class(self._prefill)
        self.costs = self._stored_costs()
        # Reentrant: the garbage collector may close a forgotten stream, whose lane comes back, inside take().
        self._lock = threading.RLock()
        self.free: list[Lane] = []
        self.release(self._new())

    # -- handing out --------------------------------------------------------------------------------------------

    def take(self, request: Request) -> Lane:
        """Take a free lane, one that holds the prompt's beginning if there is one, or make a lane."""
        with self._lock:
            lane = None
            if self.free:
                lane = max(self.free, key=lambda free: self._reusable(free, request))
                self.free.remove(lane)
        if lane is None:
            lane = self._new()
        request.kv_length = request.stats.reused_tokens = self._reusable(lane, request)
        lane.tokens = []
        target = self._bundle.target
        request.stats.kv_bytes = kv_bytes(target, target.layers, lane.target.cache.dtype.itemsize, target.capacity)
        request.stats.plain_ms = self.costs.plain
        return lane

    def release(self, lane: Lane) -> None:
        """Give a lane back."""
        with self._lock:
            self.free.append(lane)

    def _reusable(self, lane: Lane, request: Request) -> int:
        """Entries of a slot that a prompt can use: only where every committing pass gives the same bits."""
        if not (self._exact and self._one_class):
            return 0
        return common_prefix(lane.tokens, request.tokens[:-1])

    # -- making -------------------------------------------------------------------------------------------------

    def _new(self) -> Lane:
        cache = self.box.cache(self._prefill)
        verify = {}
        for entry in self._verify:
            assert entry.sequence is not None and entry.rows is not None
            verify[entry.sequence] = self.box.engine(entry).bind(cache, entry.sequence, entry.rows)
        assert self._prefill.sequence is not None
        prefill = self.box.engine(self._prefill).bind(cache, self._prefill.sequence, 1)
        plain = verify[min(verify)] if self._plain is None else self.box.engine(self._plain).bind(cache, 1, 1)
        bound = Target(cache, verify, prefill, plain, mixed_prefill=self._one_class)
        return Lane(bound, {name: self._new_drafter(name, cache) for name in self._wanted_drafts()})

    def _new_drafter(self, name: str, cache: KVCache) -> Drafter:
        if name == "ngram":
            return NgramDrafter()
        entry = draft_entry(self._bundle, self._precision, name)
        engine = self.draft_box.engine(entry)
        own_model = entry.model != self._bundle.manifest.target
        own, hand_over = draft_cache(self._bundle, entry, cache, engine.memory)
        return EngineDrafter(
            name,
            lambda width: engine.bind(own, width, 1),
            step_width=self.facts.draft_width.get(entry.name, 1),
            own_model=own_model,
            hand_over=hand_over,
        )

    def _plain_step(self) -> EngineEntry | None:
        """Return the engine of a pass without a draft; None for the narrowest verify engine, its second token a pad.

        Exact steps stay in the verifier's shape class: the step engine's lie there or not, as the check found.
        """
        if not self._exact:
            return self._decode
        steps = [e for e in self._bundle.engines(role="step", precision=self._precision) if self.facts.in_class(e)]
        narrowest = self.facts.verify_ms[min(e.sequence for e in self._verify if e.sequence)]
        return steps[0] if steps and self.facts.step_ms < narrowest else None

    # -- drafts and costs ---------------------------------------------------------------------------------------

    def _engine_drafts(self) -> list[str]:
        """Drafts with an engine that is not the target's own."""
        own = ("none", "ngram") if self.draft_box is not self.box else ("none", "ngram", "self")
        return [n for n in self.drafts if n not in own]

    def _wanted_drafts(self) -> list[str]:
        if self._draft == "none":
            return []
        if self._draft != "auto":
            return [self._draft]
        needed = {name: break_even(self.costs, name) for name in ("ngram", *self._engine_drafts())}
        return [name for name, acceptance in needed.items() if acceptance is not None and acceptance <= _HOPELESS]

    def _stored_costs(self) -> Costs:
        facts = self.facts
        windows = sorted(e.sequence for e in self._verify if e.sequence)
        verify = {n: facts.verify_ms[n] for n in windows}
        after_draft = {n: facts.verify_after_draft_ms[n] for n in windows}
        plain = verify[min(verify)]
        if self._plain is not None:
            plain = facts.plain_ms if self._plain is self._decode else facts.step_ms
        draft = {n: facts.draft_ms[draft_entry(self._bundle, self._precision, n).name] for n in self._engine_drafts()}
        return Costs(plain, verify, after_draft, {"self": facts.plain_ms, **draft, "ngram": 0.0})

    def policy(self, lane: Lane) -> Policy:
        """Return the policy for one request on ``lane``."""
        return Policy(
            drafters=list(lane.drafters.values()),
            costs=self.costs,
            windows=[self._window] if self._window is not None else list(self.costs.verify),
            prior=partial(acceptance_prior, self._bundle, self._precision),
            fixed=self._window is not None and self._draft != "auto",
        )

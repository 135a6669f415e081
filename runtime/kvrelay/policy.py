"""Choose the draft and its length from stored costs and the request's own history.

Time per committed token with k candidates of acceptance a and a verify window of N:
``(k * t_draft + t_verify(N)) / E``, ``E = 1 + a + ... + a**k`` (arXiv 2211.17192, equation 1). Live timings are never
looked at, so equal runs on one box choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .drafters import Drafter
from .request import Request, common_prefix

__all__ = ["MARGIN", "Acceptance", "Costs", "Kind", "Plan", "Policy", "break_even", "expected_tokens"]

# A draft must promise this much over the alternative before it is used: stored costs are not exact.
MARGIN = 1.03
# Weight of the prior, in evaluated tokens, and how fast evidence fades, for each window and each plain step.
_PRIOR_WEIGHT = 6.0
_FADE_WINDOW = 0.95
_FADE_PLAIN = 0.99


@dataclass(frozen=True, slots=True)
class Costs:
    """Stored milliseconds on this box."""

    plain: float
    verify: dict[int, float]  # by window size, after a lookup
    verify_after_draft: dict[int, float]  # by window size, after a draft engine
    draft: dict[str, float]  # one step, by draft name; 0 for a lookup

    def window(self, draft: str, count: int, size: int) -> float:
        """Cost of drafting ``count`` candidates and verifying them in a window of ``size``."""
        step = self.draft[draft]
        return count * step + (self.verify_after_draft if step else self.verify)[size]

    def pass_ms(self, size: int) -> float:
        """Cost of a target pass alone: a window of ``size``, or a plain step for 0."""
        return self.verify[size] if size else self.plain


Kind = tuple[str, int]  # a draft's name and the grade of its proposals


@dataclass(slots=True)
class _Track:
    prior: float
    evaluated: float = 0.0
    accepted: float = 0.0

    @property
    def acceptance(self) -> float:
        return (self.accepted + self.prior * _PRIOR_WEIGHT) / (self.evaluated + _PRIOR_WEIGHT)

    def fade(self, factor: float) -> None:
        self.evaluated *= factor
        self.accepted *= factor


@dataclass(slots=True)
class Acceptance:
    """What one request has shown of each draft's acceptance.

    Args:
        prior: acceptance of a draft's proposals of a grade before anything was seen.
    """

    prior: Callable[[str, int], float]
    _tracks: dict[Kind, _Track] = field(init=False, default_factory=dict)

    def of(self, kind: Kind) -> float:
        """Return the acceptance to expect."""
        return self._track(kind).acceptance

    def add(self, kind: Kind, evaluated: int, accepted: int) -> None:
        """Take in a window's outcome."""
        track = self._track(kind)
        track.fade(_FADE_WINDOW)
        track.evaluated += evaluated
        track.accepted += accepted

    def add_proposal(self, kind: Kind, proposed: Sequence[int], committed: Sequence[int]) -> None:
        """Judge a proposal, used or not, by the tokens that were committed in its place."""
        matched = common_prefix(proposed, committed)
        self.add(kind, min(matched + 1, len(proposed), len(committed)), matched)

    def fade(self) -> None:
        """Trust what was seen a little less: a step went by without a draft."""
        for track in self._tracks.values():
            track.fade(_FADE_PLAIN)

    def seen(self, name: str) -> list[float]:
        """Return a draft's acceptance by grade, for those grades that came up."""
        return [track.acceptance for (draft, _), track in sorted(self._tracks.items()) if draft == name]

    def _track(self, kind: Kind) -> _Track:
        if kind not in self._tracks:
            self._tracks[kind] = _Track(self.prior(*kind))
        return self._tracks[kind]


@dataclass(frozen=True, slots=True)
class Plan:
    """One window to come. No drafter means a plain step."""

    drafter: Drafter | None
    candidates: list[int]  # already known, from a lookup
    count: int  # candidates to draft otherwise
    window: int


def expected_tokens(acceptance: float, count: int) -> float:
    """Tokens that a window of ``count`` candidates commits on average."""
    return sum(acceptance**i for i in range(count + 1))


def break_even(costs: Costs, draft: str) -> float | None:
    """Return the least acceptance at which ``draft`` is faster than plain steps, None if there is none."""
    for percent in range(101):
        a = percent / 100
        best = min(costs.window(draft, k, n) / expected_tokens(a, k) for n in costs.verify for k in range(1, n))
        if best < costs.plain:
            return a
    return None


@dataclass(slots=True)
class Policy:
    """Plans the windows of one request.

    Args:
        drafters: the candidates, lookups first.
        costs: of this box.
        windows: verify windows that may be used, ascending.
        prior: acceptance of a draft's proposals of a grade before anything was seen.
        fixed: always draft as much as the window holds; otherwise drafting must pay.
    """

    drafters: Sequence[Drafter]
    costs: Costs
    windows: Sequence[int]
    prior: Callable[[str, int], float]
    fixed: bool
    _acceptance: Acceptance = field(init=False)
    # What each lookup proposed for the window at hand. Lookups cost nothing, so they are judged at every window,
    # whether or not another draft was used.
    _looked_up: dict[Kind, list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._acceptance = Acceptance(self.prior)

    def plan(self, request: Request) -> Plan:
        """Plan the next window: at most as many candidates as tokens may still be committed before the last."""
        most = min(self.windows[-1], request.remaining) - 1
        self._looked_up.clear()
        best: Plan | None = None
        best_time = self.costs.plain / MARGIN if not self.fixed else float("inf")
        for drafter in self.drafters if most > 0 else ():
            step = self.costs.draft[drafter.name]
            known = drafter.propose(request, most) if step == 0 else []
            if step == 0:
                if not known:
                    continue
                self._looked_up[drafter.name, drafter.grade] = known
            time, count, window = self._best_length(drafter, len(known) or most)
            if time < best_time:
                best_time, best = time, Plan(drafter, known[:count], count, window)
        return best or Plan(None, [], 0, 0)

    def _best_length(self, drafter: Drafter, most: int) -> tuple[float, int, int]:
        """Return the least time per token and the count and window that give it."""
        if self.fixed:
            return 0.0, most, next(n for n in self.windows if n > most)
        acceptance = self._acceptance.of((drafter.name, drafter.grade))
        lengths = [(k, next(n for n in self.windows if n > k)) for k in range(1, most + 1)]
        times = [self.costs.window(drafter.name, k, n) / expected_tokens(acceptance, k) for k, n in lengths]
        shortest = min(times)
        # On a tie the longer draft: its extra rows are paid for.
        index = max(i for i, t in enumerate(times) if t <= shortest * 1.000001)
        return shortest, *lengths[index]

    def learn(self, plan: Plan, evaluated: int, accepted: int, committed: Sequence[int]) -> None:
        """Take in the outcome of a window, ``committed`` being the tokens that it added."""
        for kind, proposed in self._looked_up.items():
            self._acceptance.add_proposal(kind, proposed, committed)
        if plan.drafter is None:
            self._acceptance.fade()
            return
        kind = (plan.drafter.name, plan.drafter.grade)
        if kind not in self._looked_up:
            self._acceptance.add(kind, evaluated, accepted)

    def summary(self) -> str:
        """Say what the choice came to, with the break-even acceptance of each draft."""
        if not self.drafters:
            return "no draft"
        parts = []
        for drafter in self.drafters:
            needed = break_even(self.costs, drafter.name)
            limit = "never pays here" if needed is None else f"pays from {needed:.2f}"
            seen = [f"{acceptance:.2f}" for acceptance in self._acceptance.seen(drafter.name)]
            parts.append(f"{drafter.name}: acceptance lately {' / '.join(seen) or 'not tried'}, {limit}")
        return "; ".join(parts)

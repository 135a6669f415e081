"""Random schedules: whatever comes, goes, fails and is cancelled, in whatever order, nobody's output is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvrelay import Engine, Faults, Handle, KvrelayError
from kvrelay.slots import Kept
from rig import VOCAB, Solo, Stepped, assert_counted, assert_idle, assert_same, assert_valid, make_drafting_pay, outcome

CONTEXT = 256
_BASE = [(7 * i) % 250 + 4 for i in range(CONTEXT)]
_LOOP = [40, 41, 42, 43] * 8
PROMPTS = [[77], _BASE[:3], _BASE[:17], _BASE[:40], _BASE[:41], _LOOP, [*_BASE[:17], *_LOOP], _BASE[: CONTEXT - 9]]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.3, "seed": 1},
    {"temperature": 0.8, "top_k": 5, "seed": 2, "repetition_penalty": 1.3},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.02, "seed": 3},
    {"frequency_penalty": 0.6, "presence_penalty": 0.2},
]
DRAFTS = {"fp32": ["ngram", "skip", "int8-dynamic", "cousin"], "int4": ["ngram", "skip", "int8-dynamic", "cousin"]}
ENGINES = [(1, 4, 1), (3, 4, 2), (6, 8, 4)]  # max_batch, window, group


@dataclass(frozen=True)
class Ask:
    """One request of a schedule."""

    wait: int  # turns of the loop before it comes
    prompt: int
    sampling: int
    limit: int
    deterministic: bool
    stop: int | None  # where in its own text its stop string begins
    ignore_eos: bool
    cancel: int | None  # turns of the loop after it came


@dataclass(frozen=True)
class Schedule:
    """What happens to an engine."""

    bundle: str
    precision: str
    engine: int
    in_class: bool
    drafts: list[str]
    faults: Faults
    asks: list[Ask]


def of_a_kind(kind: st.SearchStrategy[Any], share_of_none: int = 2) -> st.SearchStrategy[Any]:
    return st.one_of(*[st.none()] * share_of_none, kind)


ASK = st.builds(
    Ask,
    wait=st.integers(0, 6),
    prompt=st.integers(0, len(PROMPTS) - 1),
    sampling=st.integers(0, len(SAMPLINGS) - 1),
    limit=st.sampled_from([9, 17, 24, 8, 5, 4, 3, 2, 1]),
    deterministic=st.sampled_from([True, True, False]),
    stop=of_a_kind(st.integers(0, 12)),
    ignore_eos=st.booleans(),
    cancel=of_a_kind(st.integers(0, 12), 3),
)
SHARE = st.sampled_from([0.0, 0.0, 0.1, 0.5])
SCHEDULE = st.builds(
    Schedule,
    bundle=st.sampled_from(["batch", "tied"]),
    precision=st.sampled_from(["fp32", "int4"]),
    engine=st.integers(0, len(ENGINES) - 1),
    in_class=st.sampled_from([False, False, True]),  # False: whatever is deterministic is replayed
    drafts=st.lists(st.sampled_from(DRAFTS["fp32"]), unique=True, max_size=2),
    faults=st.builds(
        Faults,
        rollback=st.sampled_from([0.0, 0.2, 1.0]),
        engine=st.sampled_from([0.0, 0.0, 0.0, 0.0, 0.02, 0.2]),
        pads=st.sampled_from([0.0, 0.0, 0.0, 0.0, 0.2]),
        seed=st.integers(0, 99),
    ),
    asks=st.lists(ASK, min_size=1, max_size=7),
)


@dataclass
class Played:
    """A request of a schedule that was submitted."""

    ask: Ask
    prompt: list[int]
    options: dict[str, Any]
    handle: Handle
    came: int


@dataclass
class Stage:
    """Engines that schedules share, and what requests give alone."""

    bundles: dict[str, Path]
    stepped: dict[tuple[str, str, int], Stepped] = field(default_factory=dict)
    solos: dict[tuple[str, str], Solo] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)

    def solo(self, bundle: str, precision: str) -> Solo:
        key = (bundle, precision)
        if key not in self.solos:
            self.solos[key] = Solo(self.bundles[bundle], precision, eos_ids=range(60, 64))
        return self.solos[key]

    def engine(self, schedule: Schedule) -> Stepped:
        key = (schedule.bundle, schedule.precision, schedule.engine)
        max_batch, window, group = ENGINES[schedule.engine]
        if key not in self.stepped:
            engine = Engine(
                self.bundles[schedule.bundle],
                precision=schedule.precision,
                max_batch=max_batch,
                window=window,
                group=group,
                draft="auto",
            )
            engine._intake._eos_ids = frozenset(range(60, 64))
            make_drafting_pay(engine)
            engine._every_drafter = list(engine._scheduler._drafting._drafters)
            self.stepped[key] = Stepped(engine)
        return self._prepared(self.stepped[key], schedule)

    def _prepared(self, stepped: Stepped, schedule: Schedule) -> Stepped:
        """Make the engine as new, under this schedule's settings."""
        engine = stepped.engine
        scheduler = engine._scheduler
        scheduler._steps.in_class = schedule.in_class
        scheduler._slots.kept = [Kept() for _ in scheduler._slots.kept]
        scheduler._injector._faults = schedule.faults
        scheduler._injector._random = np.random.default_rng(schedule.faults.seed)
        scheduler._drafting._drafters = [d for d in engine._every_drafter if d.name in schedule.drafts]
        return stepped

    def play(self, schedule: Schedule) -> list[Played]:
        """Run a schedule, turn by turn, to its end."""
        stepped, solo = self.engine(schedule), self.solo(schedule.bundle, schedule.precision)
        played: list[Played] = []
        turn = 0

        def go(turns: int) -> None:
            nonlocal turn
            for _ in range(turns):
                for one in played:
                    if one.ask.cancel is not None and turn == one.came + one.ask.cancel:
                        one.handle.cancel()
                stepped.turn()
                turn += 1

        for ask in schedule.asks:
            go(ask.wait)
            prompt = PROMPTS[ask.prompt]
            options: dict[str, Any] = {"max_new_tokens": ask.limit, **SAMPLINGS[ask.sampling]}
            options["ignore_eos"] = ask.ignore_eos
            if ask.stop is not None:
                text = solo(prompt, **{**options, "max_new_tokens": 24}).text
                options["stop"] = text[ask.stop : ask.stop + 2] or "x"
            handle = stepped.engine.submit(prompt, deterministic=ask.deterministic, **options)
            played.append(Played(ask, prompt, options, handle, turn))
        go(20)
        stepped.drain()
        return played

    def check(self, schedule: Schedule) -> None:
        """Run a schedule and check every request of it."""
        played = self.play(schedule)
        solo = self.solo(schedule.bundle, schedule.precision)
        faulty = schedule.faults.engine > 0 or schedule.faults.pads > 0
        for one in played:
            result = outcome(one.handle)
            if isinstance(result, KvrelayError):
                assert faulty and "injected" in str(result)
                self.count("failed")
                continue
            assert "".join(one.handle.stream()) == result.text
            assert_counted(result)
            self.count(result.finish_reason)
            self.count("rollbacks", result.stats.rollbacks * one.ask.deterministic)
            self.count("accepted", result.stats.accepted)
            self.count("reused", result.stats.reused_tokens)
            if result.finish_reason == "cancelled":
                assert one.ask.cancel is not None
            if not one.ask.deterministic:
                assert_valid(result, solo, one.prompt, **one.options)
                continue
            wanted = solo(one.prompt, **one.options)
            if result.finish_reason != "cancelled":
                assert_same(result, wanted)
            else:
                count = len(result.token_ids)
                assert result.token_ids == wanted.token_ids[:count]
                assert result.scores == wanted.scores[:count]
        assert_idle(self.engine(schedule).engine)

    def count(self, what: str, times: int = 1) -> None:
        self.seen[what] = self.seen.get(what, 0) + times


@pytest.fixture(scope="module")
def bundles(batch_bundle: Path, tied_bundle: Path) -> dict[str, Path]:
    return {"batch": batch_bundle, "tied": tied_bundle}


@pytest.fixture
def stage(bundles: dict[str, Path]) -> Iterator[Stage]:
    """A stage, and at its end a look at whether the schedules had in them what they are for."""
    made = Stage(bundles)
    yield made
    for stepped in made.stepped.values():
        stepped.let_go()
        stepped.engine.close()
        stats = stepped.engine.stats
        assert stats.submitted == stats.finished + stats.cancelled + stats.failed
        made.count("replays", stats.replays)
        made.count("replays rolled back", stats.rollbacks)
    for what in ("replays", "replays rolled back"):  # a setting that no longer reaches the loop would leave them out
        assert made.seen.get(what, 0) > 0, f"{what}: {made.seen}"


def assert_schedules_were_mixed(stage: Stage) -> None:
    for what in ("stop", "length", "cancelled", "failed", "rollbacks", "accepted", "reused"):
        assert stage.seen.get(what, 0) > 5, f"{what}: {stage.seen}"


def property_of(examples: int, **options: Any) -> Callable[[Callable[[Schedule], None]], Callable[[], None]]:
    def wrap(check: Callable[[Schedule], None]) -> Callable[[], None]:
        bounded = settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            **options,
        )
        return bounded(given(SCHEDULE)(check))

    return wrap


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_token_that_is_not_the_targets_would_be_noticed(batch_bundle: Path, sampling: dict[str, Any]) -> None:
    """The check of ordinary outputs forgives rounding errors and nothing else."""
    solo = Solo(batch_bundle)
    options = {"max_new_tokens": 9, "ignore_eos": True, **sampling}
    result = solo(PROMPTS[2], **options)
    assert_valid(result, solo, PROMPTS[2], **options)
    for at in range(9):
        ids = list(result.token_ids)
        ids[at] = (ids[at] + 1) % VOCAB
        with pytest.raises(AssertionError, match="is not the target's"):
            assert_valid(replace(result, token_ids=ids), solo, PROMPTS[2], **options)


def test_no_schedule_changes_an_output_leaks_or_hangs(stage: Stage) -> None:
    property_of(100, derandomize=True)(stage.check)()
    assert_schedules_were_mixed(stage)


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_no_schedule_of_many_changes_an_output_leaks_or_hangs(stage: Stage) -> None:
    property_of(2000)(stage.check)()
    assert_schedules_were_mixed(stage)

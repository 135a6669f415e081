"""Where the place in a window matters windows are aligned; where rows or pads matter deterministic requests refuse."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvrelay import Engine, ExactnessError, Faults, Result
from kvrelay.batch_target import BatchTarget, Feed
from kvrelay.box import Box
from kvrelay.invariance import Verdict
from kvrelay.logits import LogitRow
from kvrelay.shapes import Shape
from rig import PROMPT, SAMPLED, Solo, assert_counted, assert_idle, assert_same, assert_valid

PLAIN: dict[str, Any] = {"ignore_eos": True}
ASKS = [
    (PROMPT, {"max_new_tokens": 70, **PLAIN}),
    (PROMPT, {"max_new_tokens": 50, **SAMPLED}),
    ([77], {"max_new_tokens": 33, **PLAIN}),
    ([(7 * i) % 250 + 4 for i in range(40)], {"max_new_tokens": 1, **PLAIN}),
    ([(7 * i) % 250 + 4 for i in range(41)], {"max_new_tokens": 2, **PLAIN}),
    ([(7 * i) % 250 + 4 for i in range(31)], {"max_new_tokens": 40, "frequency_penalty": 0.6, **PLAIN}),
    ([(9 * i) % 250 + 4 for i in range(240)], {"max_new_tokens": 99, **PLAIN}),
]


class Placed:
    """Makes the logits of the ``[G, N]`` engine depend on the place in the window, and notes its windows."""

    def __init__(self, target: BatchTarget) -> None:
        self._target = target
        self._run = target.run
        self.windows: list[tuple[int, int]] = []  # start and length
        target.run = self.run
        for shape in (target.main,):
            target.verdicts[shape.name] = Verdict("logits differ at other places", None)

    def run(self, shape: Shape, slot: int, feeds: Sequence[Feed]) -> list[list[LogitRow]]:
        rows = self._run(shape, slot, feeds)
        if shape == self._target.main:
            logits = rows[0][0].bound.logits
            places = np.arange(shape.width)[:, None] * 1.7 + np.arange(logits.shape[2])
            logits += np.sin(places).astype(np.float32)
            self.windows += [(feed.start, len(feed.tokens)) for feed in feeds if list(feed.tokens) != [0]]
        return rows


@pytest.fixture(scope="module")
def alone(tied_bundle: Path) -> list[Result]:
    """What each of ``ASKS`` gives alone in an aligned engine."""
    found = []
    for prompt, options in ASKS:
        with Engine(tied_bundle, precision="int4", window=8, group=4, max_batch=1) as engine:
            Placed(engine._target)
            found.append(engine.submit(prompt, deterministic=True, **options).result(60))
    return found


@pytest.mark.parametrize("max_batch", [1, 3, 8])
@pytest.mark.parametrize("rollback", [0, 0.4, 1.0])
def test_aligned_windows_give_the_same_bits_alone_and_in_any_batch(
    tied_bundle: Path, alone: list[Result], rollback: float, max_batch: int
) -> None:
    faults = Faults(rollback=rollback)
    with Engine(tied_bundle, precision="int4", window=8, group=4, max_batch=max_batch, faults=faults) as engine:
        placed = Placed(engine._target)
        assert engine._target.aligned
        for order in range(3):
            queue = [*range(len(ASKS)), *(-1 - i for i in range(order))]
            random.Random(order).shuffle(queue)
            handles = [(i, engine.submit(ASKS[i][0], deterministic=i >= 0, **ASKS[i][1])) for i in queue]
            for i, handle in handles:
                result = handle.result(60)
                assert_counted(result)
                if i >= 0:
                    assert_same(result, alone[i])
                assert result.stats.reused_tokens == 0, "other passes than alone would have written it"
        assert_idle(engine)
    assert engine.stats.rollbacks > 0
    assert {start % 8 for start, _ in placed.windows} == {0}
    assert {length for _, length in placed.windows} > {1, 8}
    assert "aligned to multiples of 8" in alone[0].stats.policy


def test_the_place_in_a_window_matters_in_these_tests(tied_bundle: Path, alone: list[Result]) -> None:
    solo = Solo(tied_bundle, "int4")
    assert any(r.token_ids != solo(p, **o).token_ids for r, (p, o) in zip(alone, ASKS, strict=True))
    sliding = []
    for rollback in (0, 1.0):
        faults = Faults(rollback=rollback)
        with Engine(
            tied_bundle, precision="int4", window=8, group=4, max_batch=1, in_class=False, faults=faults
        ) as engine:
            target = engine._target
            Placed(target)
            target.verdicts[target.main.name] = Verdict(None, None)
            target.replay_shapes = lambda target=target: [target.main]
            sliding.append(engine.submit(PROMPT, deterministic=True, **ASKS[0][1]).result(60).token_ids)
    assert sliding[0] != sliding[1], "windows that slide would not keep the promise"


def test_aligned_engines_refuse_to_decode_inside_the_class(tied_bundle: Path) -> None:
    with Engine(tied_bundle, window=8, group=4, max_batch=2) as engine:
        Placed(engine._target)
        assert engine._target.class_step(1) is None
        with pytest.raises(ExactnessError) as error:
            engine._target.require_class_steps(2)
        assert str(error.value) == (
            "in_class=True cannot be kept on this box: outside the verifier's shape class lies "
            "fp32-verify-4x8@4x8: logits differ at other places, so windows are aligned and replayed; "
            "leave in_class out"
        )


def test_a_prefill_outside_the_class_is_named_as_the_reason_and_the_receipt_names_the_shape(
    tied_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = Box.verdicts

    def outside(box: Box, precision: str, shapes: Sequence[Shape], **options: bool) -> dict[str, Verdict]:
        found = verdicts(box, precision, shapes, **options)
        return {n: Verdict("KV entries differ at context 3", None) if "prefill" in n else v for n, v in found.items()}

    monkeypatch.setattr(Box, "verdicts", outside)
    reason = "outside the verifier's shape class lies fp32-prefill-1x16@1x16: KV entries differ at context 3"
    with pytest.raises(ExactnessError, match=f"in_class=True cannot be kept on this box: {reason}, so windows"):
        Engine(tied_bundle, window=8, group=4, max_batch=2, in_class=True)
    for group, window in ((4, 8), (1, 16)):
        with Engine(tied_bundle, window=window, group=group, max_batch=2) as engine:
            result = engine.submit(PROMPT, deterministic=True, max_new_tokens=9).result(60)
            assert result.receipt is not None
            assert result.receipt.conditions.windows == f"aligned to {window} in {group}x{window}"
            assert f"aligned to multiples of {window}, because {reason}" in result.stats.policy


@pytest.mark.parametrize("which", ["main", "_prefill"])
def test_deterministic_requests_are_refused_where_rows_or_pads_matter(tied_bundle: Path, which: str) -> None:
    with Engine(tied_bundle, window=8, group=4, max_batch=2) as engine:
        shape: Shape = getattr(engine._target, which)
        engine._target.verdicts[shape.name] = Verdict("a difference", "KV entries differ when the pads change")
        with pytest.raises(ExactnessError, match=f"deterministic=True.*{shape.name}.*when the pads change") as error:
            engine.submit(PROMPT, deterministic=True)
        assert "send the request without it" in str(error.value)
        assert engine.stats.submitted == 0
        found = engine.submit(PROMPT, max_new_tokens=20, **PLAIN).result(60)
        assert_valid(found, Solo(tied_bundle), PROMPT, max_new_tokens=20, **PLAIN)


def test_an_int8_dynamic_target_serves_ordinary_requests_only(variants_bundle: Path) -> None:
    """Its activations share one scale in a pass, so pads and neighbours change its results."""
    with Engine(variants_bundle, precision="int8-dynamic", window=8, group=1, max_batch=3) as engine:
        with pytest.raises(ExactnessError, match=r"deterministic=True cannot be kept on this box: .*export another"):
            engine.submit(PROMPT, deterministic=True)
        handles = [engine.submit([*PROMPT, i], max_new_tokens=20, ignore_eos=True) for i in range(5)]
        assert [len(h.result(60).token_ids) for h in handles] == [20] * 5
        assert_idle(engine)
    with pytest.raises(ExactnessError, match=r"in_class=True cannot be kept.*leave in_class out"):
        Engine(variants_bundle, precision="int8-dynamic", window=8, group=1, in_class=True)

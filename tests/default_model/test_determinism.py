"""Deterministic requests give the same bits however they are served; the same requests without the mark do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import kvrelay
import numpy as np
import pytest
from kvrelay import ExactnessError, Faults
from kvrelay.box import Box
from kvrelay.bundle import open_bundle
from kvrelay.kv import KVCache
from kvrelay.receipt import output_digest
from kvrelay_export.exporter import ExportOptions, export_bundle
from serving_ways import Ask, Output, among_traffic, in_batches, shuffled, some_asks

pytestmark = pytest.mark.timeout(1800)  # the long form on a busy machine

WORKER = Path(__file__).with_name("serving_ways.py")
THREADS = 2  # those of tests/conftest.py


@dataclass(frozen=True, slots=True)
class Scale:
    """How many requests are served in how many ways."""

    requests: int
    longest: int  # tokens of an output
    max_batch: int
    ways: dict[str, Callable[..., list[Output]]]

    @property
    def asks(self) -> list[Ask]:
        return some_asks(self.requests, self.longest)


SMALL = Scale(8, 24, 4, {"batches of 4": partial(in_batches, size=4), "among changing traffic": among_traffic})
LARGE = Scale(
    64,
    64,
    16,
    {
        "one by one": partial(in_batches, size=1),
        **{f"batches of {size}": partial(in_batches, size=size) for size in (2, 4, 16)},
        "shuffled": shuffled,
        "among changing traffic": among_traffic,
    },
)
# What is found out on first use grows with the square of the batch; these tests find it out anew.
NARROW = replace(LARGE, requests=16, max_batch=4)
SOME = 24  # requests are enough where the number of ways does not grow with them


@pytest.fixture(
    scope="module",
    params=[pytest.param(SMALL, id="8 requests"), pytest.param(LARGE, id="64 requests", marks=pytest.mark.full)],
)
def scale(request: pytest.FixtureRequest) -> Scale:
    return request.param


@pytest.fixture(scope="module")
def alone(default_bundle: Path, scale: Scale) -> Iterator[list[Output]]:
    """What each request gives one by one in a new engine that chooses for itself how to commit."""
    with kvrelay.Engine(default_bundle, precision="int4", max_batch=scale.max_batch) as engine:
        yield in_batches(engine, scale.asks, 1)  # open to the end: other engines of the process share what it loaded


def digests_elsewhere(
    bundle: Path, scale: Scale, how: str, *, threads: int = THREADS, **environment: str
) -> tuple[list[str], int]:
    """Serve the requests in another process; return the digests of their receipts, and the rollbacks."""
    sizes = (scale.requests, scale.longest, scale.max_batch, threads)
    done = subprocess.run(
        [sys.executable, str(WORKER), str(bundle), *map(str, sizes), how],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["digests"], found["rollbacks"]


def differing(found: list[Output], wanted: list[Output]) -> int:
    return sum(a != b for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("in_class", [None, False], ids=["chosen", "replayed"])
def test_every_way_of_serving_gives_the_same_bits(
    default_bundle: Path,
    scale: Scale,
    alone: list[Output],
    in_class: bool | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with kvrelay.Engine(default_bundle, precision="int4", max_batch=scale.max_batch, in_class=in_class) as engine:
        for name, way in scale.ways.items():
            assert differing(way(engine, scale.asks), alone) == 0, name
        stats = engine.stats
    if in_class is False:
        assert stats.rollbacks > 0
    with capsys.disabled():
        print(
            f"\nint4, in_class={in_class}: {scale.requests} requests give what they give alone in "
            f"{', '.join(scale.ways)}; {stats.rollbacks} of {stats.windows} windows rolled back, "
            f"{100 * (stats.recomputed_share or 0):.1f} % of tokens computed again"
        )


@pytest.mark.parametrize("how", [pytest.param("chosen", marks=pytest.mark.full), "replayed"])
def test_another_process_gives_the_same_digests(
    default_bundle: Path, scale: Scale, alone: list[Output], how: str
) -> None:
    digests, rollbacks = digests_elsewhere(default_bundle, scale, how)
    assert digests == [output_digest(*output) for output in alone]
    assert (rollbacks > 0) == (how == "replayed")


def test_without_the_mark_the_ways_differ_which_proves_that_the_test_can_fail(
    default_bundle: Path, scale: Scale, capsys: pytest.CaptureFixture[str]
) -> None:
    with kvrelay.Engine(default_bundle, precision="int4", max_batch=scale.max_batch) as engine:
        asks = scale.asks[:SOME]
        alone = in_batches(engine, asks, 1, deterministic=False)
        found = {name: way(engine, asks, deterministic=False) for name, way in scale.ways.items()}
    told = [
        f"{name} {differing(outputs, alone)} ({sum(a[0] != b[0] for a, b in zip(outputs, alone, strict=True))})"
        for name, outputs in found.items()
    ]
    with capsys.disabled():
        print(f"\nint4 without the mark, of {len(asks)} other bits (other tokens) than alone: {', '.join(told)}")
    assert any(differing(outputs, alone) for outputs in found.values())


@pytest.mark.full
@pytest.mark.parametrize("how", ["chosen", "replayed"])
def test_a_cold_and_a_warm_start_give_the_same_digests(
    default_bundle: Path, tmp_path_factory: pytest.TempPathFactory, how: str
) -> None:
    cache = str(tmp_path_factory.mktemp("cold"))
    cold, warm = (digests_elsewhere(default_bundle, NARROW, how, KVRELAY_CACHE=cache) for _ in range(2))
    assert cold[0] == warm[0]


@pytest.mark.full
@pytest.mark.parametrize("how", ["chosen", "replayed"])
def test_one_thread_gives_the_same_digests_as_two(default_bundle: Path, how: str) -> None:
    # Not promised, a receipt names its thread count; but none of the kernels at work adds in another order.
    one, two = (digests_elsewhere(default_bundle, NARROW, how, threads=threads) for threads in (1, THREADS))
    assert one[0] == two[0]


def test_forced_rollbacks_change_nothing(
    default_bundle: Path, scale: Scale, alone: list[Output], capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for share in (0.0, 0.1, 0.5, 1.0):
        faults = Faults(rollback=share, seed=3)
        with kvrelay.Engine(
            default_bundle, precision="int4", max_batch=scale.max_batch, in_class=False, faults=faults
        ) as engine:
            outputs = in_batches(engine, scale.asks[:SOME], scale.max_batch)
            stats = engine.stats
        assert differing(outputs, alone[:SOME]) == 0, share
        assert stats.rollbacks > 0, share
        told.append(f"{100 * share:.0f} %: {stats.rollbacks} of {stats.windows}")
    with capsys.disabled():
        print(f"\nint4, windows rolled back by the share forced: {', '.join(told)}")


@pytest.fixture(scope="module", params=[pytest.param("tiny"), pytest.param("default", marks=pytest.mark.full)])
def int8_dynamic_bundle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, export_tiny: Any
) -> Iterator[Path]:
    """A bundle whose target quantises activations as it goes: over all rows at once."""
    verify = ((1, 2), (1, 16), (4, 16))
    if request.param == "tiny":
        yield export_tiny(precisions=("int8-dynamic",), verify=verify)
        return
    options = ExportOptions(
        "smollm2-135m-instruct",
        tmp_path_factory.mktemp("int8-dynamic") / "bundle",
        precisions=("int8-dynamic",),
        drafts=(),
        verify=verify,
    )
    yield export_bundle(options)


def test_an_engine_whose_rows_depend_on_each_other_refuses_the_mark(int8_dynamic_bundle: Path) -> None:
    with kvrelay.Engine(int8_dynamic_bundle, max_batch=2) as engine:
        with pytest.raises(ExactnessError, match="deterministic=True cannot be kept") as error:
            engine.submit("hello", deterministic=True)
        assert "verify-4x16" in str(error.value)
        assert "change" in str(error.value)  # what changed, and what then differed
        assert len(engine.submit("hello", max_new_tokens=4, ignore_eos=True).result(timeout=500).token_ids) == 4
    with pytest.raises(ExactnessError, match="in_class=True cannot be kept"):
        kvrelay.Engine(int8_dynamic_bundle, max_batch=2, in_class=True)


def test_a_window_in_a_group_and_alone_have_the_same_bits(default_bundle: Path) -> None:
    bundle = open_bundle(default_bundle)
    box = Box(bundle, None)
    verify = {(e.batch, e.sequence): e for e in bundle.engines(role="verify", precision="int4")}
    model = bundle.target
    random = np.random.default_rng(6)
    width, starts = 16, [0, 37, 150, 400]
    group = len(starts)
    contexts = [random.integers(0, model.vocab_size, start + width) for start in starts]
    cache = KVCache(model, range(model.layers), slots=group)
    singles = [box.engine(verify[1, width]).bind(cache, width, width, slot=slot) for slot in range(group)]

    def run_alone(slot: int, start: int) -> np.ndarray:
        bound = singles[slot]
        bound.input_ids[0] = contexts[slot][start : start + width]
        bound.write_index[0] = start
        bound.logit_rows[0] = np.arange(width)
        bound.run()
        return bound.logits[0].copy()

    def entries() -> list[np.ndarray]:
        return [
            tensor[slot, :, : start + width].copy()
            for tensor in cache.tensors.values()
            for slot, start in enumerate(starts)
        ]

    for slot, start in enumerate(starts):
        for at in [*range(0, start - width + 1, width), max(start - width, 0)]:
            run_alone(slot, at)
    alone = [run_alone(slot, start) for slot, start in enumerate(starts)]
    entries_alone = entries()
    for slot, start in enumerate(starts):
        cache.clear(slot, start)
    grouped = box.engine(verify[group, width]).bind(cache, width, width, batch=group)
    for slot, start in enumerate(starts):
        grouped.input_ids[slot] = contexts[slot][start:]
        grouped.write_index[slot] = start
        grouped.logit_rows[slot] = np.arange(width)
    grouped.run()
    assert np.array_equal(grouped.logits, np.stack(alone))
    assert all(np.array_equal(a, b) for a, b in zip(entries(), entries_alone, strict=True))

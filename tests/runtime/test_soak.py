"""The engine under mixed load for a while: memory stays flat, no request is lost, nothing is left behind."""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from kvrelay import Engine, Faults, Handle, KvrelayError
from rig import Solo, assert_idle, assert_same, make_drafting_pay, outcome

_BASE = [(7 * i) % 250 + 4 for i in range(256)]
_MIB = 2**20


def private_bytes() -> int:
    """Memory that this process alone holds, and its share of what it maps with others."""
    gc.collect()
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss in /proc/self/smaps_rollup")


def an_ask(rng: random.Random) -> tuple[list[int], dict[str, Any], bool]:
    """A request from a small set, so that what each gives alone need not be computed again."""
    start = rng.randrange(4)
    prompt = _BASE[start : start + rng.choice([1, 5, 30, 90, 230])]
    options: dict[str, Any] = {"max_new_tokens": rng.choice([1, 7, 40]), "seed": 1}
    options |= rng.choice([{}, {"temperature": 1.1}, {"temperature": 0.8, "top_k": 9, "frequency_penalty": 0.3}])
    return prompt, options, rng.random() < 0.6


def soak(bundle: Path, seconds: float) -> None:
    """Keep an engine loaded for ``seconds``, and look at memory after a third of it and at its end."""
    rng = random.Random(7)
    solo = Solo(bundle, "int4")
    faults = Faults(rollback=0.1, engine=0.002, pads=0.01)
    engine = Engine(bundle, precision="int4", draft="auto", window=8, group=4, max_batch=6, faults=faults)
    make_drafting_pay(engine)
    with engine:
        running: deque[tuple[Handle, list[int], dict[str, Any], bool]] = deque()
        submitted = ended = failed = cancelled = 0
        started = time.monotonic()
        warm = 0

        def take() -> None:
            nonlocal ended, failed, cancelled
            handle, prompt, options, deterministic = running.popleft()
            result = outcome(handle)
            if isinstance(result, KvrelayError):
                assert "injected" in str(result)
                failed += 1
                return
            if result.finish_reason == "cancelled":
                cancelled += 1
            else:
                ended += 1
                if deterministic:
                    assert_same(result, solo(prompt, **options))
            assert "".join(handle.stream()) == result.text

        while (elapsed := time.monotonic() - started) < seconds:
            engine._scheduler._steps.in_class = rng.choice([True, False, None])
            for _ in range(rng.randrange(12)):
                prompt, options, deterministic = an_ask(rng)
                handle = engine.submit(prompt, deterministic=deterministic, **options)
                running.append((handle, prompt, options, deterministic))
                submitted += 1
                if rng.random() < 0.1:
                    handle.cancel()
            while len(running) > rng.randrange(20):
                take()
            if not warm and elapsed > seconds / 3:
                warm = private_bytes()
        while running:
            take()
        now = private_bytes()
        assert_idle(engine)
        stats = engine.stats
    assert min(ended, failed, cancelled, stats.replays, stats.rollbacks, stats.kv_bytes_moved) > 0
    assert submitted == ended + failed + cancelled == stats.submitted
    assert (ended, failed, cancelled) == (stats.finished, stats.failed, stats.cancelled)
    assert ended > 20 * seconds / 10, "too little happened for the figures to mean anything"
    assert now - warm < 8 * _MIB, f"{warm / _MIB:.1f} MiB after a third, {now / _MIB:.1f} MiB after {ended} requests"


def test_memory_stays_flat_under_a_mixed_load(batch_bundle: Path) -> None:
    soak(batch_bundle, 30)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_memory_stays_flat_under_a_long_mixed_load(batch_bundle: Path) -> None:
    soak(batch_bundle, 600)

"""Requests, and the ways in which an engine comes to serve them.

As a program it serves them all at once and prints the digests of their receipts:

    python serving_ways.py BUNDLE REQUESTS LONGEST BATCH THREADS replayed|chosen
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import kvrelay
import numpy as np
from prompts import PROMPTS, chat

SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.2, "top_k": 40, "frequency_penalty": 0.3},
    {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.1},
)

Output = tuple[list[int], list[float]]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request."""

    prompt: list[dict[str, str]]
    options: dict[str, Any]


def some_asks(count: int, longest: int) -> list[Ask]:
    """Return requests of 16 to ``longest`` tokens, every other one sampled, with prompts of one to eight questions."""
    random = np.random.default_rng(20)
    asks = []
    for index in range(count):
        questions = random.choice(len(PROMPTS), int(random.choice([1, 1, 2, 8])), replace=False)
        options: dict[str, Any] = {"max_new_tokens": int(random.integers(16, longest + 1))}
        if index % 2:
            options |= {**SAMPLED[index // 2 % len(SAMPLED)], "seed": int(random.integers(2**32))}
        asks.append(Ask(chat("\n\n".join(PROMPTS[i] for i in questions)), options))
    return asks


def submit(engine: kvrelay.Engine, ask: Ask, *, deterministic: bool) -> kvrelay.Handle:
    return engine.submit(ask.prompt, deterministic=deterministic, **ask.options)


def output_of(handle: kvrelay.Handle) -> Output:
    result = handle.result(timeout=500)
    return result.token_ids, result.scores


def in_batches(engine: kvrelay.Engine, asks: list[Ask], size: int, *, deterministic: bool = True) -> list[Output]:
    """Serve ``size`` requests at once, then the next ones."""
    outputs = []
    for first in range(0, len(asks), size):
        handles = [submit(engine, ask, deterministic=deterministic) for ask in asks[first : first + size]]
        outputs += [output_of(handle) for handle in handles]
    return outputs


def shuffled(engine: kvrelay.Engine, asks: list[Ask], *, deterministic: bool = True) -> list[Output]:
    """Serve them all at once, in another order."""
    handles = {
        int(i): submit(engine, asks[i], deterministic=deterministic)
        for i in np.random.default_rng(1).permutation(len(asks))
    }
    return [output_of(handles[i]) for i in range(len(asks))]


def among_traffic(
    engine: kvrelay.Engine, asks: list[Ask], *, rate: float = 4.0, deterministic: bool = True
) -> list[Output]:
    """Serve them as they come, ``rate`` a second, among others that come, go and are cancelled, marked or not."""
    random = np.random.default_rng(2)
    handles, others = [], []
    for ask in asks:
        time.sleep(random.exponential(1 / rate))
        handles.append(submit(engine, ask, deterministic=deterministic))
        for _ in range(random.poisson(1.0)):
            prompt = PROMPTS[random.integers(len(PROMPTS))] * int(random.integers(1, 5))
            length = int(random.integers(4, 40))
            marked = bool(random.random() < 0.3)
            others.append(
                engine.submit(prompt, deterministic=marked, max_new_tokens=length, temperature=1.0, seed=length)
            )
        if others and random.random() < 0.3:
            others[random.integers(len(others))].cancel()
    outputs = [output_of(handle) for handle in handles]
    for other in others:
        other.cancel()
        other.result(timeout=500)
    return outputs


def digest_of(handle: kvrelay.Handle) -> str:
    receipt = handle.result(timeout=500).receipt
    assert receipt is not None
    return receipt.digest


def main() -> None:
    bundle, count, longest, batch, threads, how = sys.argv[1:]
    kvrelay.use_threads(int(threads))
    asks = some_asks(int(count), int(longest))
    in_class = False if how == "replayed" else None
    with kvrelay.Engine(bundle, precision="int4", max_batch=int(batch), in_class=in_class) as engine:
        digests = [digest_of(h) for h in [submit(engine, ask, deterministic=True) for ask in asks]]
        print(json.dumps({"digests": digests, "rollbacks": engine.stats.rollbacks}))


if __name__ == "__main__":
    main()

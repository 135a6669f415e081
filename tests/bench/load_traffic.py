"""Traffic for an engine, and the ways to serve it that load.py compares."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from kvrelay import Engine, EngineStats, Handle, Result
from kvrelay.bundle import open_bundle
from kvrelay.cli.bench import load_prompts
from kvrelay.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes."""

    at: float  # seconds after the run began
    prompt: list[int]
    options: dict[str, Any]
    rank: float  # from 0 to 1: marked deterministic in every share above it

    def marked(self, share: float) -> bool:
        return self.rank < share


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of some traffic came to."""

    seconds: float  # from the first arrival to the last token
    tokens: int
    ttft: list[float]  # seconds from arrival to the first token, for each request
    per_token: list[float]  # seconds a token after the first, for each request
    stats: EngineStats  # of this run alone
    digests: list[str]  # of the receipts, those of marked requests

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def traffic(
    bundle: str,
    *,
    requests: int,
    rate: float,
    prompt: tuple[int, int],
    output: tuple[int, int],
    seed: int,
    tag: int,
) -> list[Arrival]:
    """Return requests of even mixed lengths, every other one sampled; equal seeds give equal work.

    Args:
        bundle: whose tokenizer and chat template are used.
        requests: how many.
        rate: Poisson arrivals a second; infinite for all at once.
        prompt: fewest and most tokens.
        output: fewest and most tokens.
        seed: of lengths, texts, arrivals and ranks.
        tag: number of the run, told to the model first: of other runs' prompts only a few tokens can be reused.
    """
    random = np.random.default_rng(seed)
    tokenizer = Tokenizer(open_bundle(bundle))
    text = tokenizer.encode(" ".join(messages[-1]["content"] for messages in load_prompts(None).values()))
    at = np.cumsum(random.exponential(1 / rate, requests))  # zeros at an infinite rate
    ranks = random.permutation(requests) / requests

    def chat(content: list[int]) -> list[int]:
        system = {"role": "system", "content": f"Run {tag}."}
        return tokenizer.encode([system, {"role": "user", "content": tokenizer.decode(content)}])

    least = len(chat([]))
    arrivals = []
    for index in range(requests):
        length = max(1, int(random.integers(prompt[0], prompt[1] + 1)) - least)
        first = int(random.integers(len(text)))
        options: dict[str, Any] = {
            "max_new_tokens": int(random.integers(output[0], output[1] + 1)),
            "ignore_eos": True,
            "temperature": 0.8 * (index % 2),
            "seed": int(random.integers(2**32)),
        }
        content = (text[first:] + text)[:length]
        arrivals.append(Arrival(float(at[index]), chat(content), options, float(ranks[index])))
    return arrivals


def serve(engine: Engine, arrivals: Sequence[Arrival], share: float, *, alone: bool = False) -> Run:
    """Serve some traffic to its end.

    Args:
        engine: one that serves nothing else.
        arrivals: the traffic.
        share: of requests that need the same bits each time.
        alone: the naive way to give them those, without the engine's help: when such a request is next, let the batch
            run empty, serve it by itself, which is always the same shape, then go on.
    """
    before = engine.stats
    handles: list[Handle] = []
    late = []  # seconds between arrival and submission
    start = time.perf_counter()
    for arrival in arrivals:
        time.sleep(max(0.0, start + arrival.at - time.perf_counter()))
        by_itself = alone and arrival.marked(share)
        if by_itself:
            _wait(handles)
        late.append(time.perf_counter() - start - arrival.at)
        marked = arrival.marked(share) and not alone
        handles.append(engine.submit(arrival.prompt, deterministic=marked, **arrival.options))
        if by_itself:
            _wait(handles[-1:])
    results = _wait(handles)
    seconds = time.perf_counter() - start
    return Run(
        seconds=seconds,
        tokens=sum(len(r.token_ids) for r in results),
        ttft=[wait + r.stats.ttft for wait, r in zip(late, results, strict=True)],
        per_token=[r.stats.time_per_token or 0.0 for r in results],
        stats=_since(engine.stats, before),
        digests=[r.receipt.digest for r in results if r.receipt is not None],
    )


def _wait(handles: Sequence[Handle]) -> list[Result]:
    return [handle.result() for handle in handles]


def _since(now: EngineStats, before: EngineStats) -> EngineStats:
    return EngineStats(*(getattr(now, f.name) - getattr(before, f.name) for f in fields(EngineStats)))

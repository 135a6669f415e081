"""Checks of speed: each takes a setting and gives an outcome with figures. They cannot fail."""

from __future__ import annotations

import statistics
import time
from typing import Any

from kvrelay import Engine
from kvrelay.costs import Pattern, measure
from seeded import RUN
from setting import BATCH, TOKENS, Outcome, Setting, bind

__all__ = ["CHECKS"]


def verify_over_decode(s: Setting) -> Outcome:
    """Time a verify pass of each window over a pass of the decode engine, at context 128."""
    box = s.box()
    (decode,) = s.bundle.engines(role="decode", precision=s.precision)
    cache = box.cache(decode)
    passes = {1: bind(box, decode, cache)}
    for entry in s.bundle.engines(role="verify", precision=s.precision):
        if entry.batch == 1 and entry.sequence:
            passes[entry.sequence] = bind(box, entry, cache)
    ms = measure({str(n): Pattern(bound, bound) for n, bound in passes.items()}, s.bundle.target.capacity)
    ratios = {n: ms[n] / ms["1"] for n in ms}
    detail = f"decode {ms['1']:.2f} ms; " + ", ".join(f"verify({n}) {r:.2f}x" for n, r in ratios.items() if n != "1")
    return Outcome("verify over decode", "passed", detail, {"ms": ms, "ratio": ratios})


def speed(s: Setting) -> Outcome:
    """Time plain decoding and every draft at batch 1, interleaved; medians of three rounds."""
    exact = s.exact()
    cases = {"none": exact, **({"none, not exact": False} if exact else {}), **dict.fromkeys(s.drafts, exact)}
    runs: dict[str, list[Any]] = {name: [] for name in cases}
    for turn in range(4):
        for name, case_exact in cases.items():
            pipe = s.pipeline(name.partition(",")[0], exact=case_exact)
            tokens = TOKENS if turn else 16
            stats = pipe.generate(s.prompt(), max_new_tokens=tokens, ignore_eos=True).stats
            if turn:
                runs[name].append(stats)
    rates = {name: statistics.median(s.tokens_per_second for s in mine) for name, mine in runs.items()}
    figures = {
        name: {
            "tokens per second": rates[name],
            "over plain": rates[name] / rates["none"],
            "acceptance": mine[-1].acceptance,
            "tokens per verify": mine[-1].tokens_per_verify,
            "share outside the engines": statistics.median(s.host_share for s in mine),
        }
        for name, mine in runs.items()
    }
    detail = ", ".join(f"{name} {rate:.0f}/s" for name, rate in rates.items())
    return Outcome("speed at batch 1", "passed", detail, figures)


def batch_speed(s: Setting) -> Outcome:
    """Time eight requests at once, without and with drafts."""
    main = max(s.bundle.engines(role="verify", precision=s.precision), key=lambda e: (e.batch, e.sequence))
    figures = {}
    for draft in ("none", *s.drafts):
        with Engine(
            s.bundle.path,
            max_batch=BATCH,
            precision=s.precision,
            draft=draft,
            window=main.sequence or 1,
            group=main.batch or 1,
            progress=s.progress,
            **s.options,
        ) as engine:
            for tokens in (8, TOKENS):
                started = time.perf_counter()
                prompts = [s.prompt(RUN + 3 * i) for i in range(BATCH)]
                handles = [engine.submit(p, max_new_tokens=tokens, ignore_eos=True) for p in prompts]
                made = sum(len(handle.result().token_ids) for handle in handles)
                figures[draft] = made / (time.perf_counter() - started)
    detail = ", ".join(f"{name} {rate:.0f}/s" for name, rate in figures.items())
    return Outcome(f"speed at batch {BATCH}", "passed", detail, figures)


CHECKS = (verify_over_decode, speed, batch_speed)

"""Serving under load: what determinism costs, how many tokens are computed again, and what the naive way costs.

    kvrelay export --precisions int4 --drafts "" --output engines/load \\
        --verify 1x2,1x4,1x8,2x8,4x8,1x16,2x16,4x16,1x32,2x32,4x32
    python tests/bench/load.py engines/load --rate 2 --share 10 50 100
    python tests/bench/load.py engines/load --windows 8 16 32 --groups 1 2 4 --share 10 100 --requests 16

Without --windows and --groups: throughput, time to first token and time per token without determinism, with each share
of deterministic requests, and with the same share served the naive way, each by itself. With them: every window and
group replayed, and the way that the engine chooses for itself, which uses the verifier's shape class where there is
one. All cases take turns within a round; figures are medians of the rounds, ratios those to the traffic without
determinism in the same round. Outputs have fixed lengths: every case does the same work. Deterministic outputs are
compared bit by bit between the cells of a grid.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np
from kvrelay import Engine
from kvrelay.cli.table import output_console
from kvrelay.cli.table import share as per_cent
from load_traffic import Arrival, Run, serve, traffic
from rich.table import Table

CHOSEN = "chosen by the engine"


@dataclass(slots=True)
class Case:
    """One way to serve the traffic, and what its runs came to."""

    name: str
    share: float
    runs: list[Run] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # of throughput

    def median(self, value: Callable[[Run], float | None]) -> float | None:
        """Median over the rounds; None where a run has no such figure."""
        found = [v for run in self.runs if (v := value(run)) is not None]
        return statistics.median(found) if found else None

    def times(self, which: str) -> list[float]:
        """Milliseconds at the 50th, 90th and 99th of a hundred requests."""
        return [
            1000 * statistics.median(float(np.percentile(getattr(run, which), p)) for run in self.runs)
            for p in (50, 90, 99)
        ]

    def row(self) -> dict[str, object]:
        """All figures, for JSON."""
        stats = {
            name: self.median(lambda run, name=name: getattr(run.stats, name))
            for name in ("recomputed_share", "rollbacks", "windows", "group_fill", "verify_share", "batch_fill")
        }
        return {
            "case": self.name,
            "share": self.share,
            "tokens_per_second": self.median(lambda run: run.tokens_per_second),
            "ratio": statistics.median(self.ratios),
            "ratios": self.ratios,
            "ttft_ms": self.times("ttft"),
            "time_per_token_ms": self.times("per_token"),
            **stats,
            "rounds": [asdict(run.stats) for run in self.runs],
        }


def main() -> None:
    args = _arguments()
    shares = [s / 100 for s in args.share]
    options = {"precision": args.precision, "threads": args.threads, "max_batch": args.max_batch, "progress": _say}
    grid = bool(args.windows or args.groups)
    engines: dict[str, Engine] = {}
    if grid:
        for window in args.windows or [16]:
            for group in args.groups or [4]:
                name = f"replayed, window {window}, group {group}"
                engines[name] = Engine(args.bundle, window=window, group=group, in_class=False, **options)
    engines[CHOSEN] = Engine(args.bundle, **options)
    base = Case("no determinism", 0.0)
    cases = [Case(name, share) for share in shares for name in engines]
    naive = [] if grid else [Case("each by itself", share) for share in shares]

    tags = itertools.count()
    for round_number in range(args.rounds + 1):
        kept = round_number > 0  # the first round warms up
        _say(f"round {round_number} of {args.rounds}" if kept else "warming up")
        first = serve(engines[CHOSEN], _traffic(args, round_number, next(tags)), 0.0)
        done = []
        for share in shares:
            arrivals = _traffic(args, round_number, next(tags))
            mine = [(case, serve(engines[case.name], arrivals, share)) for case in cases if case.share == share]
            _check_digests(mine)
            done += mine
        for case in naive:
            arrivals = _traffic(args, round_number, next(tags))
            done.append((case, serve(engines[CHOSEN], arrivals, case.share, alone=True)))
        last = serve(engines[CHOSEN], _traffic(args, round_number, next(tags)), 0.0)
        if kept:
            # Twice in a round, first and last, against a machine that becomes slower.
            speed = (first.tokens_per_second + last.tokens_per_second) / 2
            for case, run in [(base, first), (base, last), *done]:
                case.runs.append(run)
                case.ratios.append(run.tokens_per_second / speed)
    for engine in engines.values():
        engine.close()
    title = (
        f"{engines[CHOSEN].precision}, {engines[CHOSEN].threads} threads, at most {args.max_batch} at once, "
        f"{args.requests} requests, {f'{args.rate:g} a second' if math.isfinite(args.rate) else 'all at once'}, "
        f"medians of {args.rounds} rounds"
    )
    rows = [base, *cases, *naive]
    if args.json:
        arguments = {**vars(args), "rate": args.rate if math.isfinite(args.rate) else None}
        print(json.dumps({"title": title, "arguments": arguments, "rows": [case.row() for case in rows]}))
    else:
        output_console().print(_grid_table(rows, title) if grid else _load_table(rows, title))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--precision")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rate", type=float, default=math.inf, help="arrivals a second; default: all at once")
    parser.add_argument("--share", type=float, nargs="+", default=[10, 100], help="per cent of deterministic requests")
    parser.add_argument("--windows", type=int, nargs="+")
    parser.add_argument("--groups", type=int, nargs="+")
    parser.add_argument("--prompt", type=int, nargs=2, default=[16, 256], help="fewest and most tokens")
    parser.add_argument("--output", type=int, nargs=2, default=[16, 128], help="fewest and most tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _traffic(args: argparse.Namespace, round_number: int, tag: int) -> list[Arrival]:
    return traffic(
        args.bundle,
        requests=args.requests,
        rate=args.rate,
        prompt=tuple(args.prompt),
        output=tuple(args.output),
        seed=args.seed + round_number,
        tag=tag,
    )


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _check_digests(done: list[tuple[Case, Run]]) -> None:
    wanted_by, wanted = done[0]
    for case, run in done:
        if run.digests != wanted.digests:
            sys.exit(f"deterministic outputs differ between {wanted_by.name!r} and {case.name!r} at {case.share:.0%}")


def _load_table(cases: list[Case], title: str) -> Table:
    table = Table(title=title)
    table.add_column("deterministic", no_wrap=True)
    for heading in (
        "tokens/s",
        "ratio",
        "first token, ms\np50 / p90 / p99",
        "time per token, ms\np50 / p90 / p99",
        "rows\na step",
        "rolled\nback",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in cases:
        table.add_row(
            _label(case),
            f"{case.median(lambda run: run.tokens_per_second):.1f}",
            f"{statistics.median(case.ratios):.3f}",
            " / ".join(f"{ms:.0f}" for ms in case.times("ttft")),
            " / ".join(f"{ms:.1f}" for ms in case.times("per_token")),
            f"{case.median(lambda run: run.stats.batch_fill) or 0:.1f}",
            f"{case.median(lambda run: run.stats.rollbacks):.0f}",
        )
    return table


def _grid_table(cases: list[Case], title: str) -> Table:
    table = Table(title=title)
    table.add_column("deterministic", no_wrap=True)
    for heading in (
        "tokens/s",
        "ratio",
        "computed\nagain",
        "rolled back\nof windows",
        "group\nfill",
        "time in\nreplays",
        "time per token\nms, p50 / p99",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in cases:
        p50, _, p99 = case.times("per_token")
        rolled, windows = (case.median(lambda run, n=n: getattr(run.stats, n)) for n in ("rollbacks", "windows"))
        table.add_row(
            _label(case),
            f"{case.median(lambda run: run.tokens_per_second):.1f}",
            f"{statistics.median(case.ratios):.3f}",
            per_cent(case.median(lambda run: run.stats.recomputed_share)),
            f"{rolled:.0f} of {windows:.0f}",
            per_cent(case.median(lambda run: run.stats.group_fill), 0),
            per_cent(case.median(lambda run: run.stats.verify_share)),
            f"{p50:.1f} / {p99:.1f}",
        )
    return table


def _label(case: Case) -> str:
    return f"{case.share:.0%}, {case.name}" if case.share else case.name


if __name__ == "__main__":
    main()

"""``kvrelay bench``: plain decoding against each draft, on the same prompts in the same run."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import ParameterError, PromptError
from ..pipeline import Pipeline
from . import options as o
from .table import output_console, share

__all__ = ["bench", "load_prompts"]

Prompts = dict[str, list[dict[str, str]]]


@dataclass(frozen=True, slots=True)
class _Case:
    """One way to decode."""

    label: str
    draft: str
    exact: bool
    temperature: float = 0.0


@dataclass(slots=True)
class _Row:
    """Medians of one case on one prompt."""

    case: str
    prompt: str
    tokens_per_second: float
    ratio: float  # over plain decoding at the same `exact`, median of the rounds' ratios
    acceptance: float | None
    tokens_per_verify: float | None
    host_share: float | None
    ttft_ms: float


def load_prompts(path: Path | None) -> Prompts:
    """Return prompts by name: the built-in six kinds, or a JSON object of name to text or messages.

    Raises:
        ParameterError: the file cannot be read or has another form.
    """
    source = path if path is not None else files("kvrelay.cli") / "bench_prompts.json"
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
        return {
            str(name): [{"role": "user", "content": value}] if isinstance(value, str) else list(value)
            for name, value in data.items()
        }
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ParameterError(f"--prompts {source}: needs a JSON object of name to text or messages: {error}") from None


def bench(
    bundle: o.Bundle,
    precision: o.Precision = None,
    drafts: Annotated[str | None, typer.Option(help="Drafts to compare, comma-separated; default: all.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON object of name to text or chat messages.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds; each runs every case once.")] = 5,
    max_new_tokens: o.MaxNewTokens = 96,
    window: o.Window = None,
    threads: o.Threads = None,
    exact: o.Exact = True,
    backend: o.Backend = "onnxruntime",
    provider: o.Provider = None,
    draft_backend: o.DraftBackend = None,
    draft_provider: o.DraftProvider = None,
    sampled: Annotated[bool, typer.Option("--sampled", help="Add each draft at temperature 0.8.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Compare plain decoding with each draft: interleaved runs, medians, ratios within a round.

    Output length is fixed (end-of-sequence ids are ignored), so every case does the same work.
    """
    o.require_output()
    if rounds < 1:
        raise ParameterError(f"--rounds {rounds}: at least 1")
    if max_new_tokens < 2:
        raise ParameterError(f"--max-new-tokens {max_new_tokens}: at least 2, the first token is not decoded")
    console = Console(stderr=True)
    texts = load_prompts(prompts)
    if not texts:
        raise ParameterError(f"--prompts {prompts}: at least one prompt")
    settings: dict[str, Any] = {
        "precision": precision,
        "threads": threads,
        "backend": backend,
        "provider": provider,
        "draft_backend": draft_backend,
        "draft_provider": draft_provider,
    }

    def open_pipeline(draft: str, exact: bool) -> Pipeline:
        wanted = None if draft in ("none", "auto") else window
        with o.opening(bundle, console) as progress:
            return Pipeline(bundle, draft=draft, window=wanted, exact=exact, progress=progress, **settings)

    first = open_pipeline("none", exact)
    for name, prompt in texts.items():
        try:
            first.stream(prompt)
        except PromptError as error:
            raise ParameterError(f"--prompts {prompts}: {name!r}: {error}") from None
    wanted = [*first.drafts, "auto"] if drafts is None else [name.strip() for name in drafts.split(",")]
    names = [name for name in dict.fromkeys(wanted) if name != "none"]  # which is there anyway
    # Where exactness was given up, as for a precision that has none, nothing exact is opened.
    cases = [_Case("none", "none", True)] if exact else []
    cases += [_Case("none, not exact", "none", False)]
    cases += [_Case(name, name, exact) for name in names]
    if sampled:
        cases += [_Case("none, sampled", "none", exact, 0.8)]
        cases += [_Case(f"{name}, sampled", name, exact, 0.8) for name in names]
    pipelines: dict[tuple[str, bool], Pipeline] = {("none", exact): first}
    for case in cases:
        key = (case.draft, case.exact)
        if key not in pipelines:
            pipelines[key] = open_pipeline(*key)
    rows = _measure(cases, pipelines, texts, rounds, max_new_tokens, exact, console)
    if as_json:
        print(json.dumps({"precision": first.precision, "threads": first.threads, "rows": [asdict(r) for r in rows]}))
    else:
        output_console().print(_table(rows, f"{first.precision}, {first.threads} threads, medians of {rounds} rounds"))


def _measure(
    cases: list[_Case],
    pipelines: dict[tuple[str, bool], Pipeline],
    texts: Prompts,
    rounds: int,
    max_new_tokens: int,
    exact: bool,
    console: Console,
) -> list[_Row]:
    runs: dict[tuple[str, str], list[Any]] = defaultdict(list)
    with console.status("warming up") as status:
        for round_number in range(rounds + 1):
            for name, messages in texts.items():
                for case in cases:
                    status.update(f"round {round_number}/{rounds}: {name}, {case.label}")
                    tokens = max_new_tokens if round_number else 16
                    result = pipelines[case.draft, case.exact].generate(
                        messages, max_new_tokens=tokens, ignore_eos=True, temperature=case.temperature, seed=7
                    )
                    if not result.stats.passes:
                        raise ParameterError(
                            f"--prompts: {name!r} has {result.stats.prompt_tokens} tokens, which leaves the context "
                            "room for one more alone: shorten it, or export with a larger --context"
                        )
                    if round_number:
                        runs[case.label, name].append(result.stats)
    rows = []
    for case in cases:
        plain = "none" if exact else "none, not exact"
        yardstick = "none, sampled" if case.temperature else plain
        for name in texts:
            mine = runs[case.label, name]
            pairs = zip(mine, runs[yardstick, name], strict=True)
            rows.append(
                _Row(
                    case=case.label,
                    prompt=name,
                    tokens_per_second=statistics.median(s.tokens_per_second for s in mine),
                    ratio=statistics.median(s.tokens_per_second / p.tokens_per_second for s, p in pairs),
                    acceptance=mine[-1].acceptance,
                    tokens_per_verify=mine[-1].tokens_per_verify,
                    host_share=statistics.median(s.host_share for s in mine),
                    ttft_ms=statistics.median(s.ttft for s in mine) * 1000,
                )
            )
    return rows


def _table(rows: list[_Row], title: str) -> Table:
    names = list(dict.fromkeys(r.prompt for r in rows))
    table = Table(title=title)
    table.add_column("case", no_wrap=True)
    for name in names:
        table.add_column(f"{name}\ntok/s  ratio", justify="right", no_wrap=True)
    for heading in ("all\nratio", "accept", "tok/verify", "host"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in dict.fromkeys(r.case for r in rows):
        mine = [r for r in rows if r.case == case]
        accepted = [r.acceptance for r in mine if r.acceptance is not None]
        table.add_row(
            case,
            *(f"{r.tokens_per_second:.1f}  {r.ratio:.2f}" for r in mine),
            f"{statistics.geometric_mean(r.ratio for r in mine):.2f}",
            share(statistics.mean(accepted) if accepted else None, 0),
            f"{statistics.mean(r.tokens_per_verify or 0 for r in mine):.2f}",
            share(statistics.median(r.host_share or 0 for r in mine)),
        )
    return table

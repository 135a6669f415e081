"""``kvrelay check``: what this box can run, and what a bundle's engines keep bit for bit on it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..box import Box
from ..bundle import open_bundle
from ..errors import ParameterError
from ..intake import one_of
from ..place import place_of
from ..survey import Survey, survey
from . import options as o
from .box_report import box_report
from .table import output_console

__all__ = ["check"]


def check(
    bundle: Annotated[Path | None, typer.Argument(help="Bundle folder; without one the box is described.")] = None,
    precision: Annotated[str | None, typer.Option(help="Target precision; default: all.")] = None,
    max_batch: o.MaxBatch = 8,
    threads: o.Threads = None,
    backend: o.Backend = "onnxruntime",
    provider: o.Provider = None,
    again: Annotated[bool, typer.Option("--again", help="Check anew, whatever is stored.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Describe this box or, with a bundle, check which shapes of its engines agree bit for bit here.

    What is found is stored in the box's cache. A finding is no failure: the exit code is 0.
    """
    o.require_output()
    console = output_console()
    if bundle is None:
        report = box_report()
        if as_json:
            print(json.dumps(report, indent=1))
            return
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in report.items():
            table.add_row(name, value)
        console.print(table, markup=False, highlight=False)
        return
    if max_batch < 1:
        raise ParameterError(f"--max-batch {max_batch}: at least 1")
    opened = open_bundle(bundle)
    names = opened.precisions() if precision is None else [one_of("precision", precision, opened.precisions())]
    with o.opening(bundle, Console(stderr=True)) as progress:
        here = Box(opened, threads, progress, place_of(backend, provider), max_batch)
        found = [survey(here, name, max_batch, again=again, progress=progress) for name in names]
    if as_json:
        print(json.dumps({"bundle": str(bundle), "box": box_report(), "precisions": [asdict(s) for s in found]}))
        return
    for one in found:
        console.print(_table(one), markup=False)
        for line in _consequences(one):
            console.print(line, markup=False, highlight=False)


def _table(s: Survey) -> Table:
    numbers = {name: str(number) for number, names in enumerate(s.classes, 1) for name in names}
    table = Table(title=f"{s.precision}, {s.threads} threads", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("shape", "class"):
        table.add_column(heading, no_wrap=True)
    table.add_column("against the verifier's class")
    table.add_column("against itself, when rows, neighbours and pads change")
    for name, verdict in s.verdicts.items():
        outside = "in class" if verdict.outside is None else verdict.outside
        table.add_row(name, numbers.get(name, "none"), outside, verdict.unstable or "stable")
    return table


def _consequences(s: Survey) -> list[str]:
    """Say what the findings mean."""
    lines = []
    for number, names in enumerate(s.classes, 1):
        kind = f"class {number}, the verifier's" if number == 1 else f"class {number}"
        lines.append(f"{kind}: {', '.join(names) or 'no shape'}")
    if s.windows is None:
        lines.append(f"deterministic requests: refused: {s.windows_refusal}")
    elif s.windows == "aligned":
        lines.append(f"deterministic requests: windows aligned to multiples of {s.window_tokens}, in {s.window}")
    else:
        lines.append(f"deterministic requests: sliding windows, in {s.window}")
    lines.append("exact: yes" if s.exact_refusal is None else f"exact: no: {s.exact_refusal}")
    if s.windows == "sliding":
        batches = ", ".join(map(str, s.class_batches)) or "none"
        lines.append(f"decoding inside the class: batch sizes {batches} of 1 to {s.max_batch}")
    return [*lines, *_process_lines(s), ""]


def _process_lines(s: Survey) -> list[str]:
    p = s.processes
    if p is None:
        return ["processes and threads: not checked, since nothing may commit"]

    def same(changes: list[str]) -> str:
        return "the same bits" if not changes else f"other bits in {', '.join(changes)}"

    lines = [
        f"a second process: {same(p.process_changes)}",
        f"repeated runs: {'the same bits' if p.repeated else 'other bits'}",
    ]
    if p.other_threads:
        lines.append(f"{p.other_threads} thread(s) in place of {s.threads}: {same(p.threads_change)}")
    if s.windows == "sliding":  # aligned windows make no use of what a former prompt left behind
        lines.append(f"a prompt continued from a kept beginning: {'the same bits' if p.prefix_kept else 'other bits'}")
    return lines

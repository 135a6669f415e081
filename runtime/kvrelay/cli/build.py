"""``kvrelay build``: plans of TensorRT or TensorRT-RTX from a bundle, on the box that runs them."""

from __future__ import annotations

from typing import Annotated, get_args

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..bundle import open_bundle
from ..errors import ParameterError
from ..trt.build import Build
from ..trt.library import Backend
from ..trt.memory import together
from . import options as o
from .table import output_console

__all__ = ["build"]


def build(
    bundle: o.Bundle,
    backend: Annotated[str, typer.Option(help="tensorrt or tensorrt-rtx.")] = "tensorrt",
    device: Annotated[
        str, typer.Option(help="current, or compute capabilities for tensorrt-rtx: sm86,sm89.")
    ] = "current",
    max_batch: o.MaxBatch = 8,
) -> None:
    """Build the plans that TensorRT runs, one for each engine, into the box's cache.

    All graphs are checked before the first is built. Plans that are there are kept; another version of the library,
    another GPU or another bundle needs its own.
    """
    if max_batch < 1:
        raise ParameterError(f"--max-batch {max_batch}: at least 1")
    if backend not in get_args(Backend):
        raise ParameterError(f"--backend {backend}: one of {', '.join(get_args(Backend))}")
    opened = open_bundle(bundle)
    errors = Console(stderr=True)

    def say(line: str) -> None:
        errors.print(line, markup=False, highlight=False, soft_wrap=True)

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        engines = opened.manifest.engines
        task = progress.add_task("opening", total=len(engines))

        def tell(line: str) -> None:
            progress.update(task, description=line)
            if line.startswith(("building anew", "waiting")):
                say(line)

        work = Build(opened, backend, device, max_batch=max_batch, progress=tell)  # type: ignore[arg-type]
        missing = work.missing()
        memory = {entry.name: work.examine(entry) for entry in missing}
        for name, needed in memory.items():
            say(f"{name} will need {needed} of the GPU's memory")
        if len(memory) > 1:
            say(f"{len(memory)} engines together will need {together(list(memory.values()))}")
        progress.update(task, completed=len(engines) - len(missing))
        made = {}
        for entry in missing:
            made[entry.name] = work.build(entry)
            for remark in made[entry.name].remarks:
                say(f"{entry.name}: the library says: {remark}")
            progress.advance(task)
    table = Table(title=f"plans for {work.device}", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("engine", "plan", "size", "built in"):
        table.add_column(heading, no_wrap=True)
    for entry in engines:
        built = made.get(entry.name) or work.build(entry)
        seconds = f"{built.seconds:.1f} s" if built.seconds else "was there"
        table.add_row(entry.name, built.plan.sha256[:12], f"{built.plan.size / 2**20:.1f} MiB", seconds)
    output_console().print(table, markup=False)

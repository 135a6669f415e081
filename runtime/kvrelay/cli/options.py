"""Options that several commands share."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import ParameterError
from ..place import BACKENDS

__all__ = [
    "Backend",
    "Bundle",
    "Draft",
    "DraftBackend",
    "DraftProvider",
    "Exact",
    "FrequencyPenalty",
    "IgnoreEos",
    "MaxBatch",
    "MaxNewTokens",
    "MinP",
    "Precision",
    "PresencePenalty",
    "Provider",
    "RepetitionPenalty",
    "Seed",
    "Stop",
    "Temperature",
    "Threads",
    "TopK",
    "TopP",
    "Window",
    "opening",
    "require_output",
]

Bundle = Annotated[Path, typer.Argument(help="Bundle folder, as `kvrelay export` writes it.")]
Draft = Annotated[str, typer.Option(help='"auto", "none", "ngram", "self", or a draft of the bundle.')]
Window = Annotated[int | None, typer.Option(help="Tokens of a verify window; default: chosen by cost.")]
Precision = Annotated[str | None, typer.Option(help="Target precision; default: the bundle's first.")]
Threads = Annotated[int | None, typer.Option(help="Threads of the process; default: the usable CPUs.")]
Backend = Annotated[str, typer.Option(help=f"What runs the engines: {', '.join(BACKENDS)}.")]
Provider = Annotated[
    str | None, typer.Option(help='Of onnxruntime: cpu (default), cuda, tensorrt, or several: "cuda,cpu".')
]
DraftBackend = Annotated[str | None, typer.Option(help="What runs the draft's engine; default: as the target's.")]
DraftProvider = Annotated[str | None, typer.Option(help="Of onnxruntime, for the draft's engine.")]
Exact = Annotated[bool, typer.Option("--exact/--no-exact", help="Output independent of draft and window, bit for bit.")]
MaxBatch = Annotated[int, typer.Option(help="Most requests in one pass.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="Most tokens of output.")]
Temperature = Annotated[float, typer.Option(help="0: the most likely token.")]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0: off.")]
TopP = Annotated[float, typer.Option(help="Keep the most likely tokens up to this mass; 1: off.")]
MinP = Annotated[float, typer.Option(help="Drop tokens under this share of the likeliest; 0: off.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Penalise tokens seen so far; 1: off.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Subtract for every earlier use; 0: off.")]
PresencePenalty = Annotated[float, typer.Option(help="Subtract once for earlier use; 0: off.")]
Seed = Annotated[int | None, typer.Option(help="Seed of sampling; default: drawn and shown.")]
Stop = Annotated[list[str] | None, typer.Option(help="String that ends the text; may be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")]


def require_output(instead: str | None = None) -> None:
    """Refuse to work for a standard output that was closed: what is printed there is lost without an error.

    Args:
        instead: option that names a file to write to.

    Raises:
        ParameterError: it is closed.
    """
    if sys.stdout is None:
        way_out = "open it" if instead is None else f"open it, or name a file with {instead}"
        raise ParameterError(f"the output is to be written to standard output, which is closed: {way_out}")


@contextlib.contextmanager
def opening(bundle: Path, console: Console) -> Iterator[Callable[[str], None]]:
    """Show on ``console`` what takes long while a bundle is opened; yields a function that is told."""
    with console.status(f"opening {bundle}") as status:

        def progress(line: str) -> None:
            status.update(line)
            if line.startswith("first use"):
                console.print(line, highlight=False)

        yield progress

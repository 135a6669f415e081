"""The command line: ``kvrelay export | build | run | chat | batch | replay | check | inspect | bench``."""

from __future__ import annotations

import contextlib
import io
import sys
from importlib.metadata import entry_points, version
from typing import Annotated

import typer
from rich.console import Console

from ..errors import KvrelayError
from .batch import batch
from .bench import bench
from .build import build
from .chat import chat
from .check import check
from .inspect import inspect
from .replay import replay
from .run import run

__all__ = ["app", "main"]

app = typer.Typer(
    help="Draft-verify decoding on ONNX Runtime and TensorRT.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version("kvrelay"))
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command(
    "export",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def _export(context: typer.Context) -> None:
    """Export a checkpoint to a bundle (needs the extra "export")."""
    # The runtime never imports the exporter: it is found as a plug-in, and only when asked for.
    (found,) = entry_points(group="kvrelay.commands", name="export")
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(found.load())
    try:
        command(args=context.args, prog_name="kvrelay export", standalone_mode=False)
    except ModuleNotFoundError as error:
        raise KvrelayError(
            f"exporting needs {error.name}, which is not installed: pip install 'kvrelay[export]' (Python 3.11)"
        ) from None


app.command()(build)
app.command()(run)
app.command()(chat)
app.command()(batch)
app.command()(replay)
app.command()(check)
app.command()(inspect)
app.command()(bench)


def main() -> None:
    """Run the command line: bad input is one line and exit code 2, Ctrl-C is exit code 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal cannot show must not end a generation
    errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    try:
        app()
    except KvrelayError as error:
        errors.print(f"kvrelay: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("kvrelay: interrupted")
        sys.exit(130)
    except OSError as error:
        errors.print(f"kvrelay: {error}")
        with contextlib.suppress(OSError, AttributeError):
            sys.stdout.close()  # or the interpreter's last flush fails once more, with a traceback
        sys.exit(2)

"""``kvrelay run``: one prompt, streamed."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import ParameterError
from ..pipeline import Pipeline, Stream
from . import options as o
from .json_lines import json_lines_file
from .table import stats_table

__all__ = ["cancel_on_interrupt", "run"]


def run(
    bundle: o.Bundle,
    prompt: Annotated[str, typer.Argument(help='Prompt text; "-" reads it from standard input.')],
    draft: o.Draft = "auto",
    window: o.Window = None,
    precision: o.Precision = None,
    threads: o.Threads = None,
    exact: o.Exact = True,
    backend: o.Backend = "onnxruntime",
    provider: o.Provider = None,
    draft_backend: o.DraftBackend = None,
    draft_provider: o.DraftProvider = None,
    max_new_tokens: o.MaxNewTokens = 128,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    presence_penalty: o.PresencePenalty = 0.0,
    seed: o.Seed = None,
    stop: o.Stop = None,
    ignore_eos: o.IgnoreEos = False,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message for the chat template.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write one JSON line a window to this file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No statistics.")] = False,
) -> None:
    """Run one prompt and stream the answer; statistics go to standard error."""
    o.require_output()
    console = Console(stderr=True)
    text = _standard_input() if prompt == "-" else prompt
    if raw and system is not None:
        raise ParameterError("--system needs the chat template, which --raw leaves out")
    messages: Any = text
    if not raw:
        messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]
    with o.opening(bundle, console) as progress:
        pipeline = Pipeline(
            bundle,
            draft=draft,
            window=window,
            precision=precision,
            threads=threads,
            exact=exact,
            backend=backend,
            provider=provider,
            draft_backend=draft_backend,
            draft_provider=draft_provider,
            progress=progress,
        )
    file = contextlib.nullcontext() if trace is None else json_lines_file("--trace", trace)
    with file as write_event:
        stream = pipeline.stream(
            messages,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            seed=seed,
            stop=stop or (),
            ignore_eos=ignore_eos,
            trace=write_event,
        )
        with cancel_on_interrupt(stream):
            for piece in stream:
                print(piece, end="", flush=True)
    print(flush=True)
    result = stream.result
    if not quiet:
        console.print(stats_table(result))
    if result.finish_reason == "cancelled":
        raise typer.Exit(130)


def _standard_input() -> str:
    if sys.stdin is None:
        raise ParameterError("the prompt is to be read from standard input, which is closed")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ParameterError(f"the prompt on standard input is not text: {error}") from None


@contextlib.contextmanager
def cancel_on_interrupt(stream: Stream) -> Iterator[None]:
    """Let Ctrl-C end the generation after the current window, with the text so far; a second one interrupts."""

    def cancel(_signal: int, _frame: object) -> None:
        stream.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

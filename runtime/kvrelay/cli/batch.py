"""``kvrelay batch``: a file of requests under dynamic batching."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..errors import KvrelayError, ParameterError
from ..handle import Handle
from ..intake import Result
from ..serving import Engine
from . import options as o
from .json_lines import json_lines_file
from .requests import BatchRequest, check_requests, read_requests
from .table import engine_table

__all__ = ["batch"]


def batch(
    bundle: o.Bundle,
    requests: Annotated[Path, typer.Argument(help='JSON lines, each an object with a "prompt"; "-": standard input.')],
    max_batch: o.MaxBatch = 8,
    precision: o.Precision = None,
    threads: o.Threads = None,
    backend: o.Backend = "onnxruntime",
    provider: o.Provider = None,
    draft_backend: o.DraftBackend = None,
    draft_provider: o.DraftProvider = None,
    draft: o.Draft = "none",
    window: Annotated[int, typer.Option(help="Most tokens of a replayed window.")] = 16,
    group: Annotated[int, typer.Option(help="Most windows of one replay.")] = 4,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Mark all requests.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put text prompts through the chat template.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File; default: standard output.")] = None,
    receipts: Annotated[Path | None, typer.Option(help="Folder for a receipt of each deterministic request.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no statistics.")] = False,
) -> None:
    """Run a file of requests together; one JSON line for each as it ends, statistics to standard error.

    A line has "prompt" (text, chat messages or token ids) and may have "id", "deterministic", and any option of the
    Python API's Engine.submit. All lines are checked before any is run.
    """
    console = Console(stderr=True)
    if output is None:
        o.require_output("--output FILE")
    read = read_requests(requests, chat=chat, deterministic=deterministic)
    if receipts is not None:
        try:
            receipts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ParameterError(f"--receipts {receipts}: {error.strerror or error}") from None
    file = contextlib.nullcontext(_print_line) if output is None else json_lines_file("--output", output)
    with file as write:
        with o.opening(bundle, console) as progress:
            engine = Engine(
                bundle,
                max_batch=max_batch,
                precision=precision,
                threads=threads,
                draft=draft,
                window=window,
                group=group,
                backend=backend,
                provider=provider,
                draft_backend=draft_backend,
                draft_provider=draft_provider,
                progress=progress,
            )
        with engine:
            check_requests(engine, read)
            # A bar and lines would tear each other up on one terminal.
            shown = not quiet and console.is_terminal and not (output is None and sys.stdout.isatty())
            with _bar(console, len(read), shown=shown) as advance:
                ends = _Run(engine, read, 2 * max_batch)
                failed = 0
                for end in ends:
                    _save_receipt(receipts, end)
                    write(_line(end))
                    failed += end.error is not None
                    advance()
            stats = engine.stats
    if not quiet:
        console.print(engine_table(stats))
    if ends.interrupted:
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _End:
    """A request that has ended."""

    index: int
    request: BatchRequest
    result: Result | None
    error: KvrelayError | None


class _Run:
    """Runs requests and gives their ends as they come; Ctrl-C cancels what has not ended, which then is not given.

    Args:
        engine: the engine.
        requests: in the order in which they are queued.
        most: requests in the engine at once; each holds memory of the vocabulary's size.
    """

    def __init__(self, engine: Engine, requests: list[BatchRequest], most: int) -> None:
        self.interrupted = False
        self._engine = engine
        self._requests = requests
        self._most = most
        self._ended: queue.SimpleQueue[_End | None] = queue.SimpleQueue()  # None: interrupted

    def __iter__(self) -> Iterator[_End]:
        before = signal.signal(signal.SIGINT, self._interrupt)
        handles: dict[int, Handle] = {}
        waiting = iter(enumerate(self._requests))
        with ThreadPoolExecutor(self._most) as pool:
            try:
                while True:
                    while not self.interrupted and len(handles) < self._most:
                        if (following := next(waiting, None)) is None:
                            break
                        index, request = following
                        try:
                            handles[index] = self._engine.submit(
                                request.prompt, deterministic=request.deterministic, **request.options
                            )
                        except KvrelayError as error:  # it was checked: the engine stopped
                            yield _End(index, request, None, error)
                        else:
                            pool.submit(self._wait, index, request, handles[index])
                    if not handles:
                        return
                    end = self._ended.get()
                    if end is None:
                        for handle in handles.values():
                            handle.cancel()
                        continue
                    del handles[end.index]
                    if end.result is None or end.result.finish_reason != "cancelled":
                        yield end
            finally:
                signal.signal(signal.SIGINT, before)
                for handle in handles.values():  # whoever reads this stopped: the pool's threads must end
                    handle.cancel()

    def _interrupt(self, _signal: int, _frame: object) -> None:
        self.interrupted = True
        self._ended.put(None)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one does not wait

    def _wait(self, index: int, request: BatchRequest, handle: Handle) -> None:
        try:
            self._ended.put(_End(index, request, handle.result(), None))
        except KvrelayError as error:
            self._ended.put(_End(index, request, None, error))


def _print_line(value: Any) -> None:
    print(json.dumps(value, allow_nan=False), flush=True)


def _line(end: _End) -> dict[str, Any]:
    head: dict[str, Any] = {"index": end.index, "id": end.request.id}
    if end.result is None:
        return {**head, "error": str(end.error)}
    result, stats = end.result, end.result.stats
    return {
        **head,
        "text": result.text,
        "token_ids": result.token_ids,
        "scores": result.scores,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "stats": {
            "prompt_tokens": stats.prompt_tokens,
            "reused_tokens": stats.reused_tokens,
            "ttft": stats.ttft,
            "tokens_per_second": stats.tokens_per_second,
            "acceptance": stats.acceptance,
            "rollbacks": stats.rollbacks,
            "recomputed": stats.recomputed,
        },
    }


def _save_receipt(folder: Path | None, end: _End) -> None:
    """Save a receipt, if there is one, under the request's place and as much of its id as a file name may hold."""
    if folder is None or end.result is None or end.result.receipt is None:
        return
    name = str(end.index)
    if end.request.id is not None:
        name += "-" + re.sub(r"[^A-Za-z0-9._-]+", "_", str(end.request.id))[:80]
    end.result.receipt.save(folder / f"{name}.json")


@contextlib.contextmanager
def _bar(console: Console, total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    if not shown:
        yield lambda: None
        return
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Standard output stays where it is: it may be a file.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda: progress.advance(task)

"""Statistics as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ..pipeline import Result
from ..stats import EngineStats

__all__ = ["engine_table", "output_console", "share", "stats_table"]


def output_console() -> Console:
    """Return a console on standard output; a pipe has no edge that tables must fit."""
    console = Console()
    return console if console.is_terminal else Console(width=160, soft_wrap=True)


def share(value: float | None, digits: int = 1) -> str:
    """Format a share as per cent; "-" for None."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def _number(value: float | None, unit: str = "", digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def stats_table(result: Result) -> Table:
    """Return the statistics of one generation, with what the draft gained against plain decoding."""
    s = result.stats
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    gain = "-"
    if s.speedup is not None and s.tokens_per_second:
        gain = f"{s.speedup:.2f}x plain decoding, a step reckoned at {1000 * s.speedup / s.tokens_per_second:.1f} ms"
    for name, value in (
        ("tokens", f"{s.prompt_tokens} prompt ({s.reused_tokens} reused) + {s.emitted} output"),
        ("finish", f"{result.finish_reason}, seed {result.seed}"),
        ("time to first token", f"{s.ttft * 1000:.0f} ms"),
        ("speed", f"{_number(s.tokens_per_second)} tokens/s"),
        ("gain", gain),
        ("acceptance", f"{share(s.acceptance)} of {s.evaluated} compared, {s.proposed} drafted"),
        ("tokens per verify", _number(s.tokens_per_verify)),
        (
            "passes",
            f"{s.windows} verify + {s.plain_passes} plain, {s.rollbacks} rollbacks, {s.recomputed} tokens dropped",
        ),
        ("time", f"{s.draft_seconds:.2f} s draft, {s.verify_seconds:.2f} s target, host {share(s.host_share)}"),
        ("KV", f"{s.kv_bytes / 2**20:.0f} MiB in the slot, {s.kv_bytes_copied} bytes copied"),
        ("draft choice", s.policy),
    ):
        table.add_row(name, value)
    return table


def engine_table(s: EngineStats) -> Table:
    """Return the statistics of a batch."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in (
        ("requests", f"{s.finished} finished, {s.failed} failed, {s.cancelled} cancelled"),
        ("tokens", f"{s.emitted} after each request's first, {s.reused_tokens} prompt tokens reused"),
        ("speed", f"{_number(s.tokens_per_second)} tokens/s"),
        ("batch fill", f"{_number(s.batch_fill)} rows a step, {s.steps} steps"),
        ("replays", f"{s.replays} of {s.windows} windows, group fill {share(s.group_fill)}"),
        ("rollbacks", f"{s.rollbacks}, {s.recomputed} tokens recomputed ({share(s.recomputed_share)})"),
        ("verify share", f"{share(s.verify_share)} of the time in engines"),
        ("KV moved", f"{s.kv_bytes_moved} bytes, {s.kv_bytes_copied} written by the backend"),
    ):
        table.add_row(name, value)
    return table

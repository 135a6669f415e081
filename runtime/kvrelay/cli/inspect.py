"""``kvrelay inspect``: what a bundle holds."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from ..bundle import open_bundle
from ..errors import ParameterError
from ..kv import kv_bytes
from . import options as o
from .table import output_console

__all__ = ["inspect"]

_ITEMSIZE = {"float32": 4, "float16": 2}


def inspect(
    bundle: o.Bundle,
    context: Annotated[int | None, typer.Option(help="Count KV bytes for this many tokens.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Show a bundle's engines, shapes, sizes, hashes and KV bytes, after checking every file."""
    o.require_output()
    opened = open_bundle(bundle)
    manifest = opened.manifest
    if as_json:
        print(json.dumps(manifest.model_dump(), indent=1))
        return
    console = output_console()
    for model in manifest.models.values():
        entries = model.context if context is None else context
        if not 1 <= entries <= model.context:
            raise ParameterError(f"--context {entries}: this bundle was exported for 1 to {model.context} tokens")
        role = "target" if model.name == manifest.target else "draft model"
        console.print(
            f"{role} {model.name}: {model.family}, {model.layers} layers, {model.heads} heads, {model.kv_heads} KV "
            f"heads x {model.head_dim}, vocabulary {model.vocab_size} ({model.padded_vocab_size} padded), "
            f"context {model.context}, source {model.source} ({model.source_sha256[:12]})",
            highlight=False,
        )
        for dtype in sorted({e.kv_dtype for e in manifest.engines if e.model == model.name}, reverse=True):
            used = kv_bytes(model, model.layers, _ITEMSIZE[dtype], entries)
            held = kv_bytes(model, model.layers, _ITEMSIZE[dtype], model.capacity)
            console.print(
                f"  KV {dtype}: {used:,} bytes for {entries} tokens; a slot holds {model.capacity} entries, "
                f"{held:,} bytes",
                highlight=False,
            )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in ("engine", "role", "shape", "precision", "dialect", "draft", "graph", "sha256", "top-1", "max diff"):
        table.add_column(column, no_wrap=True)
    for e in manifest.engines:
        shape = f"[{e.batch or 'B'}, {e.sequence or 'S'}]"
        checked = (f"{e.check.top1:.3f}", f"{e.check.max_logit_diff:.2g}") if e.check else ("-", "-")
        size = f"{e.file.bytes / 1024:.0f} KiB"
        table.add_row(e.name, e.role, shape, e.precision, e.dialect, e.draft or "-", size, e.file.sha256[:12], *checked)
    console.print(table, markup=False)
    weights = manifest.weights
    console.print(
        f"weights {weights.path}: {weights.bytes / 2**20:.0f} MiB, {weights.sha256[:12]}, shared by all engines",
        highlight=False,
    )
    console.print(
        f"end of sequence: {manifest.generation.eos_ids}; exported {manifest.created} by kvrelay "
        f"{manifest.kvrelay_version} with " + ", ".join(f"{k} {v}" for k, v in manifest.tools.items()),
        highlight=False,
    )

"""The command `kvrelay export`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, get_args

import typer
from kvrelay.errors import ParameterError
from kvrelay.manifest import Dialect, Float, Precision
from rich.console import Console

__all__ = ["export"]

DEFAULT_VERIFY = "1x2,1x4,1x8,1x16,4x16"


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    shapes = []
    for part in _list(text):
        match = re.fullmatch(r"(\d+)x(\d+)", part)
        if match is None:
            raise ParameterError(f"--verify {part!r}: give shapes as GROUPxWINDOW, for example {DEFAULT_VERIFY}")
        shapes.append((int(match[1]), int(match[2])))
    return tuple(dict.fromkeys(shapes))


def export(
    source: Annotated[
        str, typer.Argument(help="Hugging Face directory, hub id, .gguf file, or smollm2-135m-instruct.")
    ] = "smollm2-135m-instruct",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Bundle folder; default: engines/NAME.")] = None,
    name: Annotated[str | None, typer.Option(help="Model name written to the bundle.")] = None,
    precisions: Annotated[
        str | None,
        typer.Option(
            help="Target precisions: fp32, fp16, int8, int4; default: fp32,int4 (ort), fp16,int4 (standard), "
            "fp16 (decomposed)."
        ),
    ] = None,
    drafts: Annotated[
        str | None,
        typer.Option(help="Drafts: int8-dynamic, int8, int4, skip; default: int8-dynamic, skip if listed."),
    ] = None,
    draft_model: Annotated[
        list[str] | None, typer.Option(help="Separate draft model with the same tokenizer; may be repeated.")
    ] = None,
    dialect: Annotated[
        str,
        typer.Option(
            help="ort (speed on ONNX Runtime), standard (TensorRT 10.15 and later), decomposed (older TensorRT)."
        ),
    ] = "ort",
    verify: Annotated[str, typer.Option(help="Fixed verify shapes, GROUPxWINDOW.")] = DEFAULT_VERIFY,
    prefill: Annotated[int, typer.Option(help="Tokens in a fixed prefill chunk.")] = 64,
    context: Annotated[int, typer.Option(help="Most tokens of prompt and output together.")] = 2048,
    skip: Annotated[str | None, typer.Option(help='Skip list, for example "attention.3,mlp.7".')] = None,
    search_skip: Annotated[bool, typer.Option("--search-skip", help="Search the skip list (minutes).")] = False,
    draft_kv: Annotated[
        str, typer.Option(help="Cache dtype of the drafts in the ort dialect: float32 or float16.")
    ] = "float32",
    activations: Annotated[
        str | None,
        typer.Option(help="Beside int8 and int4 weights in the standard dialect: float16 (default) or float32."),
    ] = None,
) -> None:
    """Export a checkpoint: draft with dynamic axes, target verifier at fixed shapes, each checked against torch."""
    for option, value, allowed in (
        ("--dialect", dialect, get_args(Dialect)),
        ("--draft-kv", draft_kv, get_args(Float)),
        ("--activations", activations or "float32", get_args(Float)),
        *(("--precisions", p, get_args(Precision)) for p in _list(precisions or "")),
    ):
        if value not in allowed:
            raise ParameterError(f"{option} {value}: one of {', '.join(allowed)}")
    console = Console(stderr=True)
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the libraries below would tear this command's own progress
    with console.status("importing torch"):
        from .exporter import export_bundle
        from .options import ExportOptions, default_drafts, default_precisions
        from .source import DEFAULT_MODEL

    if name is None:
        name = DEFAULT_MODEL if source == DEFAULT_MODEL else Path(source).name.removesuffix(".gguf")
    options = ExportOptions(
        source=source,
        output=output or Path("engines") / name,
        name=name,
        dialect=dialect,  # type: ignore[arg-type]
        precisions=default_precisions(dialect) if precisions is None else _list(precisions),  # type: ignore[arg-type]
        drafts=default_drafts(source, dialect, skip is not None or search_skip) if drafts is None else _list(drafts),
        draft_models=tuple(draft_model or ()),
        verify=_shapes(verify),
        prefill=prefill,
        context=context,
        skip=None if skip is None else _list(skip),
        search_skip=search_skip,
        draft_kv=draft_kv,  # type: ignore[arg-type]
        activations=activations,  # type: ignore[arg-type]
    )
    with console.status("starting") as status:

        def progress(line: str) -> None:
            status.update(line)
            if line.startswith(("checked", "skip search")) or not console.is_terminal:
                console.print(line, highlight=False, soft_wrap=True)

        bundle = export_bundle(options, progress)
    console.print(f"bundle: {bundle}", highlight=False, soft_wrap=True)

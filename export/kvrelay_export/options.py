"""What to export: options, their defaults, and which of them go together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvrelay.manifest import Dialect, Float, Precision

from .errors import ExportError
from .lower import DIALECTS, check_lowering
from .source import DEFAULT_MODEL, Checkpoint

__all__ = [
    "QUANTISED_DRAFTS",
    "ExportOptions",
    "check_context",
    "check_options",
    "default_drafts",
    "default_precisions",
]

QUANTISED_DRAFTS: tuple[Precision, ...] = ("int8-dynamic", "int8", "int4")
_BLOCKS = ("int8", "int4")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to export."""

    source: str
    output: Path
    name: str | None = None
    dialect: Dialect = "ort"
    precisions: tuple[Precision, ...] = ("fp32", "int4")
    drafts: tuple[str, ...] = ("int8-dynamic", "skip")
    draft_models: tuple[str, ...] = ()  # sources of separate draft models
    verify: tuple[tuple[int, int], ...] = ((1, 2), (1, 4), (1, 8), (1, 16), (4, 16))
    prefill: int = 64
    context: int = 2048
    skip: tuple[str, ...] | None = None  # None: the stored list of the model, or a search
    search_skip: bool = False
    draft_kv: Float = "float32"
    activations: Float | None = None  # beside int8 and int4 weights in `standard`; None: float16, for GPUs

    def activations_of(self, precision: str) -> Float:
        """What the products, norms and attention of an engine of ``precision`` take and give."""
        if precision == "fp16":
            return "float16"
        if self.dialect == "standard" and precision in _BLOCKS:
            return self.activations or "float16"
        return "float32"

    def kv_dtype_of(self, precision: str, role: str) -> Float:
        """What an engine's KV cache holds: its activations, or what was chosen for drafts."""
        activations = self.activations_of(precision)
        return self.draft_kv if role == "draft" and activations == "float32" else activations


def default_precisions(dialect: str) -> tuple[str, ...]:
    """Target precisions where none are named: those that the dialect is for."""
    return {"standard": ("fp16", "int4"), "decomposed": ("fp16",)}.get(dialect, ("fp32", "int4"))


def default_drafts(source: str, dialect: str, has_skip_list: bool) -> tuple[str, ...]:
    """Drafts exported where none are named: those that the dialect and the model allow."""
    quantised = ("int8-dynamic",) if dialect == "ort" else ()
    return (*quantised, "skip") if has_skip_list or source == DEFAULT_MODEL else quantised


def check_options(options: ExportOptions) -> None:
    """Refuse what can be refused before a checkpoint is read.

    Raises:
        ExportError: an option is out of range or contradicts another; says which.
    """
    if options.dialect not in DIALECTS:
        raise ExportError(f"dialect {options.dialect!r} is unknown: {', '.join(DIALECTS)}")
    if not options.precisions:
        raise ExportError(f"no target precision: give at least one of {', '.join(DIALECTS[options.dialect])}")
    for draft in options.drafts:
        if draft != "skip" and draft not in QUANTISED_DRAFTS:
            raise ExportError(f"draft {draft!r} is unknown: {', '.join((*QUANTISED_DRAFTS, 'skip'))}")
    for batch, width in options.verify:
        if batch < 1 or width < 2:
            raise ExportError(f"verify shape {batch}x{width}: a window holds at least 2 tokens, a group 1 window")
    if not any(batch == 1 for batch, _ in options.verify):
        raise ExportError("verify shapes: at least one of batch 1 is needed, 1x2 for the exact plain step")
    if options.prefill < 2:
        raise ExportError(f"prefill chunk {options.prefill}: at least 2")
    for option in ("precisions", "drafts", "draft_models", "verify"):
        values = getattr(options, option)
        if len(set(values)) != len(values):
            raise ExportError(f"{option}: one is named twice in {', '.join(map(str, values))}")
    if options.context < 2:
        raise ExportError(f"context {options.context}: at least 2, one token in and one out")
    _check_forms(options)
    if options.output.exists() and not (options.output / "manifest.json").is_file():
        raise ExportError(f"{options.output} exists and is no bundle: it will not be replaced; give another --output")


def _check_forms(options: ExportOptions) -> None:
    wanted = [*options.precisions, *(d for d in options.drafts if d != "skip")]
    for precision in wanted:
        check_lowering(options.dialect, precision, options.activations_of(precision))
    if options.draft_kv != "float32" and options.dialect != "ort":
        raise ExportError(
            f"--draft-kv {options.draft_kv} is part of the ort dialect only: the {options.dialect} dialect keeps KV "
            "in the dtype of the activations"
        )
    if options.activations is not None and not (options.dialect == "standard" and set(wanted) & set(_BLOCKS)):
        raise ExportError(
            f"--activations {options.activations}: it is for int8 and int4 weights in the standard dialect; fp32 and "
            "fp16 name their activations themselves, and the ort dialect has float32"
        )


def check_context(options: ExportOptions, checkpoint: Checkpoint) -> None:
    """Refuse a context that the model was not made for.

    Raises:
        ExportError: names both numbers.
    """
    limit = checkpoint.model.config.max_position_embeddings
    if options.context > limit:
        raise ExportError(f"--context {options.context} is over max_position_embeddings {limit} of {checkpoint.name}")

"""Export a checkpoint to a bundle: trace once, lower for every engine, check each against torch, publish."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
from kvrelay.manifest import Check, EngineEntry, ModelEntry, Precision, Role
from kvrelay.tokenizer import first_difference
from tokenizers import Tokenizer

from .check import CHECK_LENGTH, LONGEST_PASS, check_engine, compare_twins
from .errors import ExportError
from .graph import fix_shape, pair_logit_row
from .lower import lower
from .maxima import Maxima, recording
from .options import QUANTISED_DRAFTS, ExportOptions, check_context, check_options
from .program import Geometry, trace
from .publish import bundle_id, file_entry, publish, write_manifest
from .reference import reference_ids, reference_logits
from .skip import parse_skip_list, search_skip, stored_skip_list
from .source import Checkpoint, load_checkpoint
from .weights import WeightsFile

__all__ = ["ExportOptions", "export_bundle"]


@dataclass(slots=True)
class _Work:
    """State of one export, in the folder where it is put together."""

    options: ExportOptions
    folder: Path
    weights: WeightsFile
    progress: Callable[[str], None]
    engines: list[EngineEntry] = field(default_factory=list)
    models: dict[str, ModelEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Reference:
    """What torch computes with an engine's own weights."""

    logits: np.ndarray  # [rows, T, V]
    maxima: Maxima | None  # of float16 activations


@dataclass(slots=True)
class _Traced:
    """A checkpoint with its program and what the check needs of torch."""

    checkpoint: Checkpoint
    entry: ModelEntry
    program: ir.Model
    ids: np.ndarray
    original: np.ndarray
    references: dict[tuple[str, tuple[str, ...]], _Reference] = field(default_factory=dict)


def export_bundle(options: ExportOptions, progress: Callable[[str], None] = lambda _: None) -> Path:
    """Export and return the bundle's folder. An interrupted or failed export leaves ``output`` as it was.

    Raises:
        ExportError: the checkpoint or an option is not supported, or an engine fails its check.
    """
    check_options(options)
    output = options.output
    output.parent.mkdir(parents=True, exist_ok=True)
    progress(f"loading {options.source}")
    checkpoint = load_checkpoint(options.source, options.name)
    # All that may be refused is refused here: what follows takes minutes.
    check_context(options, checkpoint)
    given = _given_skip_list(options, checkpoint) if "skip" in options.drafts else None
    draft_models = _load_draft_models(options, checkpoint, progress)
    staging = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-"))
    try:
        weights = WeightsFile(staging / f"weights-{bundle_id(options, [checkpoint, *draft_models])}.bin")
        work = _Work(options, staging, weights, progress)
        target = _trace(work, checkpoint)
        _export_target(work, target)
        skip = _skip_list(work, target, given) if "skip" in options.drafts else ()
        _export_drafts(work, target, skip)
        for draft in draft_models:
            _export_draft_model(work, draft)
        weights.close()
        progress("hashing weights")
        write_manifest(staging, checkpoint, work.models, work.engines, weights.path)
        publish(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return output


def _trace(work: _Work, checkpoint: Checkpoint) -> _Traced:
    options = work.options
    config = checkpoint.model.config
    # A pass of fixed width that starts at the end of the context must still write inside.
    room = max(options.prefill, *(width for _, width in options.verify))
    geometry = Geometry.of(checkpoint.model, -(-(options.context + room) // 64) * 64)
    entry = ModelEntry(
        name=checkpoint.name,
        family=config.model_type,
        layers=geometry.layers,
        hidden=config.hidden_size,
        heads=geometry.heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        vocab_size=checkpoint.vocab_size,
        padded_vocab_size=config.vocab_size,
        context=options.context,
        capacity=geometry.capacity,
        rope=dict(config.rope_parameters),
        source=checkpoint.source,
        source_sha256=checkpoint.sha256,
    )
    work.models[entry.name] = entry
    work.progress(f"tracing {entry.name} with dynamic axes")
    program = trace(checkpoint.model, geometry, None)
    # Long enough for one pass of every engine, even where the context is shorter than a window.
    widest = max(LONGEST_PASS, *(width for _, width in options.verify))
    length = max(min(CHECK_LENGTH, options.context), widest)
    ids = reference_ids(Tokenizer.from_str(checkpoint.tokenizer_json), length, entry.vocab_size)
    return _Traced(checkpoint, entry, program, ids, reference_logits(checkpoint.model, ids))


def _export_target(work: _Work, target: _Traced) -> None:
    options = work.options
    shapes = [("verify", b, n, n) for b, n in options.verify] + [("prefill", 1, options.prefill, 1)]
    for precision in options.precisions:
        work.progress(f"lowering {precision}")
        dynamic = _lower(work, target, precision)
        _add_engine(work, target, dynamic, f"{precision}-decode", "decode", precision)
        for role, batch, width, rows in shapes:
            fixed = fix_shape(dynamic, batch, width, rows)
            if role == "prefill" and options.activations_of(precision) == "float32":
                # Not in float16: on a CPU it would move one of the casts between which float32 is computed.
                pair_logit_row(fixed)
            name = f"{precision}-{role}-{batch}x{width}"
            _add_engine(work, target, fixed, name, role, precision, shape=(batch, width, rows))  # type: ignore[arg-type]
        if options.dialect == "ort":
            step = fix_shape(_lower(work, target, precision, paired=True), None, 1, 1)
            _add_engine(work, target, step, f"{precision}-step", "step", precision, shape=(None, 1, 1))
    _check_static_trace(work, target)


def _lower(
    work: _Work,
    traced: _Traced,
    precision: Precision,
    *,
    role: Role = "decode",
    skip: tuple[str, ...] = (),
    paired: bool = False,
) -> ir.Model:
    options = work.options
    return lower(
        traced.program,
        options.dialect,
        precision,
        skip=skip,
        activations=options.activations_of(precision),
        kv_dtype=options.kv_dtype_of(precision, role),
        paired=paired,
    )


def _check_static_trace(work: _Work, target: _Traced) -> None:
    """Trace one verify shape statically: it must be its fixed twin, bit for bit."""
    options = work.options
    precision = options.precisions[0]
    batch, width = next(shape for shape in options.verify if shape[0] == 1)
    entry = next(e for e in work.engines if e.name == f"{precision}-verify-{batch}x{width}")
    work.progress(f"tracing {entry.name} with fixed axes")
    geometry = Geometry.of(target.checkpoint.model, target.entry.capacity)
    traced = trace(target.checkpoint.model, geometry, (batch, width))
    static = lower(traced, options.dialect, precision, activations=entry.activations)
    with tempfile.TemporaryDirectory(dir=work.folder) as folder:
        scratch = WeightsFile(Path(folder) / "weights.bin")
        scratch.save(static, Path(folder) / "static.onnx")
        scratch.close()
        compare_twins(
            entry, Path(folder) / "static.onnx", work.folder / entry.file.path, target.entry, target.ids[:batch]
        )


def _given_skip_list(options: ExportOptions, checkpoint: Checkpoint) -> tuple[str, ...] | None:
    """Return the skip list that is given or known, or None if it is to be searched."""
    if options.skip is not None:
        return tuple(parse_skip_list(options.skip, checkpoint.model.config.num_hidden_layers))
    return None if options.search_skip else stored_skip_list(checkpoint)


def _skip_list(work: _Work, target: _Traced, given: tuple[str, ...] | None) -> tuple[str, ...]:
    if given is not None:
        return given
    found = tuple(search_skip(target.checkpoint.model, target.ids, progress=work.progress))
    if not found:
        raise ExportError(
            "--search-skip: no sublayer can be left out at the agreement floor; leave skip out of --drafts"
        )
    return found


def _export_drafts(work: _Work, target: _Traced, skip: tuple[str, ...]) -> None:
    options = work.options
    if "skip" in options.drafts:
        for precision in options.precisions:
            graph = _lower(work, target, precision, role="draft", skip=skip)
            _add_engine(work, target, graph, f"{precision}-draft-skip", "draft", precision, draft="skip", skip=skip)
    for draft in options.drafts:
        # A target of the same precision serves as the draft of that name.
        if draft == "skip" or (draft in options.precisions and options.draft_kv == "float32"):
            continue
        work.progress(f"lowering draft {draft}")
        graph = _lower(work, target, draft, role="draft")  # type: ignore[arg-type]
        _add_engine(work, target, graph, f"{draft}-draft", "draft", draft, draft=draft)  # type: ignore[arg-type]


def _load_draft_models(options: ExportOptions, target: Checkpoint, progress: Callable[[str], None]) -> list[Checkpoint]:
    taken = {"none", "ngram", "self", "skip", "auto", *QUANTISED_DRAFTS, target.name}
    loaded = []
    for source in options.draft_models:
        progress(f"loading draft model {source}")
        draft = load_checkpoint(source)
        if draft.name in taken:
            raise ExportError(f"draft model name {draft.name!r} is taken; rename its folder")
        taken.add(draft.name)
        difference = first_difference(target.tokenizer_json, draft.tokenizer_json)
        if difference is not None:
            raise ExportError(f"draft model {draft.name} has another tokenizer than {target.name}: {difference}")
        check_context(options, draft)
        loaded.append(draft)
    return loaded


def _export_draft_model(work: _Work, checkpoint: Checkpoint) -> None:
    traced = _trace(work, checkpoint)
    precision = work.options.precisions[0]
    graph = _lower(work, traced, precision, role="draft")
    name = f"{precision}-draft-{checkpoint.name}"
    _add_engine(work, traced, graph, name, "draft", precision, draft=checkpoint.name)


def _add_engine(
    work: _Work,
    traced: _Traced,
    graph: ir.Model,
    name: str,
    role: Role,
    precision: Precision,
    *,
    shape: tuple[int | None, int, int] | None = None,
    draft: str | None = None,
    skip: tuple[str, ...] = (),
) -> None:
    path = work.folder / f"{name}.onnx"
    work.weights.save(graph, path)
    dropped = {int(s.split(".")[1]) for s in skip if s.startswith("attention")}
    batch, sequence, rows = shape or (None, None, None)
    entry = EngineEntry(
        name=name,
        role=role,
        model=traced.entry.name,
        precision=precision,
        dialect=work.options.dialect,
        file=file_entry(path),
        batch=batch,
        sequence=sequence,
        rows=rows,
        activations=work.options.activations_of(precision),
        kv_dtype=work.options.kv_dtype_of(precision, role),
        kv_layers=[i for i in range(traced.entry.layers) if i not in dropped],
        draft=draft,
        skip=list(skip),
    )
    work.progress(f"checking {name} against torch")
    check = _check(work, traced, entry, path, skip)
    work.progress(
        f"checked {name}: top-1 {check.top1:.3f}, largest logit difference {check.max_logit_diff:.2g}, "
        f"agreement with the original {check.agreement:.3f} over {check.tokens} positions"
    )
    work.engines.append(entry.model_copy(update={"check": check}))


def _check(work: _Work, traced: _Traced, entry: EngineEntry, path: Path, skip: tuple[str, ...]) -> Check:
    rows = entry.batch or (1 if entry.role == "prefill" else 2)
    ids = np.resize(traced.ids, (max(rows, 4), traced.ids.shape[1]))
    reference = _reference(work, traced, entry, skip)
    same, original = reference.logits, traced.original
    if rows > len(same):
        repeat = [i % len(same) for i in range(rows)]
        same, original = same[repeat], original[repeat]
    check = check_engine(entry, path, traced.entry, ids, same, original)
    if reference.maxima is None:
        return check
    return check.model_copy(update={"activation_maxima": [float(f"{v:.5g}") for v in reference.maxima.values]})


def _reference(work: _Work, traced: _Traced, entry: EngineEntry, skip: tuple[str, ...]) -> _Reference:
    """Return what torch computes with the weights and skip list of ``entry``.

    Raises:
        CheckError: its activations would overflow in float16.
    """
    key = (entry.precision, skip)
    if key in traced.references:
        return traced.references[key]
    # One at a time: each holds a logit for every word of the vocabulary at every position.
    traced.references.clear()
    model = traced.checkpoint.model
    half = entry.activations == "float16"
    with recording(model) if half else contextlib.nullcontext() as maxima:
        logits = reference_logits(model, traced.ids, entry.precision, skip, entry.activations)
    if maxima is not None:
        maxima.require_half(entry.precision)
        work.progress(f"checked {entry.precision} activations{' of the skip draft' * bool(skip)}: {maxima.summary()}")
    traced.references[key] = _Reference(logits, maxima)
    return traced.references[key]

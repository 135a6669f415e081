"""Export a checkpoint to a bundle: trace once, lower for every engine, check each against torch, publish."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx_ir as ir
from kvrelay.bundle import file_sha256
from kvrelay.manifest import (
    SCHEMA_VERSION,
    Check,
    Dialect,
    EngineEntry,
    FileEntry,
    Generation,
    Manifest,
    ModelEntry,
    Precision,
    Role,
)
from kvrelay.tokenizer import first_difference
from tokenizers import Tokenizer

from .check import CHECK_LENGTH, LONGEST_PASS, check_engine, compare_twins
from .errors import ExportError
from .graph import fix_shape, pair_logit_row
from .lower import check_lowering, lower
from .program import Geometry, trace
from .reference import reference_ids, reference_logits
from .skip import parse_skip_list, search_skip
from .source import DEFAULT_MODEL, Checkpoint, load_checkpoint
from .weights import WeightsFile

__all__ = ["ExportOptions", "default_drafts", "export_bundle"]

QUANTISED_DRAFTS: tuple[Precision, ...] = ("int8-dynamic", "int8", "int4")


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
    draft_kv: str = "float32"


@dataclass(slots=True)
class _Work:
    """State of one export, in the folder where it is put together."""

    options: ExportOptions
    folder: Path
    weights: WeightsFile
    progress: Callable[[str], None]
    engines: list[EngineEntry] = field(default_factory=list)
    models: dict[str, ModelEntry] = field(default_factory=dict)


@dataclass(slots=True)
class _Traced:
    """A checkpoint with its program and what the check needs of torch."""

    checkpoint: Checkpoint
    entry: ModelEntry
    program: ir.Model
    ids: np.ndarray
    original: np.ndarray
    references: dict[tuple[str, tuple[str, ...]], np.ndarray] = field(default_factory=dict)

    def reference(self, precision: str, skip: tuple[str, ...]) -> np.ndarray:
        key = (precision, skip)
        if key not in self.references:
            # One at a time: each holds a logit for every word of the vocabulary at every position.
            self.references.clear()
            self.references[key] = reference_logits(self.checkpoint.model, self.ids, precision, skip)
        return self.references[key]


def default_drafts(source: str, dialect: str, has_skip_list: bool) -> tuple[str, ...]:
    """Drafts exported where none are named: those that the dialect and the model allow."""
    quantised = ("int8-dynamic",) if dialect == "ort" else ()
    return (*quantised, "skip") if has_skip_list or source == DEFAULT_MODEL else quantised


def export_bundle(options: ExportOptions, progress: Callable[[str], None] = lambda _: None) -> Path:
    """Export and return the bundle's folder. An interrupted or failed export leaves ``output`` as it was.

    Raises:
        ExportError: the checkpoint or an option is not supported, or an engine fails its check.
    """
    _check_options(options)
    output = options.output
    output.parent.mkdir(parents=True, exist_ok=True)
    progress(f"loading {options.source}")
    checkpoint = load_checkpoint(options.source, options.name)
    # All that may be refused is refused here: what follows takes minutes.
    _check_context(options, checkpoint)
    stored = _stored_skip_list(options, checkpoint) if "skip" in options.drafts else None
    draft_models = _load_draft_models(options, checkpoint, progress)
    staging = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-"))
    try:
        weights = WeightsFile(staging / f"weights-{_bundle_id(options, [checkpoint, *draft_models])}.bin")
        work = _Work(options, staging, weights, progress)
        target = _trace(work, checkpoint)
        _export_target(work, target)
        skip = _skip_list(work, target, stored) if "skip" in options.drafts else ()
        _export_drafts(work, target, skip)
        for draft in draft_models:
            _export_draft_model(work, draft)
        weights.close()
        _write_manifest(work, checkpoint)
        _publish(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return output


def _check_options(options: ExportOptions) -> None:
    if not options.precisions:
        raise ExportError("no target precision: give at least one of fp32, int8, int4")
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
    for precision in (*options.precisions, *(d for d in options.drafts if d != "skip")):
        check_lowering(options.dialect, precision, "float32")
    if options.drafts:
        check_lowering(options.dialect, "fp32", options.draft_kv)
    if options.output.exists() and not (options.output / "manifest.json").is_file():
        raise ExportError(f"{options.output} exists and is no bundle: it will not be replaced; give another --output")


def _check_context(options: ExportOptions, checkpoint: Checkpoint) -> None:
    limit = checkpoint.model.config.max_position_embeddings
    if options.context > limit:
        raise ExportError(f"--context {options.context} is over max_position_embeddings {limit} of {checkpoint.name}")


def _bundle_id(options: ExportOptions, checkpoints: list[Checkpoint]) -> str:
    # Of every model its content, not its path: two bundles must never share a data file name by accident.
    hashes = [checkpoint.sha256 for checkpoint in checkpoints]
    facts = {**asdict(options), "output": None, "sha256": hashes, "kvrelay": version("kvrelay")}
    return hashlib.sha256(json.dumps(facts, default=str, sort_keys=True).encode()).hexdigest()[:12]


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
        dynamic = lower(target.program, options.dialect, precision)
        _add_engine(work, target, dynamic, f"{precision}-decode", "decode", precision)
        for role, batch, width, rows in shapes:
            fixed = fix_shape(dynamic, batch, width, rows)
            if role == "prefill":
                pair_logit_row(fixed)
            name = f"{precision}-{role}-{batch}x{width}"
            _add_engine(work, target, fixed, name, role, precision, shape=(batch, width, rows))  # type: ignore[arg-type]
        if options.dialect == "ort":
            step = fix_shape(lower(target.program, options.dialect, precision, paired=True), None, 1, 1)
            _add_engine(work, target, step, f"{precision}-step", "step", precision, shape=(None, 1, 1))
    _check_static_trace(work, target)


def _check_static_trace(work: _Work, target: _Traced) -> None:
    """Trace one verify shape statically: it must be its fixed twin, bit for bit."""
    options = work.options
    precision = options.precisions[0]
    batch, width = next(shape for shape in options.verify if shape[0] == 1)
    entry = next(e for e in work.engines if e.name == f"{precision}-verify-{batch}x{width}")
    work.progress(f"tracing {entry.name} with fixed axes")
    geometry = Geometry.of(target.checkpoint.model, target.entry.capacity)
    static = lower(trace(target.checkpoint.model, geometry, (batch, width)), options.dialect, precision)
    with tempfile.TemporaryDirectory(dir=work.folder) as folder:
        scratch = WeightsFile(Path(folder) / "weights.bin")
        scratch.save(static, Path(folder) / "static.onnx")
        scratch.close()
        compare_twins(
            entry, Path(folder) / "static.onnx", work.folder / entry.file.path, target.entry, target.ids[:batch]
        )


def _stored_skip_list(options: ExportOptions, checkpoint: Checkpoint) -> tuple[str, ...] | None:
    """Return the skip list that is given or known, or None if it is to be searched."""
    layers = checkpoint.model.config.num_hidden_layers
    if options.skip is not None:
        return tuple(parse_skip_list(options.skip, layers))
    if options.search_skip:
        return None
    stored = Path(__file__).with_name("skip_lists.json")
    lists: dict[str, list[str]] = json.loads(stored.read_text())
    if checkpoint.sha256 not in lists:
        raise ExportError(
            f"draft skip: no skip list is stored for {checkpoint.name}; "
            "give one with --skip, find one with --search-skip, or leave skip out of --drafts"
        )
    return tuple(parse_skip_list(lists[checkpoint.sha256], layers))


def _skip_list(work: _Work, target: _Traced, stored: tuple[str, ...] | None) -> tuple[str, ...]:
    if stored is not None:
        return stored
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
            graph = lower(target.program, options.dialect, precision, skip=skip, kv_dtype=options.draft_kv)
            _add_engine(work, target, graph, f"{precision}-draft-skip", "draft", precision, draft="skip", skip=skip)
    for draft in options.drafts:
        # A target of the same precision serves as the draft of that name.
        if draft == "skip" or (draft in options.precisions and options.draft_kv == "float32"):
            continue
        work.progress(f"lowering draft {draft}")
        graph = lower(target.program, options.dialect, draft, kv_dtype=options.draft_kv)  # type: ignore[arg-type]
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
        _check_context(options, draft)
        loaded.append(draft)
    return loaded


def _export_draft_model(work: _Work, checkpoint: Checkpoint) -> None:
    traced = _trace(work, checkpoint)
    precision = work.options.precisions[0]
    graph = lower(traced.program, work.options.dialect, precision, kv_dtype=work.options.draft_kv)
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
        file=_file_entry(path),
        batch=batch,
        sequence=sequence,
        rows=rows,
        kv_dtype=work.options.draft_kv if role == "draft" else "float32",  # type: ignore[arg-type]
        kv_layers=[i for i in range(traced.entry.layers) if i not in dropped],
        draft=draft,
        skip=list(skip),
    )
    work.progress(f"checking {name} against torch")
    check = _check(traced, entry, path, skip)
    work.progress(
        f"checked {name}: top-1 {check.top1:.3f}, largest logit difference {check.max_logit_diff:.2g}, "
        f"agreement with the original {check.agreement:.3f} over {check.tokens} positions"
    )
    work.engines.append(entry.model_copy(update={"check": check}))


def _check(traced: _Traced, entry: EngineEntry, path: Path, skip: tuple[str, ...]) -> Check:
    rows = entry.batch or (1 if entry.role == "prefill" else 2)
    ids = np.resize(traced.ids, (max(rows, 4), traced.ids.shape[1]))
    same, original = traced.reference(entry.precision, skip), traced.original
    if rows > len(same):
        repeat = [i % len(same) for i in range(rows)]
        same, original = same[repeat], original[repeat]
    return check_engine(entry, path, traced.entry, ids, same, original)


def _file_entry(path: Path) -> FileEntry:
    return FileEntry(path=path.name, bytes=path.stat().st_size, sha256=file_sha256(path))


def _write_manifest(work: _Work, checkpoint: Checkpoint) -> None:
    work.progress("hashing weights")
    (work.folder / "tokenizer.json").write_text(checkpoint.tokenizer_json, encoding="utf-8")
    template: FileEntry | None = None
    if checkpoint.chat_template:
        (work.folder / "chat_template.jinja").write_text(checkpoint.chat_template, encoding="utf-8")
        template = _file_entry(work.folder / "chat_template.jinja")
    tools = {name: version(name) for name in ("torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime")}
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        kvrelay_version=version("kvrelay"),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        tools=tools,
        target=checkpoint.name,
        models=work.models,
        engines=work.engines,
        weights=_file_entry(work.weights.path),
        tokenizer=_file_entry(work.folder / "tokenizer.json"),
        chat_template=template,
        generation=Generation(bos_id=checkpoint.bos_id, eos_ids=checkpoint.eos_ids),
    )
    (work.folder / "manifest.json").write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _publish(staging: Path, output: Path) -> None:
    """Put the finished folder in place; an older bundle there steps aside until the new one stands."""
    os.chmod(staging, 0o755)
    if not output.exists():
        os.replace(staging, output)
        return
    aside = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-old-"))
    os.replace(output, aside / "bundle")
    try:
        os.replace(staging, output)
    except BaseException:
        os.replace(aside / "bundle", output)
        raise
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(aside)

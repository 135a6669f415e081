"""The default model's engines on TensorRT-RTX, for three kinds of GPU in one build, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from bundles import RTX
from kvrelay.bundle import Bundle, file_sha256, open_bundle
from kvrelay.manifest import EngineEntry, FileEntry, Generation, Manifest, ModelEntry
from kvrelay.trt.build import Build
from kvrelay.trt.plans import read_plan
from kvrelay_export.exporter import export_bundle
from kvrelay_export.graph import fix_shape
from kvrelay_export.lower import lower
from kvrelay_export.options import ExportOptions
from kvrelay_export.program import Geometry
from kvrelay_export.source import DEFAULT_MODEL, load_checkpoint
from kvrelay_export.weights import WeightsFile
from traces import traced_once

pytest.importorskip("tensorrt_rtx")

DEVICES = "sm86,sm89,sm120"
CONTEXT, CAPACITY = 2048, 2112


def file_entry(path: Path) -> FileEntry:
    return FileEntry(path=path.name, bytes=path.stat().st_size, sha256=file_sha256(path))


def unchecked_bundle(folder: Path) -> Bundle:
    """The default model's int4 decode and verify engines, lowered as an export does, without its numeric check."""
    model = load_checkpoint(DEFAULT_MODEL).model
    geometry = Geometry.of(model, CAPACITY)
    dynamic = lower(traced_once(model, geometry, None), "standard", "int4", activations="float16")
    weights = WeightsFile(folder / "weights.bin")
    entries = []
    for role, shape in (("decode", None), ("verify", (1, 8, 8))):
        path = folder / f"int4-{role}.onnx"
        weights.save(dynamic if shape is None else fix_shape(dynamic, *shape), path)
        batch, sequence, rows = shape or (None, None, None)
        entry = EngineEntry(
            name=path.stem,
            role=role,  # type: ignore[arg-type]
            model="default",
            precision="int4",
            dialect="standard",
            file=file_entry(path),
            batch=batch,
            sequence=sequence,
            rows=rows,
            activations="float16",
            kv_dtype="float16",
            kv_layers=list(range(geometry.layers)),
        )
        entries.append(entry)
    weights.close()
    config = model.config
    sizes = ModelEntry(
        name="default",
        family=config.model_type,
        layers=geometry.layers,
        hidden=config.hidden_size,
        heads=geometry.heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        vocab_size=config.vocab_size,
        padded_vocab_size=config.vocab_size,
        context=CONTEXT,
        capacity=CAPACITY,
        rope={},
        source=DEFAULT_MODEL,
        source_sha256="0" * 64,
    )
    manifest = Manifest(
        schema_version=1,
        kvrelay_version="0",
        created="",
        tools={},
        target="default",
        models={"default": sizes},
        engines=entries,
        weights=file_entry(weights.path),
        tokenizer=file_entry(weights.path),  # not looked at
        chat_template=None,
        generation=Generation(bos_id=None, eos_id=None, eos_ids=[]),
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    return Bundle(folder, manifest)


def assert_all_build(bundle: Bundle) -> None:
    work = Build(bundle, RTX, DEVICES)
    for entry in bundle.manifest.engines:
        memory = work.examine(entry)
        built = work.build(entry)
        assert built.remarks == ()
        assert len(read_plan(built.plan)) > 0.8 * memory.weights, "the plan holds the weights that were predicted"


def test_the_default_models_int4_decode_and_verify_build(tmp_path: Path, cache: Path) -> None:
    assert_all_build(unchecked_bundle(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_every_engine_of_the_default_model_builds(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr("kvrelay_export.exporter.trace", traced_once)
    options = ExportOptions(
        source=DEFAULT_MODEL,
        output=tmp_path / "bundle",
        dialect="standard",
        precisions=(precision,),  # type: ignore[arg-type]
        drafts=("skip",),
    )
    bundle = open_bundle(export_bundle(options))
    assert {e.role for e in bundle.manifest.engines} == {"decode", "verify", "prefill", "draft"}
    assert_all_build(bundle)

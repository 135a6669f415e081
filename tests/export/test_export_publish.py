"""A bundle appears whole or not at all, and nothing of the user's is overwritten."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvrelay.bundle import open_bundle
from kvrelay_export import exporter
from kvrelay_export.check import check_engine
from kvrelay_export.errors import CheckError, ExportError
from kvrelay_export.exporter import ExportOptions, export_bundle
from tiny import PADDED_VOCAB_SIZE, build_model, byte_tokenizer, save_model
from tokenizers import Tokenizer
from traces import traced_once
from transformers import PreTrainedModel, PreTrainedTokenizerFast

Export = Callable[..., Path]


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Export]:
    """Export a one-layer model to ``tmp_path / "bundle"``."""
    monkeypatch.setattr(exporter, "trace", traced_once)
    source = save_model(tmp_path / "model", tiny())

    def run(**options: Any) -> Path:
        defaults = {"precisions": ("fp32",), "drafts": (), "verify": ((1, 2),), "prefill": 16, "context": 64}
        made: dict[str, Any] = {"source": str(source), "output": tmp_path / "bundle", **defaults, **options}
        return export_bundle(ExportOptions(**made))

    return run


def tiny(**config: Any) -> PreTrainedModel:
    return build_model(num_hidden_layers=1, **config)


def content(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def fail_at(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    """Let the check of the engine number ``count`` raise."""
    calls = 0

    def check(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            raise error
        return check_engine(*args)

    monkeypatch.setattr(exporter, "check_engine", check)


@pytest.mark.parametrize("error", [CheckError("wrong"), KeyboardInterrupt(), MemoryError(), OSError(28, "No space")])
def test_a_failure_midway_leaves_an_older_bundle_untouched_and_nothing_beside_it(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = content(export())
    fail_at(monkeypatch, 2, error)
    with pytest.raises(type(error)):
        export(verify=((1, 4),))
    assert content(tmp_path / "bundle") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "model"]
    open_bundle(tmp_path / "bundle")


def test_a_failure_without_an_older_bundle_leaves_nothing(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        export()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_failure_while_changing_places_puts_the_older_bundle_back(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(export())
    replace = os.replace

    def broken(source: Any, target: Any) -> None:
        if (
            Path(target) == tmp_path / "bundle"
            and (Path(source) / "manifest.json").exists()
            and "-old-" not in str(source)
        ):
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="Input/output"):
        export(verify=((1, 4),))
    monkeypatch.undo()
    assert content(tmp_path / "bundle") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "model"]


def test_an_older_bundle_is_replaced_whole(export: Export, tmp_path: Path) -> None:
    export()
    bundle = open_bundle(export(verify=((1, 4),)))
    assert [e.name for e in bundle.manifest.engines] == [
        "fp32-decode",
        "fp32-verify-1x4",
        "fp32-prefill-1x16",
        "fp32-step",
    ]
    named = {f.path for f in bundle.files()} | {"manifest.json"}
    assert {p.name for p in bundle.path.iterdir()} == named
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "model"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_no_bundle_is_not_replaced(export: Export, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "bundle"
    if kind == "folder":
        path.mkdir()
        (path / "thesis.tex").write_text("ten years of work")
    else:
        path.write_text("ten years of work")
    with pytest.raises(ExportError, match=r"bundle exists and is no bundle: it will not be replaced"):
        export()
    assert (path / "thesis.tex" if kind == "folder" else path).read_text() == "ten years of work"


def test_a_bundle_in_folders_that_do_not_exist_yet_is_published_there(export: Export, tmp_path: Path) -> None:
    open_bundle(export(output=tmp_path / "a" / "b" / "bundle é"))


def weights_name(bundle: Path) -> str:
    return open_bundle(bundle).manifest.weights.path


def test_weights_files_have_one_name_for_one_content_and_another_for_another(export: Export, tmp_path: Path) -> None:
    first = weights_name(export())
    assert weights_name(export(output=tmp_path / "elsewhere")) == first
    assert weights_name(export(verify=((1, 2), (1, 4)))) != first
    draft = save_model(tmp_path / "draft", tiny())
    with_draft = weights_name(export(draft_models=(str(draft),)))
    (draft / "generation_config.json").write_text("{}")  # another draft model at the same path
    assert len({first, with_draft, weights_name(export(draft_models=(str(draft),)))}) == 3


def test_a_moved_bundle_still_opens_and_names_nothing_of_where_it_was_made(export: Export, tmp_path: Path) -> None:
    moved = export().rename(tmp_path / "moved bundle")
    bundle = open_bundle(moved)
    for entry in (*bundle.files(), None):
        file = moved / (entry.path if entry else "manifest.json")
        assert str(tmp_path).encode() not in file.read_bytes(), file.name


# --- draft models -----------------------------------------------------------------------------------------------------


def other_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(byte_tokenizer().backend_tokenizer.to_str().replace('"<|user|>"', '"<|human|>"'))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def longer_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (other_tokenizer, r"260 tokens in the target, 260 in the draft; .* id 2: '<\|user\|>' and '<\|human\|>'"),
        (longer_tokenizer, r"260 tokens in the target, 261 in the draft; .* id 260: None and '<\|tool\|>'"),
    ],
)
def test_a_draft_model_with_another_tokenizer_is_refused_before_anything_is_traced(
    export: Export,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Callable[[], PreTrainedTokenizerFast],
    message: str,
) -> None:
    monkeypatch.setattr(exporter, "trace", lambda *_: pytest.fail("traced"))
    draft = save_model(tmp_path / "draft", tiny(seed=1), tokenizer())
    with pytest.raises(ExportError, match=f"draft model draft has another tokenizer than model: {message}"):
        export(draft_models=(str(draft),))


def test_a_draft_model_may_be_padded_otherwise_and_have_other_sizes(export: Export, tmp_path: Path) -> None:
    draft = save_model(
        tmp_path / "draft",
        build_model("qwen3", vocab_size=PADDED_VOCAB_SIZE + 64, head_dim=32, num_key_value_heads=1),
    )
    manifest = open_bundle(export(draft_models=(str(draft),))).manifest
    entry = manifest.models["draft"]
    assert (entry.family, entry.layers, entry.kv_heads, entry.head_dim) == ("qwen3", 2, 1, 32)
    assert (entry.vocab_size, entry.padded_vocab_size) == (260, 384)
    target = manifest.models["model"]
    assert (target.family, target.layers, target.kv_heads, target.head_dim) == ("llama", 1, 2, 16)
    assert (target.vocab_size, target.padded_vocab_size) == (260, 320)
    (engine,) = (e for e in manifest.engines if e.role == "draft")
    assert (engine.name, engine.draft, engine.model, engine.kv_layers) == ("fp32-draft-draft", "draft", "draft", [0, 1])
    assert engine.check is not None
    assert engine.check.top1 == 1.0


@pytest.mark.parametrize("name", ["ngram", "int8-dynamic", "model"])
def test_a_draft_model_whose_name_means_something_else_is_refused(export: Export, tmp_path: Path, name: str) -> None:
    draft = save_model(tmp_path / "drafts" / name, tiny(seed=1))
    with pytest.raises(ExportError, match=f"draft model name '{name}' is taken"):
        export(draft_models=(str(draft),))


def test_a_draft_model_with_a_smaller_context_is_refused(export: Export, tmp_path: Path) -> None:
    draft = save_model(tmp_path / "draft", tiny(max_position_embeddings=32))
    with pytest.raises(ExportError, match="--context 64 is over max_position_embeddings 32 of draft"):
        export(draft_models=(str(draft),))


# --- what the manifest says -------------------------------------------------------------------------------------------


def test_drafts_with_a_half_precision_cache_pass_their_check(export: Export) -> None:
    options = {"drafts": ("skip", "int8-dynamic", "int4"), "skip": ("mlp.0",), "draft_kv": "float16"}
    manifest = open_bundle(export(**options)).manifest
    drafts = [e for e in manifest.engines if e.role == "draft"]
    assert [e.name for e in drafts] == ["fp32-draft-skip", "int8-dynamic-draft", "int4-draft"]
    for engine in manifest.engines:
        assert engine.kv_dtype == ("float16" if engine.role == "draft" else "float32")


def test_a_context_shorter_than_the_check_s_text_and_a_window_as_long_as_it_export(export: Export) -> None:
    bundle = open_bundle(export(context=8, verify=((1, 8), (4, 8)), prefill=64))
    assert bundle.target.context == 8
    assert bundle.target.capacity == 128


def test_a_window_wider_than_the_context_exports(export: Export) -> None:
    assert open_bundle(export(context=8, verify=((1, 16),), prefill=64)).target.context == 8


def test_every_engine_keeps_the_figures_of_its_check(export: Export) -> None:
    bundle = open_bundle(export(precisions=("fp32", "int4")))
    for engine in bundle.manifest.engines:
        assert engine.check is not None
        assert engine.check.tokens > 10
        if engine.precision == "fp32":
            assert engine.check.top1 == engine.check.agreement == 1.0
            assert engine.check.max_logit_diff < 1e-4

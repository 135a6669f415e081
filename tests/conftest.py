"""Tiny bundles, exported once a session by the product's own exporter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kvrelay
import pytest
import tiny
from hypothesis import settings
from kvrelay_export import check, exporter
from kvrelay_export.exporter import ExportOptions, export_bundle
from traces import traced_once
from transformers import PreTrainedModel, PreTrainedTokenizerFast

# No test may fail because the machine is busy.
settings.register_profile("kvrelay", deadline=None)
settings.load_profile("kvrelay")

THREADS = 2
CONTEXT = 256
PREFILL = 16
SKIPPED = "attention.1"

VERIFY = ((1, 2), (1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (4, 4), (4, 8), (4, 16))

ExportTiny = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the box's cache in a temporary folder, and set the thread count that the process then keeps."""
    cache = tmp_path_factory.mktemp("box-cache")
    before = os.environ.get("KVRELAY_CACHE")
    os.environ["KVRELAY_CACHE"] = str(cache)
    kvrelay.use_threads(THREADS)
    yield cache
    if before is None:
        del os.environ["KVRELAY_CACHE"]
    else:
        os.environ["KVRELAY_CACHE"] = before


@pytest.fixture(scope="session")
def export_tiny(tmp_path_factory: pytest.TempPathFactory) -> ExportTiny:
    """A factory: save a tiny model and export it; keywords of ``ExportOptions`` change what is exported.

    ``model`` is a family's name or a model; ``config`` changes a named family's config.
    """

    def export(
        model: str | PreTrainedModel = "llama",
        *,
        tokenizer: PreTrainedTokenizerFast | None = None,
        config: dict[str, Any] | None = None,
        **options: Any,
    ) -> Path:
        folder = tmp_path_factory.mktemp("tiny")
        built = tiny.build_model(model, **(config or {})) if isinstance(model, str) else model
        source = tiny.save_model(folder / "checkpoint", built, tokenizer)
        defaults = ExportOptions(
            source=str(source),
            output=folder / "bundle",
            name="tiny",
            precisions=("fp32",),
            drafts=(),
            verify=((1, 2), (1, 4), (1, 8), (1, 16)),
            prefill=PREFILL,
            context=CONTEXT,
        )
        return export_bundle(replace(defaults, **options))

    return export


@pytest.fixture(scope="session")
def llama_bundle(export_tiny: ExportTiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in fp32 and int4, with an int8-dynamic and a layer-skipping draft and two draft models.

    Draft model "cousin" has nearly the target's weights and more padded rows, which shout; "stranger" has other sizes.
    """
    folder = tmp_path_factory.mktemp("draft-models")
    tiny.save_model(folder / "cousin", tiny.cousin_of(tiny.target_model()))
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    tiny.save_model(folder / "stranger", tiny.build_model("llama", seed=7, **sizes))
    return export_tiny(
        tiny.target_model(),
        precisions=("fp32", "int4"),
        drafts=("int8-dynamic", "skip"),
        skip=(SKIPPED,),
        draft_models=(str(folder / "cousin"), str(folder / "stranger")),
    )


@pytest.fixture(scope="session")
def variants_bundle(export_tiny: ExportTiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama of ``llama_bundle`` with more padded rows, which shout, in fp32 and int8-dynamic.

    Its drafts int4 and skip keep their KV in float16; draft model "twin" has its weights and fewer padded rows.
    """
    twin = tiny.save_model(tmp_path_factory.mktemp("draft-models") / "twin", tiny.target_model())
    return export_tiny(
        tiny.cousin_of(tiny.target_model(), noise=0.0),
        precisions=("fp32", "int8-dynamic"),
        drafts=("int4", "skip"),
        skip=(SKIPPED,),
        draft_models=(str(twin),),
        draft_kv="float16",
        verify=((1, 2), (1, 4), (1, 8), (1, 16)),
    )


@pytest.fixture(scope="session")
def batch_bundle(export_tiny: ExportTiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama of ``llama_bundle`` with verify engines of one, two and four windows and draft model "cousin"."""
    cousin = tiny.save_model(tmp_path_factory.mktemp("draft-models") / "cousin", tiny.cousin_of(tiny.target_model()))
    return export_tiny(
        tiny.target_model(),
        precisions=("fp32", "int4"),
        drafts=("int8-dynamic", "skip"),
        skip=(SKIPPED,),
        draft_models=(str(cousin),),
        verify=VERIFY,
    )


@pytest.fixture(scope="session")
def tied_bundle(export_tiny: ExportTiny) -> Path:
    """A Llama in fp32 and int4 whose tokens often change between shape classes."""
    with pytest.MonkeyPatch.context() as patch:
        # The same near ties make it pick other tokens than torch does: only the logits can be compared.
        for precision in ("fp32", "int4"):
            patch.setitem(check.LIMITS, precision, replace(check.LIMITS[precision], top1=0.5))
        return export_tiny(tiny.tied_model(), precisions=("fp32", "int4"), verify=VERIFY)


@pytest.fixture(scope="session")
def export_dialects(export_tiny: ExportTiny) -> ExportTiny:
    """As ``export_tiny``, for several exports of one model: it is traced once."""

    def export(model: PreTrainedModel, **options: Any) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exporter, "trace", traced_once)
            return export_tiny(model, **options)

    return export


@pytest.fixture(scope="session")
def portable_bundles(export_dialects: ExportTiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The Llama of ``llama_bundle`` in `standard` and `decomposed`, with its layer-skipping draft and "cousin"."""
    cousin = tiny.save_model(tmp_path_factory.mktemp("draft-models") / "cousin", tiny.cousin_of(tiny.target_model()))
    precisions = {"standard": ("fp32", "fp16", "int4"), "decomposed": ("fp32", "fp16")}
    return {
        dialect: export_dialects(
            tiny.target_model(),
            dialect=dialect,
            precisions=names,
            drafts=("skip",),
            skip=(SKIPPED,),
            draft_models=(str(cousin),),
            verify=((1, 2), (1, 8), (4, 8)),
        )
        for dialect, names in precisions.items()
    }

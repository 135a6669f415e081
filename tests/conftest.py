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
import torch
from kvrelay_export.exporter import ExportOptions, export_bundle
from transformers import PreTrainedModel, PreTrainedTokenizerFast

THREADS = 2
CONTEXT = 256
PREFILL = 16
SKIPPED = "attention.2"

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
    """A 4-layer Llama in fp32 and int4, with an int8-dynamic and a layer-skipping draft and two draft models.

    Draft model "cousin" has nearly the target's weights and more padded rows, which shout; "stranger" has other sizes.
    """
    folder = tmp_path_factory.mktemp("draft-models")
    tiny.save_model(folder / "cousin", cousin_of(target_model()))
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    tiny.save_model(folder / "stranger", tiny.build_model("llama", seed=7, **sizes))
    return export_tiny(
        target_model(),
        precisions=("fp32", "int4"),
        drafts=("int8-dynamic", "skip"),
        skip=(SKIPPED,),
        draft_models=(str(folder / "cousin"), str(folder / "stranger")),
    )


@pytest.fixture(scope="session")
def variants_bundle(export_tiny: ExportTiny) -> Path:
    """A Llama in fp32 and int8-dynamic whose drafts, int4 and layer-skipping, keep their KV in float16."""
    return export_tiny(
        config={"num_hidden_layers": 4},
        precisions=("fp32", "int8-dynamic"),
        drafts=("int4", "skip"),
        skip=(SKIPPED,),
        draft_kv="float16",
        verify=((1, 2), (1, 4), (1, 16)),
    )


def target_model() -> PreTrainedModel:
    """The model behind ``llama_bundle``."""
    return tiny.build_model("llama", num_hidden_layers=4)


def cousin_of(model: PreTrainedModel, *, noise: float = 0.004, padded_vocab_size: int = 384) -> PreTrainedModel:
    """A copy with a little noise on its weights and a padded tail whose logits are the largest by far."""
    cousin = tiny.build_model("llama", num_hidden_layers=4, vocab_size=padded_vocab_size)
    generator = torch.Generator().manual_seed(1)
    state = model.state_dict()
    with torch.no_grad():
        for name, weight in cousin.state_dict().items():
            rows = state[name].shape[0]
            weight[:rows] = state[name] + noise * torch.randn(state[name].shape, generator=generator)
        # Loud whatever the hidden state is: one of a row and its negative is large.
        head = cousin.lm_head.weight
        head[tiny.PADDED_VOCAB_SIZE :] = 3.0 * torch.randn(head[tiny.PADDED_VOCAB_SIZE :].shape, generator=generator)
    return cousin

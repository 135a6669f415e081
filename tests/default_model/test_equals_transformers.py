"""Greedy text of the fp32 bundle is that of transformers, or parts from it at a near tie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvrelay
import pytest
import torch
from kvrelay.bundle import open_bundle
from kvrelay_export.source import load_checkpoint
from prompts import PROMPTS, chat


@pytest.fixture(scope="module")
def model() -> Any:
    return load_checkpoint("smollm2-135m-instruct").model


@pytest.mark.parametrize(
    ("prompts", "length"),
    [(PROMPTS[:2], 24), pytest.param(PROMPTS, 64, marks=pytest.mark.full)],
    ids=["2 prompts", "20 prompts"],
)
def test_greedy_equals_transformers(
    default_bundle: Path, model: Any, prompts: list[str], length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = open_bundle(default_bundle).manifest
    fp32 = [e for e in manifest.engines if e.precision == "fp32" and not e.skip]
    export_error = max(e.check.max_logit_diff for e in fp32 if e.check)
    pipe = kvrelay.Pipeline(default_bundle, draft="auto", precision="fp32")
    parted = 0
    for prompt in prompts:
        ids = pipe.encode(chat(prompt))
        ours = pipe.generate(ids, max_new_tokens=length).token_ids
        # Greedy text is what the model itself would choose at each position behind the same prefix: one pass over
        # prompt and answer asks for all of them, and the first other choice is where generation would part.
        with torch.no_grad():
            logits = model(torch.tensor([ids + ours])).logits[0, len(ids) - 1 : -1]
        theirs = logits.argmax(-1).tolist()
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if at is None:
            continue
        parted += 1
        margin = float(logits[at].max() - logits[at, ours[at]])
        assert margin < 2 * export_error, f"{prompt!r} parts at {at} with margin {margin}, allowed {2 * export_error}"
    with capsys.disabled():
        print(f"\n{len(prompts)} prompts x {length} tokens: {parted} part from transformers, each at a near tie")

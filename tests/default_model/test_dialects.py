"""`standard` and `decomposed` give the tokens of `ort` in float32, or part from them at a near tie.

Each engine's logits are within what its export measured of torch's. Where two engines choose different tokens behind
the same text, torch's own logits of those two tokens are therefore closer than twice the larger of the two errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kvrelay import Pipeline
from kvrelay.bundle import open_bundle
from kvrelay_export import check, exporter
from kvrelay_export.options import ExportOptions
from kvrelay_export.source import load_checkpoint
from prompts import PROMPTS, chat
from traces import traced_once

PORTABLE = ("standard", "decomposed")


def export_error(bundle: Path) -> float:
    """The largest difference of any logit from torch's that the export of the fp32 engines measured."""
    entries = [e for e in open_bundle(bundle).manifest.engines if e.precision == "fp32" and e.draft is None]
    return max(e.check.max_logit_diff for e in entries if e.check)


def parted_at_near_ties(
    model: Any, bundles: tuple[Path, Path], prompts: Sequence[Any], length: int
) -> list[tuple[int, int, float]]:
    """Generate greedily from both bundles; return prompt, position and margin of each near tie where they part."""
    pipes = [Pipeline(bundle, draft="none", precision="fp32") for bundle in bundles]
    allowed = 2 * max(map(export_error, bundles))
    parted = []
    for number, prompt in enumerate(prompts):
        ids = pipes[0].encode(prompt)
        ours, theirs = (pipe.generate(ids, max_new_tokens=length).token_ids for pipe in pipes)
        if ours == theirs:
            continue
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        with torch.no_grad():
            logits = model(torch.tensor([ids + ours[:at]])).logits[0, -1]
        margin = float((logits[ours[at]] - logits[theirs[at]]).abs())
        assert margin <= allowed, f"prompt {number} parts at {at} with margin {margin}, allowed {allowed}"
        parted.append((number, at, margin))
    return parted


@pytest.fixture(scope="module")
def tied_dialects(tied_bundle: Path, export_dialects: Callable[..., Path]) -> dict[str, Path]:
    """``tied_bundle``, whose tokens often hang on a rounding error, in every dialect."""
    with pytest.MonkeyPatch.context() as patch:
        # The same near ties make it pick other tokens than torch does: only the logits can be compared.
        patch.setitem(check.LIMITS, "fp32", replace(check.LIMITS["fp32"], top1=0.5))
        made = {d: export_dialects(tiny.tied_model(), dialect=d, verify=((1, 2), (1, 8))) for d in PORTABLE}
    return {"ort": tied_bundle, **made}


@pytest.mark.parametrize("dialect", PORTABLE)
def test_tiny_models_give_the_tokens_of_ort_or_part_at_near_ties(
    llama_bundle: Path, portable_bundles: dict[str, Path], tied_dialects: dict[str, Path], dialect: str
) -> None:
    prompts = [list(range(5 + n, 40 + 7 * n)) for n in range(6)]
    plain = parted_at_near_ties(tiny.target_model(), (llama_bundle, portable_bundles[dialect]), prompts, 40)
    assert plain == []
    tied = parted_at_near_ties(tiny.tied_model(), (tied_dialects["ort"], tied_dialects[dialect]), prompts, 40)
    assert tied, "a model of near ties parts, which proves that the comparison can see it"


@pytest.mark.full
@pytest.mark.parametrize("dialect", PORTABLE)
def test_the_default_model_gives_the_tokens_of_ort_or_parts_at_near_ties(
    default_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dialect: str,
) -> None:
    monkeypatch.setattr(exporter, "trace", traced_once)
    source = open_bundle(default_bundle).target.source
    options = ExportOptions(
        source,
        tmp_path / dialect,
        dialect=dialect,  # type: ignore[arg-type]
        precisions=("fp32",),
        drafts=(),
        verify=((1, 2), (1, 8)),
        context=1024,
    )
    bundle = exporter.export_bundle(options)
    model = load_checkpoint(source).model
    parted = parted_at_near_ties(model, (default_bundle, bundle), [chat(p) for p in PROMPTS], 64)
    with capsys.disabled():
        print(f"\n{dialect}: {len(PROMPTS)} prompts x 64 tokens, {len(parted)} part from ort at a near tie: {parted}")

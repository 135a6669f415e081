"""With exact=True the output depends neither on the draft nor on the window; with exact=False it does on int4."""

from __future__ import annotations

from pathlib import Path

import kvrelay
import pytest
from prompts import PROMPTS, chat

CHOSEN = [PROMPTS[0], PROMPTS[6], PROMPTS[14]]
SAMPLING = [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}]
LENGTH = 40
DRAFTS = ["ngram", "self", "int8-dynamic", "skip", "int4"]


def run(pipe: kvrelay.Pipeline, length: int) -> list[tuple[list[int], list[float]]]:
    results = [
        pipe.generate(chat(prompt), max_new_tokens=length, **sampling)  # type: ignore[arg-type]
        for prompt in CHOSEN
        for sampling in SAMPLING
    ]
    return [(r.token_ids, r.scores) for r in results]


@pytest.fixture(scope="module", params=["fp32", "int4"])
def reference(request: pytest.FixtureRequest, default_bundle: Path) -> tuple[str, list[tuple[list[int], list[float]]]]:
    pipe = kvrelay.Pipeline(default_bundle, draft="none", precision=request.param)
    return request.param, run(pipe, LENGTH)


@pytest.mark.full
@pytest.mark.parametrize("window", [2, 4, 8, 16, None])
@pytest.mark.parametrize("draft", [*DRAFTS, "auto"])
def test_every_draft_and_window_gives_the_reference(
    default_bundle: Path, reference: tuple[str, list[tuple[list[int], list[float]]]], draft: str, window: int | None
) -> None:
    precision, expected = reference
    if draft == precision:
        return  # int4 drafts for other targets
    pipe = kvrelay.Pipeline(default_bundle, draft=draft, window=window, precision=precision)
    assert run(pipe, LENGTH) == expected


@pytest.mark.parametrize("draft", ["ngram", "int8-dynamic", "skip"])
def test_int4_drafts_give_the_reference(default_bundle: Path, draft: str) -> None:
    expected = kvrelay.Pipeline(default_bundle, draft="none", precision="int4").generate(
        chat(PROMPTS[6]), max_new_tokens=40
    )
    found = kvrelay.Pipeline(default_bundle, draft=draft, window=8, precision="int4").generate(
        chat(PROMPTS[6]), max_new_tokens=40
    )
    assert (found.token_ids, found.scores) == (expected.token_ids, expected.scores)
    assert found.stats.windows > 0


@pytest.mark.full
def test_without_exact_int4_differs_which_proves_that_the_test_can_fail(
    default_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = kvrelay.Pipeline(default_bundle, draft="none", precision="int4")
    inexact = kvrelay.Pipeline(default_bundle, draft="none", precision="int4", exact=False)
    differ = sum(
        exact.generate(chat(p), max_new_tokens=64).token_ids != inexact.generate(chat(p), max_new_tokens=64).token_ids
        for p in PROMPTS
    )
    with capsys.disabled():
        print(f"\nint4, {len(PROMPTS)} prompts x 64 tokens: {differ} differ between exact=True and exact=False")
    assert differ > 0

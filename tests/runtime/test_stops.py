"""End tokens and stop strings end a request at the same place, wherever in a window they fall."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from kvrelay import Pipeline, Result
from rig import PROMPT, Scripted, assert_same, oracle, plain, scripted

WINDOW = 4


@pytest.fixture(scope="module")
def output(llama_bundle: Path) -> Result:
    return plain(llama_bundle).generate(PROMPT, max_new_tokens=60, ignore_eos=True)


def with_eos(pipe: Pipeline, *ids: int) -> Pipeline:
    pipe._intake._eos_ids = frozenset(ids)
    return pipe


def first_at(output: Result, low: int, modulo: int) -> int:
    """The first index from ``low`` on at this offset of a window whose token did not occur before."""
    ids = output.token_ids
    return next(i for i in range(low, len(ids)) if (i - 1) % WINDOW == modulo and ids[i] not in ids[:i])


def read(pipe: Pipeline, **settings: Any) -> tuple[list[str], Result, int]:
    """Pieces of the stream, its result, and how many KV entries are valid at its end."""
    events: list[dict[str, Any]] = []
    stream = pipe.stream(PROMPT, max_new_tokens=60, trace=events.append, **settings)
    pieces = list(stream)
    last = events[-1]["kv_length"]
    return pieces, stream.result, last["after_rollback"] if isinstance(last, dict) else last


# With every candidate right a window of 4 commits its three candidates and the bonus.
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_an_eos_at_any_place_of_a_window_ends_the_request_there(
    llama_bundle: Path, output: Result, offset: int
) -> None:
    at = first_at(output, 2, offset)
    eos = output.token_ids[at]
    wanted = with_eos(plain(llama_bundle), eos).generate(PROMPT, max_new_tokens=60)
    pipe = with_eos(scripted(llama_bundle, oracle([*PROMPT, *output.token_ids]), WINDOW), eos)
    pieces, found, kv_length = read(pipe)
    assert_same(found, wanted)
    assert found.token_ids == output.token_ids[: at + 1]
    assert found.finish_reason == "stop"
    assert "".join(pieces) == found.text == wanted.text
    assert kv_length == len(PROMPT) + len(found.token_ids) - 1


def test_a_first_token_that_is_eos_ends_the_request_after_prefill(llama_bundle: Path, output: Result) -> None:
    pipe = with_eos(scripted(llama_bundle, oracle([*PROMPT, *output.token_ids]), WINDOW), output.token_ids[0])
    pieces, found, kv_length = read(pipe)
    assert (pieces, found.token_ids, found.text, found.finish_reason) == ([], output.token_ids[:1], "", "stop")
    assert kv_length == len(PROMPT)


def test_an_eos_that_only_the_draft_wants_ends_nothing(llama_bundle: Path, output: Result) -> None:
    eos = next(t for t in range(4, 260) if t not in output.token_ids)
    drafter = Scripted([*PROMPT, *output.token_ids], iter(lambda: 1, None), wrong=lambda _: eos)
    pipe = with_eos(scripted(llama_bundle, drafter, WINDOW), eos)
    found = pipe.generate(PROMPT, max_new_tokens=60)
    assert found.token_ids == output.token_ids
    assert found.finish_reason == "length"


@pytest.mark.parametrize("draft", ["self", "cousin"])
def test_a_draft_engine_stops_drafting_after_an_eos(llama_bundle: Path, output: Result, draft: str) -> None:
    at = first_at(output, 20, 1)
    pipe = with_eos(Pipeline(llama_bundle, draft=draft, window=16), output.token_ids[at])
    wanted = with_eos(plain(llama_bundle), output.token_ids[at]).generate(PROMPT, max_new_tokens=60)
    found = pipe.generate(PROMPT, max_new_tokens=60)
    assert_same(found, wanted)
    if draft == "self":
        assert found.stats.proposed == found.stats.accepted > 0


def test_every_eos_of_the_bundle_ends_a_request(llama_bundle: Path, output: Result, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(llama_bundle, bundle)
    manifest = json.loads((bundle / "manifest.json").read_text())
    for at in (first_at(output, 5, 0), first_at(output, 9, 2)):
        manifest["generation"]["eos_ids"] = [1, output.token_ids[at]]
        (bundle / "manifest.json").write_text(json.dumps(manifest))
        found = Pipeline(bundle, draft="self", window=8).generate(PROMPT, max_new_tokens=60)
        assert found.token_ids == output.token_ids[: at + 1]


@pytest.mark.parametrize("window", [2, 4, 8, 16])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_stop_string_at_any_place_ends_the_text_before_it(
    llama_bundle: Path, output: Result, window: int, length: int
) -> None:
    full = output.text
    drafter = oracle([*PROMPT, *output.token_ids])
    pipe = scripted(llama_bundle, drafter, window)
    reference = plain(llama_bundle)
    places = [i for i in range(2, len(full) - length) if full.find(full[i : i + length]) == i]
    assert len(places) >= 5
    for at in places[:: len(places) // 5]:
        stop = full[at : at + length]
        wanted = reference.generate(PROMPT, max_new_tokens=60, ignore_eos=True, stop=[stop])
        pieces, found, kv_length = read(pipe, ignore_eos=True, stop=[stop])
        assert_same(found, wanted)
        assert found.text == full[:at]
        assert found.finish_reason == "stop"
        assert "".join(pieces) == found.text, "a piece once given is never taken back"
        assert kv_length == len(PROMPT) + len(found.token_ids) - 1


def test_of_two_stop_strings_the_one_earlier_in_the_text_wins(llama_bundle: Path, output: Result) -> None:
    full = output.text
    places = [i for i in range(2, len(full) - 3) if full.find(full[i : i + 3]) == i]
    early, late = places[3], places[4]
    pipe = scripted(llama_bundle, oracle([*PROMPT, *output.token_ids]), 16)
    found = pipe.generate(
        PROMPT, max_new_tokens=60, ignore_eos=True, stop=[full[late : late + 3], full[early : early + 3]]
    )
    assert found.text == full[:early]


def test_a_stop_string_that_is_part_of_a_token_cuts_the_token(llama_bundle: Path, output: Result) -> None:
    pipe = plain(llama_bundle)
    names = {i: f"<{i:x}>" for i in range(260)}
    pipe._intake.tokenizer = replace_decode(pipe, lambda ids: "".join(names[i] for i in ids))
    at = first_at(output, 10, 2)
    stop = names[output.token_ids[at]][1:]
    for window in (2, 8):
        drafting = scripted(llama_bundle, oracle([*PROMPT, *output.token_ids]), window)
        drafting._intake.tokenizer = pipe._intake.tokenizer
        pieces, found, _ = read(drafting, ignore_eos=True, stop=[stop])
        assert_same(found, pipe.generate(PROMPT, max_new_tokens=60, ignore_eos=True, stop=[stop]))
        assert found.text == "".join(names[i] for i in output.token_ids[:at]) + "<"
        assert "".join(pieces) == found.text


def replace_decode(pipe: Pipeline, decode: Any) -> Any:
    """The pipeline's tokenizer with another decoder: tokens of several characters."""

    class Named:
        encode = pipe._intake.tokenizer.encode

    named: Any = Named()
    named.decode = decode
    return named

"""``kvrelay replay``: an output comes again bit for bit, or what differs is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvrelay import Engine
from test_cli import assert_one_clear_line, kvrelay

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def receipt(llama_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sampled request's receipt, made while others were served."""
    path = tmp_path_factory.mktemp("receipt") / "receipt.json"
    with Engine(llama_bundle, max_batch=3, window=8, group=1, in_class=False) as engine:
        others = [engine.submit([9, 8, 7 + i], max_new_tokens=60, ignore_eos=True) for i in range(3)]
        wanted = engine.submit(
            "hello", deterministic=True, max_new_tokens=30, temperature=0.9, seed=11, ignore_eos=True, stop=["\x00"]
        )
        made = wanted.result(60).receipt
        for other in others:
            other.result(60)
    assert made is not None and made.tokens == 30
    made.save(path)
    return path


def edited(receipt: Path, folder: Path, edit: Edit) -> Path:
    data = json.loads(receipt.read_text())
    edit(data)
    file = folder / "edited.json"
    file.write_text(json.dumps(data))
    return file


def test_an_output_comes_again_bit_for_bit(receipt: Path) -> None:
    done = kvrelay("replay", receipt)
    assert (done.returncode, done.stdout) == (0, "reproduced, bit for bit: 30 tokens\n"), done.stderr


def test_a_bundle_that_moved_is_given_by_name(receipt: Path, llama_bundle: Path, tmp_path: Path) -> None:
    moved = edited(receipt, tmp_path, lambda r: r.update(bundle=str(tmp_path / "gone")))
    assert_one_clear_line(kvrelay("replay", moved), "gone", "not here", "--bundle FOLDER")
    copy = shutil.copytree(llama_bundle, tmp_path / "copy")
    done = kvrelay("replay", moved, "--bundle", copy)
    assert done.returncode == 0, done.stderr
    assert "reproduced, bit for bit" in done.stdout
    assert_one_clear_line(kvrelay("replay", receipt, "--bundle", tmp_path / "no"), "no bundle at", "does not exist")


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (lambda r: r.update(digest="0" * 63 + "1"), "digest of ids and scores: " + "0" * 63 + "1 in the receipt"),
        (lambda r: r.update(finish_reason="stop"), "finish reason: stop in the receipt, length here"),
        (lambda r: r["options"].update(seed=12), "digest of ids and scores"),
        (lambda r: r["prompt_ids"].append(40), "digest of ids and scores"),
        (lambda r: r["options"].update(max_new_tokens=29), "tokens: 30 in the receipt, 29 here"),
        (lambda r: r["conditions"].update(precision="int4"), "digest of ids and scores"),
    ],
)
def test_an_output_that_differs_is_told_and_ends_with_code_1(
    receipt: Path, tmp_path: Path, edit: Edit, word: str
) -> None:
    done = kvrelay("replay", edited(receipt, tmp_path, edit))
    assert done.returncode == 1, done.stderr
    assert word in done.stdout
    assert done.stdout.endswith("not reproduced\n")
    assert "bit for bit" not in done.stdout
    assert "Traceback" not in done.stderr


def test_every_condition_that_changed_is_listed_with_both_values(receipt: Path, tmp_path: Path) -> None:
    def edit(r: dict[str, Any]) -> None:
        conditions = r["conditions"]
        conditions["engines"]["fp32-step"] = "f" * 64
        conditions["engines"]["fp32-old"] = "e" * 64
        del conditions["engines"]["fp32-verify-1x2"]
        conditions.update(backend="onnxruntime 0.0", windows="aligned to 8", threads=1)

    file = edited(receipt, tmp_path, edit)
    here = json.loads(receipt.read_text())["conditions"]
    done = kvrelay("replay", file)
    assert done.returncode == 0, done.stdout + done.stderr
    step, verify = here["engines"]["fp32-step"], here["engines"]["fp32-verify-1x2"]
    assert done.stdout.splitlines() == [
        f"condition backend: onnxruntime 0.0 in the receipt, {here['backend']} here",
        f"condition engine fp32-old: {'e' * 64} in the receipt, absent here",
        f"condition engine fp32-step: {'f' * 64} in the receipt, {step} here",
        f"condition engine fp32-verify-1x2: absent in the receipt, {verify} here",
        "condition windows: aligned to 8 in the receipt, sliding here",
        "reproduced, bit for bit: 30 tokens",
    ]


def test_a_cancelled_output_is_compared_as_far_as_it_came(receipt: Path, tmp_path: Path) -> None:
    def edit(r: dict[str, Any]) -> None:
        r["finish_reason"] = "cancelled"
        r["options"]["max_new_tokens"] = 200

    done = kvrelay("replay", edited(receipt, tmp_path, edit))
    assert (done.returncode, done.stdout) == (0, "reproduced, bit for bit: 30 tokens before it was cancelled\n")
    nothing = edited(receipt, tmp_path, lambda r: r.update(tokens=0))
    assert_one_clear_line(kvrelay("replay", nothing), "before its first token")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda r: r.pop("digest"), ["digest", "required"]),
        (lambda r: r.update(digest="abc"), ["digest"]),
        (lambda r: r.update(schema_version=2), ["schema_version"]),
        (lambda r: r.update(tokens=-3, finish_reason="cancelled"), ["is not a receipt", "tokens"]),
        (lambda r: r.update(surprise=1), ["surprise"]),
        (lambda r: r["options"].update(exec="x"), ["options", "'exec' is unknown"]),
        (lambda r: r["options"].pop("seed"), ["options", "'seed' is missing"]),
        (lambda r: r["options"].update(temperature="hot"), ["temperature='hot'"]),
        (lambda r: r.update(prompt_ids=[10**6]), ["prompt[0] is 1000000"]),
        (lambda r: r.update(prompt_ids=["a"]), ["prompt_ids.0"]),
        (lambda r: r.update(window=7), ["window=7", "1x8"]),
        (lambda r: r.update(group=-1), ["group=-1"]),
        (lambda r: r["conditions"].update(threads=0), ["threads=0"]),
        (lambda r: r["conditions"].update(precision="fp64"), ["precision='fp64'", "fp32"]),
    ],
)
def test_a_receipt_that_was_tampered_with_is_one_line(
    receipt: Path, tmp_path: Path, edit: Edit, words: list[str]
) -> None:
    done = kvrelay("replay", edited(receipt, tmp_path, edit))
    assert_one_clear_line(done, *words)
    assert done.stdout == ""


def test_what_is_no_receipt_is_one_line(llama_bundle: Path, tmp_path: Path) -> None:
    assert_one_clear_line(kvrelay("replay", tmp_path / "none.json"), "none.json", "No such file")
    assert_one_clear_line(kvrelay("replay", tmp_path), "cannot be read")
    assert_one_clear_line(kvrelay("replay", llama_bundle / "manifest.json"), "is not a receipt")
    noise = tmp_path / "noise.json"
    noise.write_bytes(b"\xff\xfe{")
    assert_one_clear_line(kvrelay("replay", noise), "is not a receipt")

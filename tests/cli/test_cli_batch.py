"""``kvrelay batch``: every line is checked first, each request is a line when it ends, and an interrupt keeps those."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kvrelay import Engine, Result, read_receipt
from test_cli import assert_one_clear_line, kvrelay

GROUP = ("--group", 1, "--max-batch", 2)


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "requests.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def by_index(text: str) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in text.splitlines()]
    assert len({line["index"] for line in lines}) == len(lines)
    return {line["index"]: line for line in lines}


def alone(bundle: Path, prompt: Any, **options: Any) -> Result:
    with Engine(bundle, max_batch=1, group=1) as engine:
        return engine.submit(prompt, deterministic=True, **options).result(60)


def test_each_request_gives_the_line_that_the_api_gives(llama_bundle: Path, tmp_path: Path) -> None:
    sampled = {"temperature": 0.9, "seed": 2**64 - 1, "max_new_tokens": 12, "ignore_eos": True}
    chat = [{"role": "user", "content": "hi\u2028there"}]
    requests = write(
        tmp_path,
        {"prompt": "hello", "id": "a/b ü", "deterministic": True, "max_new_tokens": 20, "ignore_eos": True},
        "",
        json.dumps({"prompt": chat, "deterministic": True, **sampled}, ensure_ascii=False),
        {"prompt": [50, 60, 70], "id": 7, "max_new_tokens": 5, "ignore_eos": True},
    )
    receipts = tmp_path / "receipts"
    done = kvrelay("batch", llama_bundle, requests, *GROUP, "--receipts", receipts)
    assert done.returncode == 0, done.stderr
    lines = by_index(done.stdout)
    assert [lines[i]["id"] for i in range(3)] == ["a/b ü", None, 7]
    wanted = [
        alone(llama_bundle, "hello", max_new_tokens=20, ignore_eos=True),
        alone(llama_bundle, chat, **sampled),
    ]
    for index, result in enumerate(wanted):
        line = lines[index]
        assert (line["token_ids"], line["scores"]) == (result.token_ids, result.scores)
        assert (line["text"], line["finish_reason"]) == (result.text, result.finish_reason)
    assert lines[1]["seed"] == 2**64 - 1
    assert len(lines[2]["token_ids"]) == 5
    assert lines[0]["stats"]["prompt_tokens"] == 5
    assert {p.name for p in receipts.iterdir()} == {"0-a_b_.json", "1.json"}
    for index, name in ((0, "0-a_b_.json"), (1, "1.json")):
        receipt = read_receipt(receipts / name)
        assert wanted[index].receipt is not None
        assert receipt.digest == wanted[index].receipt.digest
    for row in ("3 finished", "batch fill", "replays", "rollbacks", "verify share", "KV moved"):
        assert row in done.stderr


def test_standard_input_chat_and_deterministic_for_all(llama_bundle: Path, tmp_path: Path) -> None:
    text = json.dumps({"prompt": "hello", "max_new_tokens": 6}) + "\n"
    chat = json.dumps({"prompt": [{"role": "user", "content": "hello"}], "max_new_tokens": 6})
    receipts = tmp_path / "made" / "receipts"
    options = (*GROUP, "--deterministic", "--quiet", "--receipts", receipts)
    done = kvrelay("batch", llama_bundle, "-", *options, "--chat", input=text + chat)
    assert done.returncode == 0, done.stderr
    lines = by_index(done.stdout)
    assert lines[0]["token_ids"] == lines[1]["token_ids"]
    assert len(list(receipts.iterdir())) == 2
    raw = kvrelay("batch", llama_bundle, "-", *options, input=text)
    assert (raw.returncode, raw.stderr) == (0, "")
    assert by_index(raw.stdout)[0]["stats"]["prompt_tokens"] < lines[0]["stats"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["line 2", "not JSON"]),
        ('{"prompt": "x", "id": NaN}', ["line 2", "not JSON", "NaN"]),
        ("[1]", ["line 2", "JSON object", "list"]),
        ("[" * 100_000, ["line 2", "not JSON"]),
        ("{}", ["line 2", "no prompt"]),
        ('{"prompt": "x", "max_tokens": 3}', ["line 2", "unknown key 'max_tokens'", "max_new_tokens"]),
        ('{"prompt": "x", "id": [1]}', ["line 2", "id is [1]"]),
        ('{"prompt": "x", "id": -1e999}', ["line 2", "id is -inf", "finite"]),
        ('{"prompt": "x", "id": 1, "id": 2}', ["line 2", "key 'id' is given more than once"]),
        ('{"prompt": [{"role": "user", "content": "a", "content": "b"}]}', ["line 2", "'content'", "more than once"]),
        ('{"prompt": 5}', ["line 2", "type int"]),
        ('{"prompt": [1, "a"]}', ["line 2", "prompt[1]"]),
        ('{"prompt": [100000]}', ["line 2", "prompt[0] is 100000"]),
        ('{"prompt": [{"role": "user"}]}', ["line 2", "messages[0]"]),
        ('{"prompt": "' + "x" * 300 + '"}', ["line 2", "300 tokens", "256"]),
        ('{"prompt": "x", "temperature": -1}', ["line 2", "temperature=-1"]),
        ('{"prompt": "x", "temperature": "hot"}', ["line 2", "temperature='hot'"]),
        ('{"prompt": "x", "max_new_tokens": 1.5}', ["line 2", "max_new_tokens=1.5"]),
        ('{"prompt": "x", "deterministic": "yes"}', ["line 2", "deterministic='yes'"]),
        ('{"prompt": "x", "stop": null}', ["line 2", "stop=None"]),
        ('{"prompt": "x", "stop": "\\ud800"}', ["line 2", "half of a character"]),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_run(
    llama_bundle: Path, tmp_path: Path, line: str, words: list[str]
) -> None:
    requests = write(tmp_path, {"prompt": "good"}, line)
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    done = kvrelay("batch", llama_bundle, requests, *GROUP, "--output", output)
    assert_one_clear_line(done, "requests.jsonl", *words)
    assert done.stdout == ""
    assert output.read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"requests.jsonl", "out.jsonl"}


def test_files_and_options_that_cannot_be_are_one_line(llama_bundle: Path, tmp_path: Path) -> None:
    good = write(tmp_path, {"prompt": "x"})

    def run(*args: object, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return kvrelay("batch", *args, **kwargs)

    assert_one_clear_line(run(llama_bundle, tmp_path / "none.jsonl"), "none.jsonl", "No such file")
    assert_one_clear_line(run(llama_bundle, tmp_path), "directory")
    assert_one_clear_line(run(llama_bundle, "-", input="\n \n"), "standard input", "no requests")
    assert_one_clear_line(run(tmp_path / "no-bundle", good), "no-bundle", "does not exist")
    assert_one_clear_line(run(llama_bundle, good), "group=4, window=16", "1x16")
    assert_one_clear_line(run(llama_bundle, good, *GROUP[:2], "--max-batch", 0), "max_batch=0")
    assert_one_clear_line(run(llama_bundle, good, *GROUP, "--draft", "nonsense"), "draft='nonsense'")
    assert_one_clear_line(run(llama_bundle, good, *GROUP, "--output", tmp_path), "--output", "folder")
    assert_one_clear_line(run(llama_bundle, good, *GROUP, "--output", tmp_path / "a" / "b"), "--output", "No such")
    assert_one_clear_line(run(llama_bundle, good, *GROUP, "--receipts", good), "--receipts", "exists")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    assert_one_clear_line(run(llama_bundle, tmp_path / "bytes.jsonl"), "line 1", "utf-8")


def test_a_lines_own_mark_is_checked_also_where_all_are_marked(llama_bundle: Path, tmp_path: Path) -> None:
    requests = write(tmp_path, {"prompt": "x"}, {"prompt": "x", "deterministic": "no"})
    done = kvrelay("batch", llama_bundle, requests, *GROUP, "--deterministic")
    assert_one_clear_line(done, "line 2", "deterministic='no': true or false")


def test_lines_for_a_closed_standard_output_are_refused_and_a_file_is_not(llama_bundle: Path, tmp_path: Path) -> None:
    requests, output = write(tmp_path, {"prompt": "x", "max_new_tokens": 2}), tmp_path / "out.jsonl"
    batch = ("batch", llama_bundle, requests, *GROUP)
    assert_one_clear_line(kvrelay(*batch, close_stdout=True), "standard output, which is closed", "--output FILE")
    done = kvrelay(*batch, "--output", output, close_stdout=True)
    assert done.returncode == 0, done.stderr
    assert set(by_index(output.read_text())) == {0}


def test_a_precision_that_cannot_be_deterministic_says_so_for_the_line(variants_bundle: Path, tmp_path: Path) -> None:
    requests = write(tmp_path, {"prompt": "x", "max_new_tokens": 3}, {"prompt": "x", "deterministic": True})
    options = (*GROUP, "--precision", "int8-dynamic")
    done = kvrelay("batch", variants_bundle, requests, *options)
    assert_one_clear_line(done, "line 2", "deterministic=True cannot be kept on this box")


def test_a_request_that_fails_is_a_line_and_the_others_finish(llama_bundle: Path, tmp_path: Path) -> None:
    code = (
        "import importlib; b = importlib.import_module('kvrelay.cli.batch')\n"
        "from functools import partial\n"
        "from kvrelay import Faults\n"
        "b.Engine = partial(b.Engine, in_class=False, faults=Faults(pads=1.0))\n"
        "from kvrelay.cli import main; main()\n"
    )
    plain = {"prompt": "x", "max_new_tokens": 7, "ignore_eos": True}  # a window of 6 has pads
    requests = write(tmp_path, {**plain, "deterministic": True, "id": "bad"}, *[plain] * 3)
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", code, "batch", llama_bundle, requests, *GROUP, "-o", output]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "3 finished, 1 failed" in done.stderr
    lines = by_index(output.read_text())
    assert set(lines) == {0, 1, 2, 3}
    assert lines[0]["id"] == "bad"
    assert "no memory" in lines[0]["error"]
    assert all(len(lines[i]["token_ids"]) == 7 and "error" not in lines[i] for i in (1, 2, 3))


def test_an_output_through_a_link_or_into_a_pipe_leaves_both_in_place(llama_bundle: Path, tmp_path: Path) -> None:
    requests = write(tmp_path, {"prompt": "x", "max_new_tokens": 3, "seed": 1})
    real, link, pipe = tmp_path / "real.jsonl", tmp_path / "link.jsonl", tmp_path / "pipe"
    real.write_text("old")
    link.symlink_to(real)
    os.mkfifo(pipe)
    options = ("batch", llama_bundle, requests, *GROUP, "--quiet", "--output")
    assert kvrelay(*options, link).returncode == 0
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    assert kvrelay(*options, pipe).returncode == 0
    assert link.is_symlink()
    assert pipe.is_fifo()
    piped = by_index(reader.communicate(timeout=60)[0])
    assert piped[0]["token_ids"] == by_index(real.read_text())[0]["token_ids"]


def test_a_reader_that_goes_away_gives_no_traceback(llama_bundle: Path, tmp_path: Path) -> None:
    requests = write(tmp_path, *[{"prompt": "x", "max_new_tokens": 100, "ignore_eos": True}] * 60)
    command = f"{sys.executable} -c 'from kvrelay.cli import main; main()' batch '{llama_bundle}' '{requests}'"
    done = subprocess.run(
        ["sh", "-c", f"{command} --group 1 | head -c 10"], capture_output=True, text=True, check=False, timeout=300
    )
    assert len(done.stdout) == 10
    assert "Traceback" not in done.stderr


def test_an_interrupt_keeps_the_lines_that_are_finished(llama_bundle: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    code = (
        "import importlib, time, kvrelay.batch_target as t\n"
        "b = importlib.import_module('kvrelay.cli.batch')\n"
        "from pathlib import Path\n"
        "run, line = t.BatchTarget.run, b._line\n"
        "t.BatchTarget.run = lambda *a: (time.sleep(0.02), run(*a))[1]\n"
        f"b._line = lambda end: (Path({str(first)!r}).touch(), line(end))[1]\n"
        "from kvrelay.cli import main; main()\n"
    )
    long = {"prompt": "x", "max_new_tokens": 200, "ignore_eos": True}
    requests = write(tmp_path, {"prompt": "x", "max_new_tokens": 2}, *[long] * 30)
    output, receipts = tmp_path / "out.jsonl", tmp_path / "receipts"
    command = [sys.executable, "-c", code, "batch", llama_bundle, requests, *GROUP, "--deterministic"]
    command += ["-o", output, "--receipts", receipts]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not first.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "cancelled" in err
    lines = by_index(output.read_text())
    assert 0 in lines
    assert len(lines) < 31
    assert all(line["finish_reason"] != "cancelled" for line in lines.values())
    assert len(list(receipts.iterdir())) == len(lines)
    assert {p.name for p in tmp_path.iterdir()} == {"first", "out.jsonl", "receipts", "requests.jsonl"}

"""The command line: what it prints, and that bad input is one line and exit code 2."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from kvrelay.cli.json_lines import json_lines_file


def kvrelay(*args: object, close_stdout: bool = False, **kwargs: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvrelay.cli import main; main()", *map(str, args)]
    if close_stdout:
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **kwargs)  # type: ignore[call-overload,no-any-return]


def assert_one_clear_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("kvrelay: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in lines[0]


def test_run_streams_the_text_that_the_api_gives(llama_bundle: Path) -> None:
    done = kvrelay(
        "run", llama_bundle, "hello", "-n", 12, "--threads", 2, "--draft", "ngram", "--ignore-eos", "--seed", 1
    )
    assert done.returncode == 0, done.stderr
    for row in ("acceptance", "tokens per verify", "plain decoding", "bytes copied"):
        assert row in done.stderr
    import kvrelay as api

    pipe = api.Pipeline(llama_bundle, draft="none", threads=2)
    expected = pipe.generate([{"role": "user", "content": "hello"}], max_new_tokens=12, ignore_eos=True)
    assert done.stdout == expected.text + "\n"


def test_raw_takes_the_prompt_as_it_is_and_a_dash_reads_standard_input(llama_bundle: Path) -> None:
    given = kvrelay("run", llama_bundle, "abc", "--raw", "-n", 5, "--quiet", "--ignore-eos")
    read = kvrelay("run", llama_bundle, "-", "--raw", "-n", 5, "--quiet", "--ignore-eos", input="abc")
    assert given.returncode == read.returncode == 0
    assert given.stdout == read.stdout
    assert given.stderr == ""


def test_the_trace_tells_every_window(llama_bundle: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    done = kvrelay(
        "run", llama_bundle, "hello hello hello", "-n", 20, "--draft", "self", "--window", 4, "--trace", trace
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    assert events[0]["pass"] == "prefill"
    length = events[0]["kv_length"]
    for event in events[1:]:
        kv = event["kv_length"]
        assert kv["before"] == length
        assert kv["after_rollback"] == length + len(event["committed"])
        assert event["committed"][: len(event["accepted"])] == event["accepted"]
        length = kv["after_rollback"]
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "-1"], ["temperature=-1.0", "0 (greedy)"]),
        (["--top-p", "0"], ["top_p=0.0"]),
        (["--top-k", "-1"], ["top_k=-1"]),
        (["--seed", "-3"], ["seed=-3"]),
        (["-n", "0"], ["max_new_tokens=0"]),
        (["--draft", "nonsense"], ["draft='nonsense'", "ngram", "skip"]),
        (["--window", "1"], ["window=1", "2, 4, 8, 16"]),
        (["--precision", "fp64"], ["precision='fp64'", "fp32", "int4"]),
        (["--threads", "0"], ["threads=0"]),
        (["--raw", "--system", "x"], ["--system", "--raw"]),
        (["--trace", "/nonexistent-folder/trace.jsonl"], ["--trace"]),
        (["--trace", "/tmp"], ["--trace /tmp", "folder"]),
    ],
)
def test_a_bad_option_is_one_line(llama_bundle: Path, options: list[str], words: list[str]) -> None:
    assert_one_clear_line(kvrelay("run", llama_bundle, "x", *options), *words)


def test_a_trace_through_a_link_or_into_a_pipe_leaves_both_in_place(llama_bundle: Path, tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real.jsonl", tmp_path / "link.jsonl", tmp_path / "pipe"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    os.mkfifo(pipe)
    options = ("run", llama_bundle, "hello", "-n", 3, "--ignore-eos", "--draft", "none")
    assert kvrelay(*options, "--trace", link).returncode == 0
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    assert kvrelay(*options, "--trace", pipe).returncode == 0
    assert link.is_symlink()
    assert pipe.is_fifo()
    assert real.stat().st_mode & 0o777 == 0o600
    assert reader.communicate(timeout=60)[0] == real.read_text()
    assert len(real.read_text().splitlines()) == 3


def test_a_new_file_is_readable_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with json_lines_file("--trace", tmp_path / "new.jsonl") as write:
            write({})
    finally:
        os.umask(before)
    assert (tmp_path / "new.jsonl").stat().st_mode & 0o777 == 0o640


def test_input_that_is_no_text_is_one_line(llama_bundle: Path) -> None:
    bad = b"a\xff"
    for errors in ("strict", "surrogateescape"):
        environment = {**os.environ, "PYTHONIOENCODING": f"utf-8:{errors}"}
        for command in (("run", llama_bundle, "-"), ("chat", llama_bundle)):
            code = [sys.executable, "-c", "from kvrelay.cli import main; main()", *map(str, command)]
            done = subprocess.run(code, input=bad, capture_output=True, check=False, timeout=300, env=environment)
            assert done.returncode == 2, done.stderr
            assert b"Traceback" not in done.stderr
            assert b"kvrelay: " in done.stderr
    assert_one_clear_line(kvrelay("run", llama_bundle, os.fsdecode(bad)), "character", "not UTF-8")


def test_closed_and_full_and_narrow_streams_give_no_traceback(llama_bundle: Path) -> None:
    main = f"{sys.executable} -c 'from kvrelay.cli import main; main()'"

    def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", line],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env={**os.environ, **environment},
        )

    run = f"{main} run '{llama_bundle}' hello -n 20 -q --ignore-eos"
    assert_one_clear_line(shell(f"{run} > /dev/full"), "No space left")
    assert_one_clear_line(shell(f"{main} run '{llama_bundle}' - <&-"), "standard input", "closed")
    assert "Traceback" not in shell(f"{main} chat '{llama_bundle}' <&-").stderr
    narrow = shell(run, PYTHONIOENCODING="ascii")
    assert narrow.returncode == 0, narrow.stderr
    assert len(narrow.stdout) > 5


@pytest.mark.parametrize(
    "arguments",
    ["run BUNDLE hello", "chat BUNDLE", "replay receipt.json", "check", "inspect BUNDLE --json", "bench BUNDLE"],
)
def test_a_closed_standard_output_is_one_line(llama_bundle: Path, arguments: str) -> None:
    args = [str(llama_bundle) if word == "BUNDLE" else word for word in arguments.split()]
    assert_one_clear_line(kvrelay(*args, close_stdout=True, input="hello"), "standard output, which is closed: open it")


def test_a_prompt_longer_than_the_context_names_both(llama_bundle: Path) -> None:
    assert_one_clear_line(kvrelay("run", llama_bundle, "x" * 300, "--raw"), "300 tokens", "256", "--context")


def test_a_damaged_bundle_is_one_line(llama_bundle: Path, tmp_path: Path) -> None:
    assert_one_clear_line(kvrelay("run", tmp_path / "none", "x"), "does not exist", "kvrelay export")
    copy = Path(shutil.copytree(llama_bundle, tmp_path / "copy"))
    engine = copy / "fp32-verify-1x4.onnx"
    engine.write_bytes(engine.read_bytes()[:-100])
    assert_one_clear_line(kvrelay("inspect", copy), "fp32-verify-1x4.onnx", "bytes")
    engine.unlink()
    assert_one_clear_line(kvrelay("run", copy, "x"), "fp32-verify-1x4.onnx", "missing")


def test_inspect_shows_engines_shapes_hashes_and_kv_bytes(llama_bundle: Path) -> None:
    done = kvrelay("inspect", llama_bundle, "--context", 100, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    for word in ("fp32-verify-1x8", "[1, 8]", "[B, S]", "int8-dynamic", "shared by all engines", "KV float32"):
        assert word in done.stdout
    manifest = json.loads(kvrelay("inspect", llama_bundle, "--json").stdout)
    model = manifest["models"][manifest["target"]]
    kv = 2 * model["layers"] * model["kv_heads"] * model["head_dim"] * 4 * 100
    assert f"{kv:,} bytes for 100 tokens" in done.stdout
    assert_one_clear_line(kvrelay("inspect", llama_bundle, "--context", 0), "--context 0")


def test_bench_compares_plain_decoding_with_each_draft(llama_bundle: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"a": "hello", "b": [{"role": "user", "content": "bye"}]}))
    options = ["--prompts", prompts, "--rounds", 1, "-n", 10, "--drafts", "ngram,skip", "--sampled", "--json"]
    done = kvrelay("bench", llama_bundle, *options)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    cases = {r["case"] for r in rows}
    assert cases == {"none", "none, not exact", "ngram", "skip", "none, sampled", "ngram, sampled", "skip, sampled"}
    assert {r["prompt"] for r in rows} == {"a", "b"}
    assert all(r["tokens_per_second"] > 0 for r in rows)
    assert_one_clear_line(kvrelay("bench", llama_bundle, *options, "-n", 1), "--max-new-tokens 1")
    again = kvrelay("bench", llama_bundle, *options, "--drafts", "none,ngram, ngram")
    assert again.returncode == 0, again.stderr
    assert {r["case"] for r in json.loads(again.stdout)["rows"]} == {c for c in cases if "skip" not in c}
    prompts.write_text(json.dumps({"a": "hello", "long": "x" * (255 - 3)}))
    assert_one_clear_line(kvrelay("bench", llama_bundle, *options), "'long' has 255 tokens", "shorten it")
    prompts.write_text(json.dumps({"a": "hello", "longer": "x" * 300}))
    assert_one_clear_line(kvrelay("bench", llama_bundle, *options), "'longer'", "303 tokens", "256")
    prompts.write_text("{}")
    assert_one_clear_line(kvrelay("bench", llama_bundle, *options), "at least one prompt")
    prompts.write_text("[1]")
    assert_one_clear_line(kvrelay("bench", llama_bundle, *options), "--prompts")


def test_bench_without_exactness_measures_a_precision_that_has_none(variants_bundle: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text('{"a": "hello"}')
    options = ["--precision", "int8-dynamic", "--prompts", prompts, "--rounds", 1, "-n", 4, "--drafts", "ngram"]
    assert_one_clear_line(kvrelay("bench", variants_bundle, *options), "int8-dynamic")
    done = kvrelay("bench", variants_bundle, *options, "--no-exact", "--json")
    assert done.returncode == 0, done.stderr
    assert {r["case"] for r in json.loads(done.stdout)["rows"]} == {"none, not exact", "ngram"}


def test_the_version_is_printed() -> None:
    done = kvrelay("--version")
    assert (done.returncode, done.stdout) == (0, f"{version('kvrelay')}\n")


def test_chat_reuses_earlier_turns_and_ends_at_an_empty_line(llama_bundle: Path) -> None:
    done = kvrelay("chat", llama_bundle, "-n", 6, input="hi\nmore\n\n")
    assert done.returncode == 0, done.stderr
    reused = [int(n) for n in re.findall(r"(\d+) of \d+ prompt tokens reused", done.stderr)]
    assert reused[0] == 0
    assert reused[1] > 0


def test_interrupt_ends_with_the_text_so_far(llama_bundle: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    code = (
        "import time, kvrelay.cli.run as r, kvrelay.pipeline as p\n"
        "step = p.generate\n"
        "def slow(*a):\n"
        "    for piece in step(*a):\n"
        "        time.sleep(0.05); yield piece\n"
        "p.generate = slow\n"
        "from kvrelay.cli import main; main()\n"
    )
    command = [sys.executable, "-c", code, "run", str(llama_bundle), "hello", "-n", "200", "--draft", "none"]
    process = subprocess.Popen(
        [*command, "--ignore-eos", "--trace", str(trace)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "cancelled" in err
    assert "Traceback" not in err
    assert out.endswith("\n")
    assert 1 < len(trace.read_text().splitlines()) < 200


@pytest.mark.parametrize("module", ["numpy", "kvrelay.cli.run"])
def test_an_interrupt_of_the_start_is_one_line(module: str) -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from kvrelay_command import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 130
    assert done.stderr == "kvrelay: interrupted\n"


def test_export_reports_bad_input_in_one_line(tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert_one_clear_line(kvrelay("export", tmp_path / "nothing", "-o", output), "no model at")
    assert_one_clear_line(kvrelay("export", tmp_path, "-o", output), "config.json")
    assert_one_clear_line(kvrelay("export", "--verify", "8", "-o", output), "--verify", "GROUPxWINDOW")
    assert_one_clear_line(kvrelay("export", "--precisions", "fp8", "-o", output), "fp8", "int4")
    assert not output.exists()


def test_without_a_backend_the_first_use_says_which_extra_to_install(llama_bundle: Path) -> None:
    code = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "import kvrelay\n"
        "try: kvrelay.Pipeline(sys.argv[1])\n"
        "except kvrelay.BackendMissingError as e: print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(llama_bundle)], capture_output=True, text=True, check=False, timeout=60
    )
    assert "kvrelay[cpu]" in done.stdout, done.stderr

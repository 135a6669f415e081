"""The README's C++ program, made from an installed wheel in an empty folder, and what the facade costs."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import kvrelay
import pytest
from cpp_building import ROOT, build, environment, require_tools

PROMPT = "Why is the sky blue?"


def readme_block(language: str) -> str:
    """The block of ``language`` in the README's chapter on C++."""
    (chapter,) = re.findall(r"^## C\+\+\n(.*?)^## ", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", chapter, re.MULTILINE | re.DOTALL)
    return str(block)


@pytest.fixture(scope="module")
def project(wheel_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The README's project, built beside the tests' probe."""
    require_tools()
    folder = tmp_path_factory.mktemp("project")
    lines = readme_block("cmake") + "add_executable(probe probe.cpp)\ntarget_link_libraries(probe kvrelay::kvrelay)\n"
    (folder / "CMakeLists.txt").write_text(lines)
    (folder / "hello.cpp").write_text(readme_block("cpp"))
    shutil.copy(ROOT / "tests" / "cpp" / "probe.cpp", folder)
    return build(folder, folder / "build", wheel_python, "-DCMAKE_BUILD_TYPE=Release")


def probe(project: Path, bundle: Path, *arguments: str) -> list[dict[str, list[str]]]:
    """Run the probe and return, for each run, what it printed under each name."""
    done = subprocess.run(
        [str(project / "probe"), str(bundle), *arguments],
        input=PROMPT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    runs: list[dict[str, list[str]]] = []
    name = ""
    for line in done.stdout.split("\n"):
        first, _, rest = line.partition(" ")
        if first == "run":
            runs.append({})
        elif not re.fullmatch("[a-z_]+", first) and name == "text":  # the text goes on
            runs[-1]["text"][-1] += f"\n{line}"
            continue
        elif first:
            runs[-1].setdefault(first, []).append(rest)
        name = first
    return runs


def test_the_readme_program_streams_what_python_generates(project: Path, default_bundle: Path) -> None:
    pipe = kvrelay.Pipeline(default_bundle, threads=2)
    wanted = pipe.generate([{"role": "user", "content": PROMPT}])
    done = subprocess.run(
        [str(project / "hello"), str(default_bundle)],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.rstrip("\n") == wanted.text.rstrip("\n")
    assert f"{len(wanted.token_ids)} tokens" in done.stderr


@pytest.mark.parametrize(("draft", "temperature"), [("none", 0.0), ("auto", 0.0), ("ngram", 0.8)])
def test_ids_scores_and_statistics_equal_pythons(
    project: Path, default_bundle: Path, draft: str, temperature: float
) -> None:
    pipe = kvrelay.Pipeline(default_bundle, precision="int4", draft=draft, threads=2)
    options = {"max_new_tokens": 48, "temperature": temperature, "seed": 7}
    wanted = pipe.generate([{"role": "user", "content": PROMPT}], **options)  # type: ignore[arg-type]
    (found,) = probe(project, default_bundle, "int4", draft, "48", str(temperature), "1")
    tokens = [line.split() for line in found["token"]]
    assert [int(token) for token, _ in tokens] == wanted.token_ids
    assert [float.fromhex(score) for _, score in tokens] == wanted.scores
    stats = wanted.stats
    fields = {f.name for f in dataclasses.fields(stats)}
    derived = {name for name, value in vars(type(stats)).items() if isinstance(value, property)}
    printed = set(found) - {"token", "text", "facade_us_per_token", "facade_percent", "pieces"}
    assert printed == fields | derived
    for name in printed:
        value = getattr(stats, name)
        if isinstance(value, int):
            assert int(found[name][0]) == value, name
        elif isinstance(value, str) or value is None:
            assert found[name][0] == str(value), name
        elif name in ("acceptance", "tokens_per_verify", "plain_ms"):  # floats that are no times of this run
            assert float.fromhex(found[name][0]) == value, name
        else:
            assert float.fromhex(found[name][0]) >= 0, name


@pytest.mark.full
def test_the_facade_takes_under_one_per_cent_and_under_twenty_microseconds_a_token(
    project: Path, default_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own clocks say so; the best of several runs, since another process can hold any of them up."""
    runs = probe(project, default_bundle, "int4", "none", "128", "0", "8")
    per_token = [float(run["facade_us_per_token"][0]) for run in runs]
    per_cent = [float(run["facade_percent"][0]) for run in runs]
    with capsys.disabled():
        print(f"\nfacade, 128 tokens, int4: {sorted(per_token)} us a token, {sorted(per_cent)} % of the generation")
    assert min(per_token) < 20
    assert min(per_cent) < 1

"""What the CMake package and the headers say agrees with the Python side."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import kvrelay
import pytest
from cpp_building import ROOT, cmake_dir, environment, require_tools
from kvrelay import errors
from kvrelay.pipeline import GenerationOptions

HEADERS = ROOT / "runtime" / "cpp" / "include" / "kvrelay"
# How the facade takes them: by other means than a visited field.
APART = {"self", "bundle", "prompt", "progress", "trace", "deterministic"}


def visited(header: str, struct: str) -> list[str]:
    """Names that a struct's ``visit`` passes on."""
    text = (HEADERS / header).read_text()
    (body,) = re.findall(rf"^struct {struct} {{\n(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    return re.findall(r'visit\("(\w+)", \w+\.(?=\1\))', body)


@pytest.mark.parametrize(
    ("struct", "names"),
    [
        ("Options", list(inspect.signature(kvrelay.Engine.submit).parameters)),
        ("Options", list(GenerationOptions.__annotations__)),
        ("PipelineOptions", list(inspect.signature(kvrelay.Pipeline).parameters)),
        ("EngineOptions", list(inspect.signature(kvrelay.Engine).parameters)),
        ("Faults", [f.name for f in fields(kvrelay.Faults)]),
    ],
)
def test_every_option_of_python_is_one_of_cpp(struct: str, names: list[str]) -> None:
    assert set(visited("options.hpp", struct)) == set(names) - APART


@pytest.mark.parametrize("struct", ["Stats", "EngineStats"])
def test_every_statistic_of_python_is_one_of_cpp(struct: str) -> None:
    python = getattr(kvrelay, struct)
    derived = {name for name, value in vars(python).items() if isinstance(value, property)}
    assert set(visited("stats.hpp", struct)) == {f.name for f in fields(python)} | derived


def test_every_error_of_python_has_a_kind() -> None:
    known = set(re.findall(r'{"(\w+)", ErrorKind::', (HEADERS / "detail" / "call.hpp").read_text()))
    named = {name for name in errors.__all__ if "Error" in name}
    assert known == named | {"TimeoutError"}


def test_the_cmake_package_has_the_version_of_the_distribution() -> None:
    text = (ROOT / "runtime" / "cpp" / "cmake" / "kvrelayConfigVersion.cmake").read_text()
    assert f'set(PACKAGE_VERSION "{version("kvrelay")}")' in text


def configure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Configure a project that wants kvrelay; CMake says what is missing."""
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(p CXX)\nfind_package(kvrelay REQUIRED)\n"
    )
    return subprocess.run(
        ["cmake", "-S", str(folder), "-B", str(folder / "build"), *options],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_cmake_says_which_environment_it_looked_in_and_what_to_install(tmp_path: Path) -> None:
    require_tools()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty")], check=True, timeout=60)
    python = tmp_path / "empty" / "bin" / "python"
    done = configure(tmp_path, f"-Dkvrelay_DIR={cmake_dir(Path(sys.executable))}", f"-DPython_EXECUTABLE={python}")
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert f"{python} lacks kvrelay[cpp]: {python} -m pip install 'kvrelay[cpp]'" in said


def test_the_module_wants_to_be_asked_for_the_folder() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvrelay.cpp"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--cmake-dir" in done.stderr
    assert (Path(cmake_dir(Path(sys.executable))) / "kvrelayConfig.cmake").is_file()


def test_what_is_missing_is_named_in_one_line_with_how_to_get_it(tmp_path: Path) -> None:
    script = ROOT / "runtime" / "cpp" / "prerequisites.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(PATH=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    for part in ("a C++17 compiler (apt install g++)", "CMake (apt install cmake", "make (apt install make"):
        assert part in done.stderr

"""Runs the in-process C++ suite, a process for each of its files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cpp_building import environment

FILES = ("api", "callbacks", "lifetime", "memory", "threads")


def run_suite(
    programs: Path, bundle: Path, reference: Path, file: str, *, repeats: int, generations: int, seconds: int
) -> str:
    """Run the cases of one file and return what it printed; each repeat of a case has 20 seconds by itself."""
    done = subprocess.run(
        [str(programs / "suite"), f"--source-file=*test_{file}.cpp", "--no-version=true"],
        env=environment(
            KVRELAY_TEST_BUNDLE=str(bundle),
            KVRELAY_TEST_REFERENCE=str(reference),
            KVRELAY_TEST_REPEATS=str(repeats),
            KVRELAY_TEST_GENERATIONS=str(generations),
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "test cases: 0 |" not in done.stdout
    return done.stdout


@pytest.mark.parametrize("file", FILES)
def test_the_suite_passes(programs: Path, cpp_bundle: Path, reference_file: Path, file: str) -> None:
    run_suite(programs, cpp_bundle, reference_file, file, repeats=3, generations=500, seconds=300)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", FILES)
def test_the_suite_passes_with_fifty_repeats_and_ten_thousand_generations(
    programs: Path, cpp_bundle: Path, reference_file: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run_suite(programs, cpp_bundle, reference_file, file, repeats=50, generations=10_000, seconds=3500)
    with capsys.disabled():
        print(f"\n{printed}")

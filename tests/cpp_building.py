"""Builds C++ programs against a Python environment's kvrelay, with its own CMake package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PREREQUISITES = ROOT / "runtime" / "cpp" / "prerequisites.py"


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without what would lead another Python astray, and with ``variables``."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | variables


def require_tools() -> None:
    """Skip the test where C++ cannot be built, with what to install; CI must have it."""
    done = subprocess.run([sys.executable, str(PREREQUISITES)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(done.stderr.strip())


def run(command: list[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a build step; its output is the failure's message."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, env=environment(), timeout=600,
        **options,  # type: ignore[call-overload]
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def cmake_dir(python: Path) -> str:
    """What ``python -m kvrelay.cpp --cmake-dir`` prints."""
    return run([python, "-m", "kvrelay.cpp", "--cmake-dir"]).stdout.strip()


def build(source: Path, folder: Path, python: Path, *options: str) -> Path:
    """Configure and build ``source`` in ``folder`` with the kvrelay of ``python``; return ``folder``."""
    run(["cmake", "-S", source, "-B", folder, f"-DPython_EXECUTABLE={python}", f"-Dkvrelay_DIR={cmake_dir(python)}",
         *options])  # fmt: skip
    run(["cmake", "--build", folder, "--parallel", str(len(os.sched_getaffinity(0)))])
    return folder

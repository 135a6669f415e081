"""Says in one line what has to be installed before C++ programs can be built with this Python; exit code 2 then."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path


def compiles(compiler: str, source: str) -> bool:
    """Whether ``compiler`` takes a C++17 source text."""
    done = subprocess.run(
        [compiler, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"], input=source, capture_output=True, text=True
    )
    return done.returncode == 0


def missing() -> list[str]:
    """Return what is missing, each with how to get it."""
    wanted = []
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None or not compiles(compiler, "#include <filesystem>"):
        wanted.append("a C++17 compiler (apt install g++)")
    elif not compiles(compiler, "#include <doctest/doctest.h>"):
        wanted.append("doctest for the tests (apt install doctest-dev)")
    if shutil.which("cmake") is None:
        wanted.append("CMake (apt install cmake, or pip install cmake)")
    if shutil.which("make") is None and shutil.which("ninja") is None:
        wanted.append("make (apt install make, or pip install ninja)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        wanted.append("the headers of this Python (apt install python3-dev)")
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        wanted.append("a Python with a shared libpython (Debian's python3-dev, or pyenv's with --enable-shared)")
    try:
        import pybind11  # noqa: F401
    except ImportError:
        wanted.append("pybind11 (pip install 'kvrelay[cpp]')")
    return wanted


if __name__ == "__main__":
    if wanted := missing():
        print(f"building C++ with {sys.executable} needs {'; '.join(wanted)}", file=sys.stderr)
        sys.exit(2)

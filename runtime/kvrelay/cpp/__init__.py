"""The C++ facade: where its headers and CMake package are. ``runtime/cpp`` in the repository is what they are."""

from __future__ import annotations

from pathlib import Path

__all__ = ["cmake_directory"]


def cmake_directory() -> Path:
    """Return the folder of kvrelayConfig.cmake: beside this file in a wheel, in ``runtime/cpp`` in a checkout."""
    here = Path(__file__).resolve().parent
    installed = here / "cmake"
    return installed if installed.is_dir() else here.parents[1] / "cpp" / "cmake"

"""``python -m kvrelay.cpp --cmake-dir``: what to give to CMake as ``kvrelay_DIR``."""

from __future__ import annotations

import argparse

from . import cmake_directory


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m kvrelay.cpp", description="The C++ facade of kvrelay.")
    parser.add_argument("--cmake-dir", action="store_true", required=True, help="print the CMake package's folder")
    parser.parse_args()
    print(cmake_directory())


if __name__ == "__main__":
    main()

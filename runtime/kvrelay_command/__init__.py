"""The program ``kvrelay``.

Outside the package: importing that takes most of a second, in which Ctrl-C is to end the program like any other time.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line (see :mod:`kvrelay.cli`)."""
    try:
        from kvrelay.cli import main as run

        run()
    except KeyboardInterrupt:
        print("kvrelay: interrupted", file=sys.stderr)
        sys.exit(130)

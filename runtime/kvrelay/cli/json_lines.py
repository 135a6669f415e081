"""Files of JSON lines that take their name when they are whole."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import ParameterError

__all__ = ["json_lines_file"]


@contextlib.contextmanager
def json_lines_file(option: str, path: Path) -> Iterator[Callable[[Any], None]]:
    """Collect lines in a temporary file that takes the name ``path`` at the end; an error leaves ``path`` as it was.

    Args:
        option: the command line option that named the file, for errors.
        path: the file.

    Yields:
        A function that writes one value as a line.

    Raises:
        ParameterError: the file cannot be made there.
    """
    if path.is_dir():
        raise ParameterError(f"{option} {path}: a folder; give the name of a file")
    path = path.resolve()  # a link stays, and what it points to is replaced
    if path.exists() and not path.is_file():
        # A device or a pipe is written to: to rename a file over /dev/null would take it from everybody.
        with open(path, "w", encoding="utf-8") as handle:
            yield lambda value: print(json.dumps(value, allow_nan=False), file=handle, flush=True)
        return
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
    except OSError as error:
        raise ParameterError(f"{option} {path}: {error.strerror or error}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            yield lambda value: print(json.dumps(value, allow_nan=False), file=handle)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0o077)  # there is no way to read it but to set it
    os.umask(mask)
    return mask

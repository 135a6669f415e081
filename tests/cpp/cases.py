"""Python's results for the cases that the C++ suite makes; ``helpers.hpp`` has the same formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvrelay import Pipeline

CASES = 12


def case_prompt(i: int) -> list[int]:
    """Prompt of case ``i``."""
    return [(i * 37 + j * 11) % 250 + 4 for j in range(2 + i % 9)]


def case_options(i: int) -> dict[str, Any]:
    """Options of case ``i``."""
    return {"max_new_tokens": 16, "temperature": 0.8 * (i % 2), "seed": i}


def write_reference(bundle: Path, file: Path) -> None:
    """Generate every case and write a line of ids and a line of scores, as hexadecimal floats, for each."""
    pipe = Pipeline(bundle, draft="none")
    lines = []
    for i in range(CASES):
        result = pipe.generate(case_prompt(i), **case_options(i))
        lines.append(" ".join(map(str, result.token_ids)))
        lines.append(" ".join(score.hex() for score in result.scores))
    file.write_text("\n".join(lines) + "\n", encoding="ascii")

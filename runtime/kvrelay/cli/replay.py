"""``kvrelay replay``: make a deterministic output again from its receipt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import ParameterError
from ..intake import Result
from ..receipt import Conditions, Receipt, output_digest, read_receipt
from ..serving import Engine
from . import options as o

__all__ = ["replay"]


def replay(
    receipt: Annotated[Path, typer.Argument(help="Receipt, as `kvrelay batch --receipts` writes it.")],
    bundle: Annotated[Path | None, typer.Option(help="Bundle folder; default: the receipt's.")] = None,
) -> None:
    """Run a receipt's request again and compare the output bit for bit; exit code 1 if it differs."""
    o.require_output()
    wanted = read_receipt(receipt)
    folder = bundle or Path(wanted.bundle)
    if bundle is None and not folder.is_dir():
        raise ParameterError(f"the receipt's bundle {folder} is not here: say where it is with --bundle FOLDER")
    if not wanted.tokens:
        raise ParameterError(f"{receipt} is of a request that ended before its first token: nothing to compare")
    cut = wanted.finish_reason == "cancelled"
    backend = wanted.conditions.backend.partition(" ")[0]
    ort = backend == "onnxruntime"
    request = {**wanted.options, **({"max_new_tokens": wanted.tokens} if cut else {})}
    with (
        o.opening(folder, Console(stderr=True)) as progress,
        Engine(
            folder,
            max_batch=1,
            precision=wanted.conditions.precision,
            threads=wanted.conditions.threads if ort else None,
            backend=backend,
            provider=wanted.conditions.provider if ort else None,
            window=wanted.window,
            group=wanted.group,
            progress=progress,
        ) as engine,
    ):
        conditions = engine.conditions
        result = engine.submit(wanted.prompt_ids, deterministic=True, **request).result()
    for line in _changed_conditions(wanted.conditions, conditions):
        print(line)
    differences = _differences(wanted, result, cut=cut)
    if differences:
        print(*differences, sep="\n")
        print("not reproduced")
        raise typer.Exit(1)
    print(f"reproduced, bit for bit: {wanted.tokens} tokens" + (" before it was cancelled" if cut else ""))


def _changed_conditions(receipt: Conditions, here: Conditions) -> list[str]:
    """Return a line for each condition that is another one here; engines one by one."""

    def line(name: str, then: Any, now: Any) -> str:
        return f"condition {name}: {then} in the receipt, {now} here"

    found = []
    for name, (then, now) in receipt.differences(here).items():
        if name == "engines":
            engines = sorted({e for e in (*then, *now) if then.get(e) != now.get(e)})
            found += [line(f"engine {e}", then.get(e, "absent"), now.get(e, "absent")) for e in engines]
        else:
            found.append(line(name, then, now))
    return found


def _differences(wanted: Receipt, result: Result, *, cut: bool) -> list[str]:
    digest = output_digest(result.token_ids, result.scores)
    compared: list[tuple[str, Any, Any]] = [
        ("tokens", wanted.tokens, len(result.token_ids)),
        ("digest of ids and scores", wanted.digest, digest),
    ]
    if not cut:
        compared.append(("finish reason", wanted.finish_reason, result.finish_reason))
    return [f"{what}: {then} in the receipt, {now} here" for what, then, now in compared if then != now]

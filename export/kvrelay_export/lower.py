"""From the traced program to an engine's graph: dialect, precision, skip list, activations and cache dtype."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir
from kvrelay.manifest import Dialect, Float, Precision

from .dialect_decomposed import lower_decomposed
from .dialect_ort import lower_ort, quantize_ort, store_kv_as
from .dialect_standard import lower_standard, quantize_standard
from .errors import ExportError
from .form import check_form
from .graph import cancel_reshapes, drop_sublayers, name_weights, prune
from .half import to_half

__all__ = ["DIALECTS", "check_lowering", "lower"]

DIALECTS = {
    "ort": ("fp32", "int8", "int4", "int8-dynamic"),
    "standard": ("fp32", "fp16", "int8", "int4"),
    "decomposed": ("fp32", "fp16"),
}
_FIXED_ACTIVATIONS = {"fp32": "float32", "fp16": "float16"}


def check_lowering(dialect: str, precision: str, activations: str) -> None:
    """Refuse a combination that no graph exists for.

    Raises:
        ExportError: the dialect does not have the precision, or the precision not these activations.
    """
    if dialect not in DIALECTS:
        raise ExportError(f"dialect {dialect!r} is unknown: {', '.join(DIALECTS)}")
    if precision not in DIALECTS[dialect]:
        others = [d for d, has in DIALECTS.items() if precision in has]
        hint = f"; --dialect {' or '.join(others)} has it" if others else ""
        raise ExportError(
            f"precision {precision} is not part of the {dialect} dialect; it has {', '.join(DIALECTS[dialect])}{hint}"
        )
    wanted = "float32" if dialect == "ort" else _FIXED_ACTIVATIONS.get(precision, activations)
    if activations != wanted:
        raise ExportError(f"{precision} engines of the {dialect} dialect have {wanted} activations, not {activations}")


def lower(
    program: ir.Model,
    dialect: Dialect,
    precision: Precision,
    *,
    skip: Collection[str] = (),
    activations: Float = "float32",
    kv_dtype: Float | None = None,
    paired: bool = False,
) -> ir.Model:
    """Return the graph of one engine; ``program`` is left as it is.

    Args:
        program: the traced program.
        dialect: what it is lowered to.
        precision: of its weights.
        skip: sublayers to leave out.
        activations: what products, norms and attention take and give.
        kv_dtype: of the cache; None for that of the activations, the only one outside the `ort` dialect.
        paired: for the role `step` of the `ort` dialect: see :func:`kvrelay_export.dialect_ort.lower_ort`.

    Raises:
        ExportError: there is no such graph, or a weight does not fit it.
    """
    check_lowering(dialect, precision, activations)
    model = program.clone()
    name_weights(model)
    drop_sublayers(model, skip)
    cancel_reshapes(model)
    if dialect == "ort":
        lower_ort(model, paired=paired)
        if precision != "fp32":
            quantize_ort(model, precision)
        if kv_dtype == "float16":
            store_kv_as(model, ir.DataType.FLOAT16)
    else:
        if precision in ("int8", "int4"):
            quantize_standard(model, precision, np.dtype(activations))
        if activations == "float16":
            to_half(model)
        if dialect == "standard":
            lower_standard(model)
        else:
            lower_decomposed(model)
    prune(model)
    check_form(model, dialect)
    return model

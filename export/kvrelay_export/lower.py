"""From the traced program to an engine's graph: dialect, precision, skip list and cache dtype."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
from kvrelay.manifest import Dialect, Precision

from .dialect_ort import lower_ort, quantize_ort, store_kv_as
from .dialect_standard import lower_standard, quantize_standard
from .errors import ExportError
from .graph import cancel_reshapes, drop_sublayers, name_weights, prune

__all__ = ["check_lowering", "lower"]

_PRECISIONS = {"ort": ("fp32", "int8", "int4", "int8-dynamic"), "standard": ("fp32", "int8", "int4")}


def check_lowering(dialect: str, precision: str, kv_dtype: str) -> None:
    """Refuse a combination that no graph exists for.

    Raises:
        ExportError: the dialect does not have the precision or the cache dtype.
    """
    if dialect not in _PRECISIONS:
        raise ExportError(f"dialect {dialect!r} is unknown: {', '.join(_PRECISIONS)}")
    if precision not in _PRECISIONS[dialect]:
        raise ExportError(
            f"precision {precision} is not part of the {dialect} dialect; it has {', '.join(_PRECISIONS[dialect])}"
        )
    if kv_dtype != "float32" and (dialect, kv_dtype) != ("ort", "float16"):
        raise ExportError(f"a {kv_dtype} KV cache with fp32 engines is part of the ort dialect only, as float16")


def lower(
    program: ir.Model,
    dialect: Dialect,
    precision: Precision,
    *,
    skip: Collection[str] = (),
    kv_dtype: str = "float32",
    paired: bool = False,
) -> ir.Model:
    """Return the graph of one engine; ``program`` is left as it is.

    ``paired`` is for the role `step` of the `ort` dialect: see :func:`kvrelay_export.dialect_ort.lower_ort`.

    Raises:
        ExportError: the dialect does not have the precision or the cache dtype.
    """
    check_lowering(dialect, precision, kv_dtype)
    model = program.clone()
    name_weights(model)
    drop_sublayers(model, skip)
    cancel_reshapes(model)
    if dialect == "ort":
        lower_ort(model, paired=paired)
        if precision != "fp32":
            quantize_ort(model, precision)
        if kv_dtype != "float32":
            store_kv_as(model, ir.DataType.FLOAT16)
    else:
        lower_standard(model)
        if precision != "fp32":
            quantize_standard(model, precision)
    prune(model)
    return model

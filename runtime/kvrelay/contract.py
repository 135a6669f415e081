"""The engine contract: tensor names, axes and roles that exporter, manifest and runtime share.

========================== =================== =======================================================
tensor                     shape               meaning
========================== =================== =======================================================
``input_ids``              ``[B, S]``          int64 token ids
``write_index``            ``[B]``             int64 valid KV entries before the pass; row b writes at
                                               ``write_index[b] .. write_index[b] + S - 1``
``logit_rows``             ``[B, R]``          int64 positions of the pass whose logits are wanted
``past_key.i`` and         ``[B, Hkv, Lmax,    the KV cache, at fixed capacity
``past_value.i``           D]``
``present_key.i`` and      same                the same memory as past, updated in place
``present_value.i``
``new_key.i`` and          ``[B, Hkv, S, D]``  in the place of present, dialect ``decomposed`` alone: the entries of
``new_value.i``                                this pass, which the backend writes to the cache
``logits``                 ``[B, R, V]``       float32
========================== =================== =======================================================

TensorRT's builder adds three outputs, so that a pass need not copy whole rows to the host. They see the tokenizer's ids
alone, not the padded tail of a row:

========================== =================== =======================================================
``top_values``             ``[B, R, K]``       float32: the K largest logits of a row, descending; NaN if any
                                               logit of the row is not finite
``top_ids``                ``[B, R, K]``       int32: their ids; of several equal to the least, some may be
                                               missing
``log_sum``                ``[B, R]``          float32: log of the sum of exp(logit - the row's largest)
========================== =================== =======================================================
"""

from __future__ import annotations

from collections.abc import Iterable

INPUT_IDS = "input_ids"
WRITE_INDEX = "write_index"
LOGIT_ROWS = "logit_rows"
LOGITS = "logits"
TOP_VALUES = "top_values"
TOP_IDS = "top_ids"
LOG_SUM = "log_sum"
TOP = 64  # K, or the vocabulary's size if that is smaller

# Names of the dynamic axes.
BATCH = "batch"
SEQUENCE = "sequence"
ROWS = "rows"

# Kinds of sublayer, as written in a skip list: "attention.3", "mlp.17".
ATTENTION = "attention"
MLP = "mlp"


def past_names(layers: Iterable[int]) -> list[str]:
    """Names of the cache inputs, key before value, in layer order."""
    return [f"past_{kind}.{i}" for i in layers for kind in ("key", "value")]


def present_names(layers: Iterable[int]) -> list[str]:
    """Names of the cache outputs, in the order of :func:`past_names`."""
    return [f"present_{kind}.{i}" for i in layers for kind in ("key", "value")]


def new_names(layers: Iterable[int]) -> list[str]:
    """Names of the outputs that hold this pass's entries, in the order of :func:`past_names`."""
    return [f"new_{kind}.{i}" for i in layers for kind in ("key", "value")]


def updates_in_place(dialect: str) -> bool:
    """Whether engines of ``dialect`` write the cache themselves; if not, they give :func:`new_names`."""
    return dialect != "decomposed"


def input_names(layers: Iterable[int]) -> list[str]:
    """All input names of an engine in graph order."""
    return [INPUT_IDS, WRITE_INDEX, LOGIT_ROWS, *past_names(layers)]


def output_names(layers: Iterable[int], dialect: str = "standard") -> list[str]:
    """All output names of an engine of ``dialect`` in graph order."""
    return [LOGITS, *(present_names(layers) if updates_in_place(dialect) else new_names(layers))]

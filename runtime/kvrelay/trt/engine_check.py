"""A plan's tensors, compared with the engine contract and the manifest."""

from __future__ import annotations

from typing import Any

from .. import contract
from ..errors import EngineError
from ..manifest import EngineEntry, ModelEntry

__all__ = ["check_engine", "top_count"]

_TOP = (contract.TOP_VALUES, contract.TOP_IDS, contract.LOG_SUM)

Axes = tuple[int, ...]  # -1: dynamic


def check_engine(library: Any, engine: Any, entry: EngineEntry, model: ModelEntry) -> None:
    """Compare the names, sides, dtypes, shapes and aliases of ``engine`` with the manifest.

    Raises:
        EngineError: one differs; says what it is and what the manifest says.
    """
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    wanted = _wanted(entry, model, with_top=any(name in names for name in _TOP))
    if set(names) != set(wanted):
        odd = sorted(set(names) ^ set(wanted))
        raise EngineError(f"engine {entry.name}: its tensors differ from the manifest in {odd[:4]}; build it again")
    inputs = set(contract.input_names(entry.kv_layers))
    for name, (dtype, axes) in wanted.items():
        mode = library.TensorIOMode.INPUT if name in inputs else library.TensorIOMode.OUTPUT
        _compare(entry, name, "mode", engine.get_tensor_mode(name), mode)
        _compare(entry, name, "place", engine.get_tensor_location(name), library.TensorLocation.DEVICE)
        _compare(entry, name, "dtype", engine.get_tensor_dtype(name), _dtype(library, dtype))
        found = tuple(engine.get_tensor_shape(name))
        # An output of a dynamic engine may be known to be fixed, and TopK's K is the builder's choice.
        if len(found) != len(axes) or any(a != w for a, w in zip(found, axes, strict=True) if -1 not in (a, w)):
            _compare(entry, name, "shape", found, axes)
        if name in inputs and [a == -1 for a in found] != [a == -1 for a in axes]:
            _compare(entry, name, "shape", found, axes)
    if contract.updates_in_place(entry.dialect):
        _check_aliases(library, engine, entry)


def top_count(engine: Any) -> int | None:
    """Return K of the largest logits, None for a plan without them."""
    names = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
    return int(engine.get_tensor_shape(contract.TOP_VALUES)[-1]) if contract.TOP_VALUES in names else None


def _wanted(entry: EngineEntry, model: ModelEntry, *, with_top: bool) -> dict[str, tuple[str, Axes]]:
    b, s, r = (-1 if axis is None else axis for axis in (entry.batch, entry.sequence, entry.rows))
    cache = (b, model.kv_heads, model.capacity, model.head_dim)
    tensors: dict[str, tuple[str, Axes]] = {
        contract.INPUT_IDS: ("int64", (b, s)),
        contract.WRITE_INDEX: ("int64", (b,)),
        contract.LOGIT_ROWS: ("int64", (b, r)),
        contract.LOGITS: ("float32", (b, r, model.padded_vocab_size)),
    }
    tensors |= dict.fromkeys(contract.past_names(entry.kv_layers), (entry.kv_dtype, cache))
    if contract.updates_in_place(entry.dialect):
        tensors |= dict.fromkeys(contract.present_names(entry.kv_layers), (entry.kv_dtype, cache))
    else:
        new = (b, model.kv_heads, s, model.head_dim)
        tensors |= dict.fromkeys(contract.new_names(entry.kv_layers), (entry.kv_dtype, new))
    if with_top:
        count = min(contract.TOP, model.vocab_size)
        tensors |= {
            contract.TOP_VALUES: ("float32", (b, r, count)),
            contract.TOP_IDS: ("int32", (b, r, count)),
            contract.LOG_SUM: ("float32", (b, r)),
        }
    return tensors


def _dtype(library: Any, name: str) -> Any:
    kinds = library.DataType
    return {"int64": kinds.INT64, "int32": kinds.INT32, "float32": kinds.FLOAT, "float16": kinds.HALF}[name]


def _compare(entry: EngineEntry, name: str, what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise EngineError(
            f"engine {entry.name}: the {what} of {name} is {found} in its plan, the manifest says {wanted}; "
            "build it again with `kvrelay build`"
        )


def _check_aliases(library: Any, engine: Any, entry: EngineEntry) -> None:
    """Require that the engine itself says that each present tensor is its past tensor's memory."""
    if not hasattr(engine, "get_aliased_input_tensor"):
        raise EngineError(
            f"engine {entry.name}: {library.__name__} {library.__version__} cannot update a cache in place, 10.15 or "
            "newer can; export the bundle with --dialect decomposed"
        )
    layers = entry.kv_layers
    for present, past in zip(contract.present_names(layers), contract.past_names(layers), strict=True):
        alias = engine.get_aliased_input_tensor(present)
        if alias != past:
            raise EngineError(
                f"engine {entry.name}: {present} shares the memory of {alias or 'no input'} in its plan, it must be "
                f"{past}: the graph does not update the cache in place"
            )

"""From a bundle's graph to a network that may be built: parsed, checked, and with the largest logits as outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import contract
from ..errors import PlanError
from ..manifest import EngineEntry, ModelEntry
from .graph_file import attention_faults
from .network_check import check_network
from .network_view import attentions

__all__ = ["Log", "Parsed", "parse_network"]

_UNUSED = "Unused Input"
# Said of every int64 input: the contract has three of them, and the runtime binds int64 memory.
_EXPECTED = "has Int64 binding"


_loggers: dict[Any, Any] = {}  # by the library's class of loggers


def _new_logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.writes_to: Log

        def log(self, severity: Any, message: str) -> None:
            self.writes_to.take(trt, severity, message)

    return Logger()


@dataclass(slots=True)
class Log:
    """What the library said, from warnings upwards."""

    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def logger(self, trt: Any) -> Any:
        """Return the process's logger of the library, which from now on writes here.

        The library keeps the first logger that it is given and ignores others for as long as anything made with it
        lives: what is said would go to a log that nobody reads.
        """
        logger = _loggers.get(trt.ILogger)
        if logger is None:
            logger = _loggers[trt.ILogger] = _new_logger(trt)
        logger.writes_to = self
        return logger

    def begin(self, trt: Any) -> None:
        """Forget what was said, and have the process's logger write here, not to the log of another engine."""
        self.errors.clear()
        self.warnings.clear()
        self.logger(trt)

    def take(self, trt: Any, severity: Any, message: str) -> None:
        """Note a message of the library."""
        line = " ".join(message.split())
        if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
            self.errors.append(line)
        elif severity == trt.ILogger.WARNING and _EXPECTED not in line:
            self.warnings.append(line)

    def remarks(self) -> tuple[str, ...]:
        """Return every different line."""
        return tuple(dict.fromkeys([*self.errors, *self.warnings]))

    def first_error(self) -> str:
        """Return what went wrong first, which is what the later errors follow from."""
        return next(iter(self.errors), "the library gave no reason")

    def refuse_unused(self, engine: str) -> None:
        """Raise if an input was dropped: the engine would compute something else than its graph says.

        Raises:
            PlanError: with the input's name.
        """
        unused = list(dict.fromkeys(line for line in self.warnings if _UNUSED in line))
        if unused:
            raise PlanError(f"{engine}: the library drops inputs of the graph ({'; '.join(unused)}): not built")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A network, and the parser that owns its weights: both must live until the build ends."""

    network: Any
    parser: Any


def parse_network(trt: Any, builder: Any, log: Log, graph: Path, entry: EngineEntry, model: ModelEntry) -> Parsed:
    """Parse ``graph`` and return the network, checked and ready to be built.

    Args:
        trt: the library's module.
        builder: its builder, made with a logger of ``log``.
        log: what the library says.
        graph: the engine's ONNX file.
        entry: the engine in the manifest.
        model: its model.

    Raises:
        PlanError: the graph is refused, or its network is not what the graph says.
    """
    faults = attention_faults(graph)
    if faults:
        raise PlanError(f"{entry.name}: {_some(faults)}; export the bundle again with this version of kvrelay")
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, builder.logger)
    if not parser.parse_from_file(str(graph)):
        raise PlanError(f"{entry.name}: {_parser_errors(trt, parser, log)}")
    log.refuse_unused(entry.name)
    faults = check_network(trt, network, entry, model)
    if faults:
        raise PlanError(
            f"{entry.name}: the network that {trt.__name__} {trt.__version__} made of {graph.name} "
            f"is not the graph's: {_some(faults)}"
        )
    for attention in attentions(trt, network):
        if attention.dtype == trt.float32:
            # There is no fused kernel for it; a node attribute that says the same would make ONNX Runtime refuse.
            attention.handle.decomposable = True
    _add_top_outputs(trt, network, model.vocab_size)
    return Parsed(network, parser)


def _parser_errors(trt: Any, parser: Any, log: Log) -> str:
    found = []
    for i in range(parser.num_errors):
        error = parser.get_error(i)
        # What follows the first line are notes of other parts of the library, such as on a driver that is not there.
        reason = " ".join(error.desc().split("\n")[:2])
        found.append(f"node {error.node_name()} ({error.node_operator()}): {reason}")
    return f"{trt.__name__} {trt.__version__} cannot parse the graph: {_some(found or log.errors)}"


def _some(lines: list[str]) -> str:
    more = f"; and {len(lines) - 2} more" if len(lines) > 2 else ""
    return "; ".join(lines[:2]) + more


def _add_top_outputs(trt: Any, network: Any, vocab_size: int) -> None:
    """Add `top_values` and `top_ids` ``[B, R, K]``: the largest logits of known ids, descending; and `log_sum`.

    The values of a row are NaN if any of its logits is not finite: TopK alone would hide that from the host, which
    copies nothing else in the usual case. Comparing is the one way to find out that no optimiser simplifies.
    """
    logits = next(t for i in range(network.num_outputs) if (t := network.get_output(i)).name == contract.LOGITS)

    def constant(values: np.ndarray[Any, Any]) -> Any:
        kept = np.ascontiguousarray(values)
        return network.add_constant(kept.shape, trt.Weights(kept)).get_output(0)

    limit = np.iinfo(np.int32).max
    # Rows past the tokenizer's ids are junk that may be large.
    size = network.add_elementwise(
        network.add_shape(logits).get_output(0),
        constant(np.array([limit, limit, vocab_size], np.int64)),
        trt.ElementWiseOperation.MIN,
    )
    known = network.add_slice(logits, (0, 0, 0), (0, 0, 0), (1, 1, 1))
    known.set_input(2, size.get_output(0))
    top = network.add_topk(known.get_output(0), trt.TopKOperation.MAX, min(contract.TOP, vocab_size), 1 << 2)
    total = network.add_reduce(known.get_output(0), trt.ReduceOperation.SUM, 1 << 2, True)
    magnitude = network.add_unary(total.get_output(0), trt.UnaryOperation.ABS)
    finite = network.add_elementwise(
        magnitude.get_output(0),
        constant(np.full((1, 1, 1), np.finfo(np.float32).max, np.float32)),
        trt.ElementWiseOperation.LESS,
    )
    nan = constant(np.full((1, 1, 1), np.nan, np.float32))
    values = network.add_select(finite.get_output(0), top.get_output(0), nan)
    outputs = {
        contract.TOP_VALUES: values.get_output(0),
        contract.TOP_IDS: top.get_output(1),
        contract.LOG_SUM: _log_sum(trt, network, known.get_output(0)),
    }
    for name, tensor in outputs.items():
        tensor.name = name
        network.mark_output(tensor)


def _log_sum(trt: Any, network: Any, rows: Any) -> Any:
    """Return ``[B, R]``: log of the sum of exp(logit - the row's largest), what a score lacks besides two logits."""
    largest = network.add_reduce(rows, trt.ReduceOperation.MAX, 1 << 2, True)
    below = network.add_elementwise(rows, largest.get_output(0), trt.ElementWiseOperation.SUB)
    shares = network.add_unary(below.get_output(0), trt.UnaryOperation.EXP)
    total = network.add_reduce(shares.get_output(0), trt.ReduceOperation.SUM, 1 << 2, False)
    return network.add_unary(total.get_output(0), trt.UnaryOperation.LOG).get_output(0)

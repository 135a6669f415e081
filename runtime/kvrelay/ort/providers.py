"""Execution providers of ONNX Runtime: which are wanted, their options, and whether they really run an engine.

onnxruntime-gpu lists its GPU providers on any box, and where one cannot start it runs everything on the CPU without
an error. Here that is an error, and so is an operator that lands on the CPU, unless "cpu" is among what is wanted.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import BackendMissingError, CudaError, EngineError, ParameterError
from .library import onnxruntime

__all__ = [
    "PROVIDERS",
    "check_assignment",
    "check_providers",
    "explained",
    "parse_providers",
    "preload",
    "quiet",
    "why_not",
]

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}

# Arithmetic on the lengths and widths of a pass, a few whole numbers: CUDA leaves it to the CPU on purpose.
_LENGTH_OPERATORS = {
    *("Add", "Cast", "Concat", "Expand", "Gather", "Range", "ReduceMax", "Reshape"),
    *("Shape", "Size", "Slice", "Squeeze", "Sub", "Unsqueeze"),
}


def parse_providers(text: str, option: str = "provider") -> tuple[str, ...]:
    """Return the providers that ``text`` names in order of preference, separated by commas.

    Raises:
        ParameterError: one is unknown or named twice, or another follows the CPU, which runs everything.
    """
    names = tuple(name.strip() for name in text.split(",")) if isinstance(text, str) else ()
    if not names or not set(names) <= set(PROVIDERS) or len(set(names)) != len(names) or "cpu" in names[:-1]:
        raise ParameterError(
            f"{option}={text!r}: one of {', '.join(PROVIDERS)}, or several in order of preference, cpu last"
        )
    return names


def check_providers(wanted: tuple[str, ...]) -> None:
    """Refuse providers that this build of ONNX Runtime does not have.

    Raises:
        BackendMissingError: names what to install.
    """
    ort = onnxruntime()
    for name in wanted:
        if PROVIDERS[name] not in ort.get_available_providers():
            raise BackendMissingError(
                f"provider {name}: onnxruntime {ort.__version__} is a build without it; "
                "pip uninstall onnxruntime, then pip install 'kvrelay[gpu]'"
            )


def preload() -> None:
    """Load the CUDA libraries that pip installed, which the system's loader does not look for."""
    ort = onnxruntime()
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what is missing; why_not() says what matters
        ort.preload_dlls()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep ONNX Runtime's log off the terminal where what it would say is said by an error of ours."""
    ort = onnxruntime()
    ort.set_default_logger_severity(4)
    try:
        yield
    finally:
        ort.set_default_logger_severity(2)


def check_assignment(session: Any, wanted: tuple[str, ...], engine: str) -> None:
    """Refuse a session that does not run where it was told to.

    Args:
        session: made with ``session.record_ep_graph_assignment_info``.
        wanted: providers in order of preference.
        engine: its name, for the message.

    Raises:
        EngineError: the wanted provider did not start, or operators other than arithmetic on lengths fell to a
            provider that was not named.
    """
    running = session.get_providers()
    for name in wanted:
        if PROVIDERS[name] not in running:
            raise EngineError(
                f"engine {engine}: ONNX Runtime fell back to {running[0]}, {PROVIDERS[name]} did not start: "
                f"{why_not(name)}"
            )
    allowed = {PROVIDERS[name] for name in wanted}
    strays = Counter(
        node.op_type
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name not in allowed
        for node in part.get_nodes()
        if node.op_type not in _LENGTH_OPERATORS
    )
    if strays:
        shown = ", ".join(f"{count} x {op}" for op, count in strays.most_common(4))
        raise EngineError(
            f"engine {engine}: {PROVIDERS[wanted[0]]} does not run {shown}, which would fall back to the CPU; "
            f'allow that with provider="{",".join(wanted)},cpu", or use a bundle of the dialect standard in fp16'
        )


def explained(error: EngineError, wanted: tuple[str, ...]) -> EngineError:
    """Return ``error`` of loading a session, with a cause where ONNX Runtime names only a page on the web."""
    if "tensorrt" in wanted and "install TensorRT libraries" in str(error):
        return EngineError(f"{PROVIDERS['tensorrt']} did not start: {why_not('tensorrt')}")
    return error


def why_not(provider: str) -> str:
    """Return why ``provider`` of this build cannot start, as far as its libraries and the driver say."""
    from ..gpu import gpus  # not needed for CPUs

    library = Path(str(onnxruntime().__file__)).parent / "capi" / f"libonnxruntime_providers_{provider}.so"
    try:
        # Its dependencies are looked for before its symbols; without onnxruntime's own the symbols cannot be found.
        ctypes.CDLL(str(library.with_name("libonnxruntime_providers_shared.so")), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))
    except OSError as error:
        return f"{error}; {_remedy(provider)}"
    try:
        gpus()
    except (BackendMissingError, CudaError) as error:
        return str(error)
    return "ONNX Runtime's log says why"


def _remedy(provider: str) -> str:
    if provider == "tensorrt":
        return "pip install 'tensorrt>=10.3,<11', and what CUDA needs"
    return "pip install 'onnxruntime-gpu[cuda,cudnn]', or install CUDA and cuDNN of the versions that it names"

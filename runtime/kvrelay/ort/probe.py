"""Whether a provider that ONNX Runtime lists really runs: one operator, run on it."""

from __future__ import annotations

from ..errors import EngineError, KvrelayError
from .library import onnxruntime
from .providers import PROVIDERS, check_assignment, explained, preload, quiet
from .threads import load_session

__all__ = ["listed_providers", "why_it_does_not_run"]

# An ONNX model of one Relu over one float, opset 17.
_RELU = (
    b'\x08\x08:3\n\x0c\n\x01x\x12\x01y"\x04Relu\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x11"
)


def listed_providers() -> list[str]:
    """Return the providers of this build that kvrelay knows, as :data:`PROVIDERS` names them.

    Raises:
        BackendMissingError: ONNX Runtime is not installed.
    """
    listed = onnxruntime().get_available_providers()
    return [name for name, full in PROVIDERS.items() if full in listed]


def why_it_does_not_run(provider: str) -> str | None:
    """Run one operator on ``provider``; return why that failed, None if it did not."""
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        if provider != "cpu":
            preload()
        with quiet():
            session = load_session(_RELU, options, [PROVIDERS[provider]])
        check_assignment(session, (provider,), "probe")
    except EngineError as error:
        return str(explained(error, (provider,))).removeprefix("engine probe: ")
    except KvrelayError as error:
        return str(error)
    return None

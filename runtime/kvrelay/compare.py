"""Compare a window with its draft, row by row, and commit what holds."""

from __future__ import annotations

from collections.abc import Sequence

from .logits import LogitRow
from .request import Request

__all__ = ["compare"]


def compare(request: Request, drafted: Sequence[int], logits: Sequence[LogitRow]) -> tuple[int, int, str]:
    """Commit the matching prefix of ``drafted`` and the target's own next token, and count.

    End-of-sequence ids, stop strings and limits are applied at each token, in order.

    Args:
        request: the request.
        drafted: candidates for the positions after its last committed token.
        logits: ``len(drafted) + 1`` rows, that which follows the last committed token first.

    Returns:
        candidates that matched, candidates that were compared, the text that became certain.

    Raises:
        EngineError: the logits are not numbers.
    """
    stats = request.stats
    text = ""
    matched = evaluated = 0
    for row in range(len(drafted) + 1):
        token = request.decide(logits[row])
        text += request.advance_text()
        if row < len(drafted):
            evaluated += 1
            if token == drafted[row]:
                matched += 1
                stats.accepted += 1
            else:
                stats.corrections += 1
        else:
            stats.bonus += 1
        if matched <= row or request.finish_reason is not None:
            break
    stats.proposed += len(drafted)
    stats.evaluated += evaluated
    stats.windows += bool(drafted)
    stats.plain_passes += not drafted
    stats.rollbacks += evaluated > matched
    return matched, evaluated, text

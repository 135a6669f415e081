"""The draft-verify loop.

Each turn: *draft* candidates, *verify* the window ``[last committed token, d1 .. dk]`` in one pass of fixed shape,
*compare* row by row, *roll back* by moving the length. A pass commits at least one token: the matches and the
verifier's own next token, a correction at a mismatch or a bonus when all matched. Entries behind the length are junk
that the next pass overwrites.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from .compare import compare
from .logits import LogitRow
from .policy import Plan, Policy
from .request import Request
from .target import Target

__all__ = ["Event", "generate"]

Event = dict[str, object]


def generate(
    request: Request, target: Target, policy: Policy, trace: Callable[[Event], None] | None = None
) -> Iterator[str]:
    """Run ``request`` to its end, yielding text as it becomes certain.

    Args:
        request: the request; the first ``kv_length`` of its tokens are in the slot already.
        target: the target's engines, bound to the request's slot.
        policy: plans each window.
        trace: takes one event a window.

    Raises:
        EngineError: an engine failed or gave values that are not numbers.
    """
    started = time.perf_counter()
    copied = target.kv_bytes_copied
    for drafter in policy.drafters:
        drafter.begin(request)
    logits = _prefill(request, target)
    if logits is None:
        return
    request.decide(logits)
    request.stats.first = 1
    first_token = time.perf_counter()
    request.stats.ttft = first_token - started
    if trace is not None:
        trace({"pass": "prefill", "committed": request.tokens[-1:], "kv_length": request.kv_length})
    spent = target.seconds
    yield request.advance_text()
    paused = time.perf_counter() - first_token  # time the caller keeps the text is not decoding time
    while request.finish_reason is None:
        if request.cancelled:
            request.finish_reason = "cancelled"
            break
        piece = _window(request, target, policy, trace)
        handed = time.perf_counter()
        request.stats.decode_seconds = handed - first_token - paused
        request.stats.verify_seconds = target.seconds - spent
        yield piece
        paused += time.perf_counter() - handed
    request.stats.kv_bytes_copied += target.kv_bytes_copied - copied
    request.stats.policy = policy.summary()
    yield request.stream.finish()


def _prefill(request: Request, target: Target) -> LogitRow | None:
    """Process the prompt, chunk by chunk; return the logits that follow it, None if it was cancelled on the way."""
    while not request.cancelled:
        request.kv_length, logits = target.prefill_chunk(request.tokens, request.kv_length)
        if logits is not None:
            return logits
    request.finish_reason = "cancelled"
    return None


def _window(request: Request, target: Target, policy: Policy, trace: Callable[[Event], None] | None) -> str:
    """Draft, verify, compare, roll back once; return the new text."""
    stats = request.stats
    start = request.kv_length
    plan = policy.plan(request)
    drafted = _draft(request, plan)
    window = [request.tokens[-1], *drafted]
    logits = target.replay(window, start, plan.window) if drafted else target.step(window[0], start)

    matched, evaluated, text = compare(request, drafted, logits)

    # Rollback is this line: entries of the last committed token and the matches are valid, later ones are not.
    request.kv_length = len(request.tokens) - 1
    stats.stored_verify_ms += policy.costs.pass_ms(plan.window if drafted else 0)
    policy.learn(plan, evaluated, matched, request.tokens[start + 1 :])
    if plan.drafter is not None:
        for drafter in policy.drafters:
            drafter.commit(request)
    if trace is not None:
        committed = request.tokens[start + 1 :]
        trace(
            {
                "pass": "verify" if drafted else "plain",
                "draft": plan.drafter.name if plan.drafter is not None else None,
                "window": plan.window if drafted else 1,
                "drafted": drafted,
                "accepted": drafted[:matched],
                "committed": committed,
                "ends_with": "correction" if evaluated > matched else "bonus" if len(committed) > matched else "match",
                "kv_length": {"before": start, "written": start + len(window), "after_rollback": request.kv_length},
            }
        )
    return text


def _draft(request: Request, plan: Plan) -> list[int]:
    if plan.drafter is None:
        return []
    return plan.candidates or plan.drafter.propose(request, plan.count)

"""The batch: one loop that admits, prefills, decodes all active rows in one pass, replays windows and commits.

Ordinary rows commit what the dynamic batch decodes. Deterministic rows commit only what the verifier's shape class
computed. Two ways lead there, and stored costs choose: the whole batch decodes in a shape of the class, or the row's
tokens of the fast path are *candidates* that a verify engine of fixed shape ``[G, N]`` replays, rewriting their KV
entries. At a mismatch everything behind it is dropped and decoded again (decode-verify-rollback, arXiv 2601.17768).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .batch_drafting import Drafting
from .batch_target import BatchTarget, Feed
from .compare import compare
from .errors import EngineError, KvrelayError
from .faults import Injector
from .shapes import Shape
from .slots import Row, Slots
from .stats import EngineStats

__all__ = ["Scheduler"]

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Step:
    """One pass over the active rows."""

    shape: Shape
    commits: bool  # for deterministic rows: the shape lies in the verifier's class
    drafted: list[list[int]]  # for each row


class Scheduler:
    """Runs the batch on a thread of its own.

    Args:
        target: the target's engines over the slots.
        slots: the slots.
        drafting: drafts for speed.
        injector: faults to inject.
        in_class: deterministic rows decode inside the class (True), are replayed (False), or what costs less (None).
    """

    def __init__(
        self,
        target: BatchTarget,
        slots: Slots,
        drafting: Drafting,
        injector: Injector,
        *,
        in_class: bool | None,
    ) -> None:
        self.stats = EngineStats()
        self._target = target
        self._slots = slots
        self._drafting = drafting
        self._injector = injector
        self._in_class = in_class
        self._waiting: deque[Row] = deque()
        self._open: dict[Row, None] = {}  # rows whose handles were not told of an end, wherever a fault left them
        self._prefilling: Row | None = None
        self._wake = threading.Condition()
        self._closing = False
        self._broken: KvrelayError | None = None
        self._thread = threading.Thread(target=self._run, name="kvrelay-engine", daemon=True)
        self._thread.start()

    # -- from any thread ----------------------------------------------------------------------------------------

    def submit(self, row: Row) -> None:
        """Queue a row; rows are admitted in this order.

        Raises:
            EngineError: the engine was closed, or broke.
        """
        with self._wake:
            if self._broken is not None:
                raise EngineError(f"this engine stopped: {self._broken}; make a new one")
            if self._closing:
                raise EngineError("this engine is closed: make a new one")
            self._waiting.append(row)
            self._open[row] = None
            self.stats.submitted += 1
            self._wake.notify()

    def wake(self) -> None:
        """Let the loop look at its rows again."""
        with self._wake:
            self._wake.notify()

    def close(self) -> None:
        """Cancel every request and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the loop -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # a fault of this program: no request may wait for ever
            with self._wake:
                self._broken = EngineError(f"{type(error).__name__}: {error}")
            self._end_all(self._broken)
            raise
        self._end_all(None)

    def _turn(self) -> bool:
        """Admit, prefill one chunk, advance every active row; False when the engine is closing."""
        with self._wake:
            while not (self._closing or self._waiting or self._prefilling or self._slots.active):
                self._wake.wait()
            if self._closing:
                return False
        started = time.perf_counter()
        self._drop_cancelled()
        self._admit()
        if self._prefilling is not None:
            self._prefill_chunk(self._prefilling)
        self._slots.arrange()
        rows = self._slots.active
        if rows:
            self._advance(rows)
        self.stats.kv_bytes_moved = self._slots.bytes_moved
        self.stats.seconds += time.perf_counter() - started
        return True

    def _end_all(self, error: KvrelayError | None) -> None:
        with self._wake:
            rows = list(self._open)
            self._waiting.clear()
        for row in rows:
            if error is None:
                row.request.finish_reason = "cancelled"
                self._finish(row)
                continue
            try:
                self._fail(row, error)
            except Exception:  # by the same fault, perhaps
                row.handle._end("", error)

    def _drop_cancelled(self) -> None:
        with self._wake:
            dropped = [r for r in self._waiting if r.request.cancelled.is_set()]
            for row in dropped:
                self._waiting.remove(row)
        running = [*self._slots.active, *([self._prefilling] if self._prefilling is not None else [])]
        for row in (*dropped, *(r for r in running if r.request.cancelled.is_set())):
            row.request.finish_reason = "cancelled"
            self._finish(row)

    # -- prefill ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give the request that waited longest a slot, if there is one and no other prompt is being processed."""
        if self._prefilling is not None or not self._slots.free:
            return
        with self._wake:
            if not self._waiting:
                return
            row = self._waiting.popleft()
        self._slots.take(row, reuse=self._target.reuses_prefixes, canonical=row.deterministic)
        self._prefilling = row
        self.stats.reused_tokens += row.request.stats.reused_tokens

    def _prefill_chunk(self, row: Row) -> None:
        """Process one chunk of a prompt, alone and in a fixed shape; the last one commits the first token."""
        request = row.request
        started = time.perf_counter()
        try:
            self._injector.before_run("prefill")
            end, logits = self._target.target(row.slot).prefill_chunk(request.tokens, request.kv_length)
            self.stats.prefill_seconds += time.perf_counter() - started
            # Every prefill pass is canonical: a deterministic prompt may use it later.
            row.canonical = end if row.canonical == request.kv_length else row.canonical
            request.kv_length = end
            if logits is None:
                return
            request.decide(logits)
        except (EngineError, MemoryError) as error:
            self._fail(row, error)
            return
        self._prefilling = None
        row.active = True
        row.first_token = time.perf_counter()
        request.stats.first = 1
        request.stats.ttft = row.first_token - row.submitted
        self._drafting.begin(row)
        self._give(row, request.advance_text())

    # -- decode, verify, commit ---------------------------------------------------------------------------------

    def _advance(self, rows: list[Row]) -> None:
        """Decode every row in one pass, then replay the windows that are due."""
        commits = self._decodes_in_class(rows)
        if commits:
            self._replay([r for r in rows if r.candidates])
        else:
            self._replay_due(rows)
        self._slots.arrange()
        rows = self._slots.active
        if not rows:
            return
        step = self._plan(rows, commits and self._decodes_in_class(rows))
        self._run_step(step, rows)
        if not step.commits:
            self._replay_due([r for r in rows if r.active])

    def _decodes_in_class(self, rows: Sequence[Row]) -> bool:
        """Whether deterministic rows commit from the batch's own pass, and need no replay."""
        count = sum(r.deterministic for r in rows)
        target = self._target
        step = target.class_step(len(rows)) if rows else None
        if not count or step is None or self._in_class is False:
            return False
        if self._in_class:
            return True
        # For all rows the dearer step, or for the deterministic ones a share of replays.
        dearer = target.ms(step) - target.ms(target.plain_step(len(rows)))
        return dearer <= min(target.ms(s) * -(-count // s.batch) / s.width for s in target.replay_shapes())

    def _plan(self, rows: list[Row], commits: bool) -> _Step:
        """Choose the pass and its drafts."""
        target = self._target
        plain = target.class_step(len(rows)) if commits else target.plain_step(len(rows))
        assert plain is not None
        # Deterministic rows take part with their next token alone where this pass does not commit them.
        wide = target.wide_steps(len(rows), in_class=commits)
        silent = [r.deterministic and not commits for r in rows]
        try:
            drafted = self._drafting.propose(rows, plain, wide, target.ms, silent)
        except (EngineError, MemoryError):
            # A draft can be done without: it changes nothing but the speed. Its failures are counted.
            self.stats.draft_failures += 1
            drafted = [[] for _ in rows]
        width = 1 + max(map(len, drafted))
        shape = plain if width == 1 else next(s for s in wide if s.width >= width)
        return _Step(shape, commits, drafted)

    def _run_step(self, step: _Step, rows: Sequence[Row]) -> None:
        """Run one pass over neighbouring rows; if it fails, each row alone, so that only its cause is lost."""
        feeds = [Feed([r.next_token, *d], r.fed) for r, d in zip(rows, step.drafted, strict=True)]
        started = time.perf_counter()
        try:
            logits = self._target.run(step.shape, rows[0].slot, feeds)
        except (EngineError, MemoryError) as error:
            if len(rows) == 1:
                self._fail(rows[0], error)
                return
            for row, drafted in zip(rows, step.drafted, strict=True):
                self._run_step(self._alone(step, drafted), [row])
            return
        seconds = time.perf_counter() - started
        self.stats.steps += 1
        self.stats.step_rows += len(rows)
        self.stats.step_seconds += seconds
        canonical = not self._target.aligned and self._target.in_class(step.shape)
        for index, (row, drafted) in enumerate(zip(rows, step.drafted, strict=True)):
            if row.deterministic and not step.commits:
                row.request.stats.draft_seconds += seconds
                self._extend(row, logits[index, 0])
            else:
                row.request.stats.verify_seconds += seconds
                self._commit_step(row, drafted, logits[index], canonical=canonical)

    def _alone(self, step: _Step, drafted: list[int]) -> _Step:
        """Return the step for one row of a pass that failed."""
        target = self._target
        plain = target.class_step(1) if step.commits else target.plain_step(1)
        assert plain is not None
        wide = [s for s in target.wide_steps(1, in_class=step.commits) if s.width > len(drafted)]
        return _Step(wide[0], step.commits, [drafted]) if drafted and wide else _Step(plain, step.commits, [[]])

    def _commit_step(self, row: Row, drafted: list[int], logits: Logits, *, canonical: bool) -> None:
        length = len(row.request.tokens)
        counted = self._commit(row, drafted, logits, canonical=canonical, replayed=False)
        if counted is not None and row.active:
            self._drafting.learn(row, drafted, *counted, row.request.tokens[length:])

    def _extend(self, row: Row, logits: Logits) -> None:
        """Take a candidate of a deterministic row from the fast path."""
        request = row.request
        if self._is_due(row):
            return  # it rode along as a pad
        try:
            token = request.sampler.pick(logits, len(request.tokens) + len(row.candidates))
        except EngineError as error:
            self._fail(row, error)
            return
        request.sampler.observe(token)
        request.stats.draft_runs += 1
        row.candidates.append(token)

    def _is_due(self, row: Row) -> bool:
        """Whether a row's window is to be replayed: it is full, or the row may have finished."""
        request = row.request
        room = self._target.window - 1
        if self._target.aligned:
            room -= (len(request.tokens) - 1) % self._target.window
        most = min(room, request.remaining - 1)
        return len(row.candidates) >= most or (bool(row.candidates) and row.candidates[-1] in request.eos_ids)

    def _replay_due(self, rows: Sequence[Row]) -> None:
        """Replay the groups in which a window is due; rows with fewer candidates fill them."""
        waiting = [r for r in rows if r.deterministic and r.active]
        if any(self._is_due(r) for r in waiting):
            due = [r for r in waiting if self._is_due(r)]
            groups = {r.slot // self._target.group for r in due}
            self._replay([r for r in waiting if r.slot // self._target.group in groups and (r.candidates or r in due)])

    def _replay(self, rows: Sequence[Row]) -> None:
        """Verify the candidates of deterministic rows, group by group, in a fixed shape."""
        group = self._target.group
        for first in sorted({r.slot // group for r in rows}):
            self._replay_group([r for r in rows if r.slot // group == first])

    def _replay_group(self, rows: list[Row]) -> None:
        target = self._target
        windows = {id(r): self._window(r) for r in rows}
        widest = max(len(tokens) for tokens, _ in windows.values())
        span = rows[-1].slot - rows[0].slot + 1
        fitting = [s for s in target.replay_shapes() if s.width >= widest]
        together = min((s for s in fitting if s.batch >= span), key=target.ms, default=None)
        alone = min(fitting, key=target.ms)
        # Rows may lie too far apart for one pass of the fixed shape, or its dummies may cost more than they save.
        if len(rows) > 1 and (together is None or target.ms(together) > len(rows) * target.ms(alone)):
            for row in rows:
                self._replay_group([row])
            return
        shape = together or alone
        first = min(rows[0].slot, target.cache.slots - shape.batch)
        feeds = []
        for slot in range(first, first + shape.batch):
            mine = next((r for r in rows if r.slot == slot), None)
            # The slots of others take part with pads beyond their length.
            feeds.append(Feed(*windows[id(mine)]) if mine is not None else Feed([0], self._slots.length(slot)))
        started = time.perf_counter()
        try:
            logits = target.run(shape, first, feeds)
        except (EngineError, MemoryError) as error:
            if len(rows) == 1:
                self._fail(rows[0], error)
                return
            for row in rows:
                self._replay_group([row])
            return
        seconds = time.perf_counter() - started
        self.stats.replays += 1
        self.stats.replay_seconds += seconds
        self.stats.group_places += shape.batch
        self.stats.windows += len(rows)
        for row in rows:
            tokens, start = windows[id(row)]
            row.request.stats.verify_seconds += seconds
            self._commit_window(row, tokens, start, logits[row.slot - first])

    def _window(self, row: Row) -> tuple[list[int], int]:
        """Return the tokens of a row's window and where it begins, a candidate spoiled if that is to be tested."""
        request = row.request
        candidates = self._injector.spoil(row.candidates)
        start = request.kv_length
        if self._target.aligned:
            start -= start % self._target.window
        return [*request.tokens[start:], *candidates], start

    def _commit_window(self, row: Row, tokens: Sequence[int], start: int, logits: Logits) -> None:
        request = row.request
        for candidate in row.candidates:
            request.sampler.forget(candidate)
        row.candidates.clear()
        known = len(request.tokens) - start  # committed tokens in the window, the last of which is fed again anyway
        self._commit(row, list(tokens[known:]), logits[known - 1 :], canonical=True, replayed=True)

    def _commit(
        self, row: Row, drafted: list[int], logits: Logits, *, canonical: bool, replayed: bool
    ) -> tuple[int, int] | None:
        """Compare, commit, roll back by moving the length, and hand out the text.

        Returns:
            candidates compared and matched, None if the request failed.
        """
        request = row.request
        length = request.kv_length
        stats = request.stats
        emitted = stats.emitted
        try:
            matched, evaluated, text = compare(request, drafted, logits)
        except EngineError as error:
            self._fail(row, error)
            return None
        request.kv_length = len(request.tokens) - 1
        if canonical and row.canonical >= length:
            row.canonical = request.kv_length
        self.stats.emitted += stats.emitted - emitted
        if replayed:
            self.stats.rollbacks += evaluated > matched
            self.stats.recomputed += len(drafted) - matched
        else:
            self.stats.drafted += len(drafted)
            self.stats.accepted += matched
        self._drafting.rolled_back(row)
        self._give(row, text)
        return evaluated, matched

    # -- ends ---------------------------------------------------------------------------------------------------

    def _give(self, row: Row, text: str) -> None:
        now = time.perf_counter()
        row.request.stats.decode_seconds = now - row.first_token
        if row.request.finish_reason is not None:
            self._finish(row, text)
        elif text:
            row.handle._push(text)

    def _finish(self, row: Row, text: str = "") -> None:
        self._release(row, keep=True)
        if row.request.finish_reason == "cancelled":
            self.stats.cancelled += 1
        else:
            self.stats.finished += 1
        row.handle._end(text + row.request.stream.finish(), None)
        self._open.pop(row)

    def _fail(self, row: Row, error: Exception) -> None:
        """End a request with an error; what its slot holds is unknown and is cleared."""
        if row.slot >= 0:
            model = self._target.cache.model
            self._target.cache.clear(row.slot, 0, row.fed + model.capacity - model.context)  # no pass wrote farther
        self._release(row, keep=False)
        self.stats.failed += 1
        wrapped = error if isinstance(error, KvrelayError) else EngineError(f"no memory for a pass: {error}")
        row.handle._end("", wrapped)
        self._open.pop(row)

    def _release(self, row: Row, *, keep: bool) -> None:
        row.candidates.clear()
        if row is self._prefilling:
            self._prefilling = None
        if row.slot >= 0:
            self._drafting.end(row)
            self._slots.leave(row, keep=keep)
        row.active = False

"""The batch: one loop that admits, prefills, decodes all active rows in one pass, replays windows and commits.

Ordinary rows commit what the dynamic batch decodes. Deterministic rows commit only what the verifier's shape class
computed. Two ways lead there, and stored costs choose: the whole batch decodes in a shape of the class, or the row's
tokens of the fast path are *candidates* that a verify engine of fixed shape ``[G, N]`` replays, rewriting their KV
entries. At a mismatch everything behind it is dropped and decoded again (decode-verify-rollback, arXiv 2601.17768).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque

from .batch_drafting import Drafting
from .batch_target import BatchTarget
from .commits import Commits
from .errors import EngineError, KvrelayError
from .faults import Injector
from .forked import Home
from .latch import Latch
from .replays import Replays
from .slots import Row, Slots
from .stats import EngineStats
from .steps import Steps

__all__ = ["Scheduler"]


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
        self._commits = Commits(target.cache, slots, drafting, self.stats)
        self._replays = Replays(target, slots, self._commits, injector, self.stats)
        self._steps = Steps(target, drafting, self._commits, self._replays, self.stats, in_class=in_class)
        self._waiting: deque[Row] = deque()
        # No lock between the loop and its callers: one of them may be a signal handler, or a finaliser that the garbage
        # collector runs, in the middle of another's call, and close() waits there for the loop.
        self._arrived: queue.SimpleQueue[Row | None] = queue.SimpleQueue()  # None: look again
        self._closing = False  # asked to end
        self._over = False  # what arrives now is not looked at
        self._stopped = Latch()  # every request has ended
        self._broken: KvrelayError | None = None
        self._counting = threading.RLock()  # of submit() alone, and reentrant: a signal handler may submit inside it
        self._home = Home()
        self._thread = threading.Thread(target=self._run, name="kvrelay-engine", daemon=True)
        self._thread.start()

    # -- from any thread ----------------------------------------------------------------------------------------

    def submit(self, row: Row) -> None:
        """Queue a row; rows are admitted in this order.

        Raises:
            EngineError: the engine was closed, or broke, or runs in the process that this one was forked from.
        """
        self._home.require()
        if not self._closing and self._broken is None:
            self._count(1)
            self._arrived.put(row)
            if not self._over:
                return
            # The loop ended meanwhile: it took the row and ended it, or never will.
            if self._wait_for_the_end() and row.handle.done:
                return
            self._count(-1)
        if self._broken is not None:
            raise EngineError(f"this engine stopped: {self._broken}; make a new one")
        raise EngineError("this engine is closed: make a new one")

    def wake(self) -> None:
        """Let the loop look at its rows again."""
        self._arrived.put(None)

    def close(self) -> None:
        """Cancel every request and end the thread; every call returns when that is done.

        On the loop's own thread, where the garbage collector may call this, and in a forked process, which has no loop,
        nothing is waited for.
        """
        self._closing = True
        self.wake()
        self._wait_for_the_end()

    def _count(self, submitted: int) -> None:
        with self._counting:
            self.stats.submitted += submitted

    def _wait_for_the_end(self) -> bool:
        """Wait until the loop has ended; False where it never would."""
        if not self._home.is_here or threading.current_thread() is self._thread:
            return False
        # First: join() takes a thread for ended once Ctrl-C has interrupted it (Python up to 3.12).
        self._stopped.wait()
        self._thread.join()
        return True

    # -- the loop -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # a fault of this program: no request may wait for ever
            self._broken = EngineError(f"{type(error).__name__}: {error}")
            raise
        finally:
            try:
                self._end_all(self._broken)
            finally:
                self._stopped.open()

    def _turn(self) -> bool:
        """Admit, prefill one chunk, advance every active row; False when the engine is closing."""
        self._receive(wait=not (self._waiting or self._slots.occupied))
        if self._closing:
            return False
        started = time.perf_counter()
        self._drop_cancelled()
        self._admit()
        if (row := self._slots.prefilling) is not None:
            self._prefill_chunk(row)
        self._slots.arrange()
        rows = self._slots.active
        if rows:
            self._advance(rows)
        self.stats.kv_bytes_moved = self._slots.bytes_moved
        self.stats.kv_bytes_copied = self._target.kv_bytes_copied
        self.stats.seconds += time.perf_counter() - started
        return True

    def _receive(self, *, wait: bool) -> None:
        """Take in what arrived; with ``wait``, wait until something does."""
        with contextlib.suppress(queue.Empty):
            while True:
                row = self._arrived.get(block=wait)
                wait = False
                if row is not None:
                    self._waiting.append(row)
                    self._commits.open[row] = None

    def _end_all(self, error: KvrelayError | None) -> None:
        self._over = True  # before the last look: submit() looks here after it has put a row
        self._receive(wait=False)
        self._waiting.clear()
        for row in list(self._commits.open):
            try:
                if error is None:
                    row.request.finish_reason = "cancelled"
                    self._commits.finish(row)
                else:
                    self._commits.fail(row, error)
            except Exception as fault:  # in a broken engine by the same fault, perhaps: the others must end too
                row.handle._end("", error or EngineError(f"{type(fault).__name__}: {fault}"))

    def _drop_cancelled(self) -> None:
        dropped = [r for r in self._waiting if r.request.cancelled]
        for row in dropped:
            self._waiting.remove(row)
        for row in (*dropped, *(r for r in self._slots.occupied if r.request.cancelled)):
            row.request.finish_reason = "cancelled"
            self._commits.finish(row)

    # -- prefill ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give the request that waited longest a slot, if there is one and no other prompt is being processed."""
        if self._slots.prefilling is not None or not self._slots.free or not self._waiting:
            return
        row = self._waiting.popleft()
        self._slots.take(row, reuse=self._target.reuses_prefixes, canonical=row.deterministic)
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
            self._commits.fail(row, error)
            return
        row.active = True
        row.first_token = time.perf_counter()
        request.stats.first = 1
        request.stats.ttft = row.first_token - row.submitted
        self._drafting.begin(row)
        self._commits.give(row, request.advance_text())

    # -- decode, verify, commit ---------------------------------------------------------------------------------

    def _advance(self, rows: list[Row]) -> None:
        """Decode every row in one pass, then replay the windows that are due."""
        commits = self._steps.decode_in_class(rows)
        if commits:
            self._replays.replay([r for r in rows if r.candidates])
        else:
            self._replays.replay_due(rows)
        self._slots.arrange()
        rows = self._slots.active
        if not rows:
            return
        step = self._steps.plan(rows, commits and self._steps.decode_in_class(rows))
        self._steps.run(step, rows)
        if not step.commits:
            self._replays.replay_due([r for r in rows if r.active])

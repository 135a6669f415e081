"""close() returns when the engine has stopped, from wherever it is called, and never waits for its own caller."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from kvrelay import Engine, EngineError, Handle
from rig import PROMPT, Stepped

LONG: dict[str, Any] = {"max_new_tokens": 200, "ignore_eos": True}


@pytest.fixture
def engine(batch_bundle: Path) -> Iterator[Engine]:
    with Engine(batch_bundle, max_batch=2) as made:
        yield made


def test_a_second_close_waits_too_also_after_an_interrupt_of_the_first(batch_bundle: Path) -> None:
    with Stepped(Engine(batch_bundle, max_batch=2)) as stepped:
        handle = stepped.engine.submit(PROMPT, **LONG)
        stepped.turn(3)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(KeyboardInterrupt):
                stepped.engine.close()
        finally:
            signal.signal(signal.SIGALRM, before)
        closers = [threading.Thread(target=stepped.engine.close) for _ in range(2)]
        for closer in closers:
            closer.start()
            closer.join(0.2)
            assert closer.is_alive(), "the loop is in a turn: it has not stopped"
        stepped.let_go()
        for closer in closers:
            closer.join(60)
            assert not closer.is_alive()
            assert handle.result(0).finish_reason == "cancelled"


@pytest.mark.parametrize("call", ["submit", "cancel", "result"])
def test_a_signal_handler_may_close_wherever_it_interrupts_a_call(batch_bundle: Path, call: str) -> None:
    files = ("scheduler.py", "handle.py", "latch.py", "threading.py")

    def interrupt(engine: Engine, at: int) -> bool:
        """Close at the line of this number, as a handler would on this thread; False if there are fewer."""
        handle = engine.submit(PROMPT, **LONG)
        seen = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal seen
            if Path(frame.f_code.co_filename).name not in files:
                return None
            seen += event == "line"
            if event == "line" and seen == at:
                engine.close()
            return trace

        sys.settrace(trace)
        try:
            if call == "submit":
                engine.submit(PROMPT, **LONG).result(60)
            elif call == "cancel":
                handle.cancel()
            else:
                handle.result(60)
        except EngineError:  # closed before the request was queued
            assert call == "submit"
        finally:
            sys.settrace(None)
        return seen >= at

    def every_line() -> None:
        for at in itertools.count(1):
            with Engine(batch_bundle, max_batch=2) as engine:
                if not interrupt(engine, at):
                    break
                tried.append(at)

    tried: list[int] = []
    thread = threading.Thread(target=every_line, daemon=True)
    thread.start()
    while thread.is_alive():
        before = len(tried)
        thread.join(60)
        assert not thread.is_alive() or len(tried) > before, f"close() hangs at line {before + 1} of {call}"
    assert tried


def test_the_engines_own_thread_may_close(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handle, "_push", lambda *_: engine.close())
    handle = engine.submit(PROMPT, **LONG)
    assert handle.result(60).finish_reason == "cancelled"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_told_to_make_its_own_engine(engine: Engine) -> None:
    engine.submit(PROMPT, max_new_tokens=2).result(60)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)  # ends what waits for ever
            try:
                engine.submit(PROMPT)
            except EngineError as error:
                code = 0 if f"in process {os.getppid()}" in str(error) and "spawn" in str(error) else 2
            engine.close()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert len(engine.submit(PROMPT, max_new_tokens=2, ignore_eos=True).result(60).token_ids) == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("wait", [lambda handle: handle.result(), lambda handle: list(handle.stream())])
def test_a_handle_does_not_wait_in_a_forked_process(engine: Engine, wait: Callable[[Handle], Any]) -> None:
    with Stepped(engine) as stepped:  # the loop stands still
        ended = engine.submit(PROMPT, max_new_tokens=2, ignore_eos=True)
        stepped.drain()
        assert ended.done
        handle = engine.submit(PROMPT, **LONG)
        stepped.turn(2)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(60)  # ends what waits for ever
                try:
                    wait(handle)
                except EngineError as error:
                    code = 0 if f"in process {os.getppid()}" in str(error) else 2
                handle.cancel()
                assert len(ended.result().token_ids) == 2
            except BaseException:
                code = 3
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        handle.cancel()
        stepped.drain()
        assert handle.result(60).finish_reason == "cancelled"


def test_a_request_is_counted_when_submit_returns(engine: Engine) -> None:
    with Stepped(engine) as stepped:  # the loop stands still
        before = engine.stats.submitted
        handles = [engine.submit(PROMPT, max_new_tokens=2, ignore_eos=True) for _ in range(3)]
        assert engine.stats.submitted == before + 3
        stepped.drain()
        assert [len(handle.result(60).token_ids) for handle in handles] == [2, 2, 2]
        assert engine.stats.submitted == before + 3
    with pytest.raises(EngineError, match="closed"):
        engine.submit(PROMPT)
    assert engine.stats.submitted == before + 3

"""Calls in flight: closing waits for those that run, whatever has interrupted others."""

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import CodeType, FrameType

import pytest

from unified_cache.core.errors import ClosedError
from unified_cache.storage_backends.common.calls import CallsInFlight

PATIENCE_S = 30.0
"""Longest wait for what must happen; reached only by a bug."""

STEPS_MAX = 500
"""Bytecodes of a call that enters and leaves, at most."""


class Interrupts:
    """A trace function that raises KeyboardInterrupt at the n-th bytecode of these functions."""

    def __init__(self, at: int, codes: tuple[CodeType, ...]) -> None:
        self.left = at
        self.codes = codes

    def __call__(self, frame: FrameType, event: str, argument: object) -> "Interrupts | None":
        if frame.f_code not in self.codes:
            return None
        frame.f_trace_opcodes = True
        if event in ("call", "opcode"):
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def call(calls: CallsInFlight) -> None:
    with calls:
        pass


def test_a_call_interrupted_at_any_point_leaves_nothing_that_a_close_waits_for() -> None:
    codes = (CallsInFlight.__enter__.__code__, CallsInFlight.__exit__.__code__, CallsInFlight._leave.__code__)
    interrupted_count = 0
    others = sys.gettrace()
    with ThreadPoolExecutor(1) as closer:
        for step in range(STEPS_MAX):
            calls = CallsInFlight("the store")
            try:
                sys.settrace(Interrupts(step, codes))
                call(calls)
            except KeyboardInterrupt:
                interrupted_count += 1
            else:
                break
            finally:
                sys.settrace(others)
            assert closer.submit(calls.close).result(PATIENCE_S), "another thread closes it"
    assert interrupted_count > 10, "at every point of a call"


def test_closing_waits_for_a_call_that_runs_and_refuses_the_next() -> None:
    calls, is_in, may_leave = CallsInFlight("the store"), Event(), Event()

    def stay() -> None:
        with calls:
            is_in.set()
            assert may_leave.wait(PATIENCE_S)

    with ThreadPoolExecutor(2) as threads:
        staying = threads.submit(stay)
        assert is_in.wait(PATIENCE_S)
        closing = threads.submit(calls.close)
        while not calls._closed:
            is_in.wait(0.001)
        with pytest.raises(ClosedError, match="the store was closed"):
            call(calls)
        assert not closing.done()
        may_leave.set()
        assert closing.result(PATIENCE_S)
        staying.result(PATIENCE_S)
    assert not calls.close(), "once is enough to let go"


def test_a_call_within_a_call_does_not_end_the_one_around_it() -> None:
    calls = CallsInFlight("the store")
    with ThreadPoolExecutor(1) as closer:
        with calls:
            call(calls)
            closing = closer.submit(calls.close)
            while not calls._closed:
                Event().wait(0.001)
            assert not closing.done()
        assert closing.result(PATIENCE_S)

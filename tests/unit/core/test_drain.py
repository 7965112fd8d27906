"""A drain in signal handlers: asked in the middle of anything, and by a signal that another thread was given."""

import signal
import sys
from itertools import count
from threading import Event, Thread
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from unified_cache.core.drain import Drain

if TYPE_CHECKING:
    from _typeshed import TraceFunction

SHORT_S = 0.2
STEPS_MIN = 5
PATIENCE_S = 20.0


def asked_at_step(step: int) -> bool:
    """Ask at one step of a wait, as a handler does; tell whether the wait had so many steps. It must tell that too."""
    drain, steps = Drain(), count()

    def trace(frame: FrameType, event: str, argument: object) -> "TraceFunction":
        if event == "line" and next(steps) == step:
            drain.ask()
        return trace

    other = sys.gettrace()  # of who measures coverage: without it, nothing that follows is measured
    sys.settrace(trace)
    try:
        found = drain.wait(SHORT_S)
    finally:
        sys.settrace(other)
    assert found == drain.wait(0)
    return found


@pytest.mark.timeout(60)
def test_a_handler_may_ask_at_every_step_of_a_wait() -> None:
    steps = next(step for step in count() if not asked_at_step(step))
    assert steps >= STEPS_MIN


@pytest.mark.timeout(60)
def test_a_signal_that_another_thread_was_given_ends_the_wait() -> None:
    drain, over = Drain(), Event()

    def be_given_a_signal() -> None:
        signal.raise_signal(signal.SIGUSR1)  # to the calling thread
        over.wait(PATIENCE_S)

    before = signal.signal(signal.SIGUSR1, lambda *_: drain.ask())
    other = Thread(target=be_given_a_signal)
    other.start()
    try:
        assert drain.wait(PATIENCE_S)
    finally:
        over.set()
        other.join()
        signal.signal(signal.SIGUSR1, before)


def test_asking_twice_is_asking_once() -> None:
    drain = Drain()
    assert not drain.wait(0)
    drain.ask()
    drain.ask()
    assert drain.wait(0)
    assert drain.wait(0)

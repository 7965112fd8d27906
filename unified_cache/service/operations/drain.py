"""Orderly end of a server: the first request lets calls finish, a second signal stops at once."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType

__all__ = ["Drain", "signals_drain"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_SIGNAL = 128
"""Added to a signal's number, the exit status of who died of it; as shells do."""


class Drain:
    """Request that the server end, made by a signal or by an administrator. Thread-safe."""

    def __init__(self) -> None:
        self._asked = Event()

    def ask(self) -> None:
        """Ask it to end; twice is once."""
        self._asked.set()

    @property
    def is_asked(self) -> bool:
        """True once somebody has asked."""
        return self._asked.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait at most ``timeout_s``, or for ever, until it is asked; tell whether it is."""
        return self._asked.wait(timeout_s)


@contextmanager
def signals_drain(drain: Drain, exit_now: Callable[[int], object] = os._exit) -> Iterator[None]:
    """Let SIGTERM and SIGINT ask for the end inside the with block, and the second of them stop at once.

    ``exit_now`` takes the exit status; nothing of this process runs after it. Main thread only.
    """
    signals_count = 0

    def signalled(number: int, frame: FrameType | None) -> None:
        nonlocal signals_count
        signals_count += 1
        if signals_count > 1:
            exit_now(EXIT_SIGNAL + number)
        drain.ask()

    before = {number: signal.signal(number, signalled) for number in SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)

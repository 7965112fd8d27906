"""Orderly end of a server: the first request lets calls finish, a second signal stops at once."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LOOK_S = 0.5
"""After this time at the latest a waiting main thread runs the handler of a signal that another thread was given."""
EXIT_SIGNAL = 128
"""Added to a signal's number, the exit status of who died of it; as shells do."""


class Drain:
    """Request that the server end, made by a signal or by an administrator. Thread-safe, and safe in signal handlers.

    A handler interrupts the main thread anywhere, so it must need no lock that this may hold, as an ``Event`` does.
    """

    def __init__(self) -> None:
        self._is_asked = False
        self._wakes: SimpleQueue[None] = SimpleQueue()
        """An item once it is asked. Its put may interrupt anything, its get and another put included."""

    def ask(self) -> None:
        """Ask it to end; twice is once."""
        if not self._is_asked:
            self._is_asked = True
            self._wakes.put(None)

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait at most ``timeout_s`` until it is asked; return whether it is. One thread at a time."""
        end_s = time.monotonic() + timeout_s
        while not self._is_asked and (left_s := end_s - time.monotonic()) > 0:
            # The system may hand a signal to any thread, which does not wake this one; its handler runs when this
            # one does something.
            with suppress(Empty):
                self._wakes.get(timeout=min(left_s, LOOK_S))
        return self._is_asked


@contextmanager
def signals_drain(drain: Drain, exit_now: Callable[[int], object] = os._exit) -> Iterator[None]:
    """Make SIGTERM and SIGINT ask for the end inside the with block, and the second of them stop at once.

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

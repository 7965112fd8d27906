"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable

POLL_S = 0.01


def wait_until(reached: Callable[[], bool], timeout_s: float, pause_s: float = POLL_S) -> bool:
    """Ask again and again, for at most ``timeout_s``; return whether it was reached."""
    deadline_s = time.monotonic() + timeout_s
    while not reached():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(pause_s)
    return True

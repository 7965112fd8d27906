"""A periodic check of things that can expire, on a thread that lives only while there are any."""

import threading
from collections.abc import Callable
from threading import Event, Lock

__all__ = ["PeriodicSweep"]

SWEEPS_PER_TERM = 4
"""Sweeps in the time that one thing may last: its end is noticed at most a quarter of that late."""


class PeriodicSweep:
    """Call ``sweep`` a few times in ``term_s``, until it returns False: nothing is left to check. Thread-safe."""

    def __init__(self, sweep: Callable[[], bool], term_s: float, name: str) -> None:
        self._sweep = sweep
        self._pause_s = term_s / SWEEPS_PER_TERM
        self._name = name
        self._is_running = False
        self._closed = Event()
        self._guard = Lock()

    def start(self) -> None:
        """Start the thread unless it runs; call this after there is something to check, while holding no guard."""
        with self._guard:
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Stop for good."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._pause_s):
            with self._guard:
                if not self._sweep():
                    self._is_running = False
                    return

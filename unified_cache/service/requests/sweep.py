"""Looking after things that may be late, on a thread that lives while there are any."""

import threading
from collections.abc import Callable
from threading import Event, Lock

__all__ = ["Rounds"]

LOOKS_PER_TERM = 4
"""Looks in the time that something may take: it is noticed at most a quarter late."""


class Rounds:
    """Call ``look`` a few times in ``term_s``, until it says that nothing is left. Thread-safe."""

    def __init__(self, look: Callable[[], bool], term_s: float, name: str) -> None:
        self._look = look
        self._pause_s = term_s / LOOKS_PER_TERM
        self._name = name
        self._is_looking = False
        self._closed = Event()
        self._guard = Lock()

    def begin(self) -> None:
        """Make sure that somebody looks; call it after something to look after is there, holding no guard."""
        with self._guard:
            if not self._is_looking:
                self._is_looking = True
                threading.Thread(target=self._go, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _go(self) -> None:
        while not self._closed.wait(self._pause_s):
            with self._guard:
                if not self._look():
                    self._is_looking = False
                    return

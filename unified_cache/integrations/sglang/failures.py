"""Log of what raised where nothing may raise: a line now and then, however often it happens."""

import logging
import time
from collections.abc import Callable
from threading import Lock

__all__ = ["FailureLog"]

logger = logging.getLogger(__name__)

PAUSE_S = 10.0
"""Time between two lines about the same type of failure."""


class FailureLog:
    """Failures by type, logged with their traceback at most every ten seconds. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, int] = {}
        self._next_s: dict[str, float] = {}
        self._guard = Lock()

    @property
    def count(self) -> int:
        """Failures so far."""
        with self._guard:
            return sum(self._counts.values())

    def add(self, error: Exception) -> None:
        """Count a failure, and log it if its type was not logged a moment ago."""
        kind, now_s = type(error).__name__, self._clock()
        with self._guard:
            self._counts[kind] = count = self._counts.get(kind, 0) + 1
            is_due = now_s >= self._next_s.get(kind, now_s)
            if is_due:
                self._next_s[kind] = now_s + PAUSE_S
        if is_due:
            logger.error("a storage call failed and counts as a miss (%s no. %d)", kind, count, exc_info=error)

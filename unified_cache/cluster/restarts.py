"""Restart policy of one process: how often it is restarted, and after which pause."""

from enum import Enum

__all__ = ["DELAYS_S", "STABLE_S", "ProcessPhase", "Restarts"]

DELAYS_S = (0.1, 0.5, 1.0, 2.0, 5.0)
"""Pause before each restart; after the last one, a process that dies again stays dead."""

STABLE_S = 60.0
"""A process that ran for so long has all its restarts again."""


class ProcessPhase(Enum):
    """Phase of a process: it runs, it waits for its restart, or it is not restarted any more."""

    RUNNING = "running"
    WAITING = "waiting for its restart"
    LOST = "lost"


class Restarts:
    """The restarts of one process. Times are seconds of one clock, which is the caller's."""

    def __init__(self, now_s: float) -> None:
        self.phase = ProcessPhase.RUNNING
        self.count = 0
        self._tries_count = 0
        self._started_s = now_s
        self._due_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """Whether the process has to be started now."""
        return self.phase is ProcessPhase.WAITING and now_s >= self._due_s

    def note_ended(self, now_s: float) -> None:
        """Note that it died, or that it could not be started."""
        if self.phase is ProcessPhase.RUNNING and now_s - self._started_s >= STABLE_S:
            self._tries_count = 0
        if self._tries_count == len(DELAYS_S):
            self.phase = ProcessPhase.LOST
            return
        self.phase = ProcessPhase.WAITING
        self._due_s = now_s + DELAYS_S[self._tries_count]
        self._tries_count += 1

    def note_started(self, now_s: float) -> None:
        """Note that it was started again."""
        self.phase = ProcessPhase.RUNNING
        self.count += 1
        self._started_s = now_s

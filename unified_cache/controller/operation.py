"""One transfer, from issue to release.

An operation is a generator that runs on the owner's thread. It pins and allocates, yields a *job*, and goes on when
the job has been run by a worker; ``with`` blocks around the ``yield`` give everything back however it ends. So the
life of a page reads from top to bottom, and success, failure, cancel and shutdown leave through the same door.
"""

from collections.abc import Generator
from enum import Enum
from typing import Protocol

from unified_cache.errors import CacheError

__all__ = ["Job", "JobQueue", "Leg", "Operation", "OperationState", "Steps"]


class JobQueue(Enum):
    """Which workers run a job: a store that hangs must not hold up copies."""

    COPY = "copy"
    STORAGE = "storage"


class Job(Protocol):
    """Bytes to move, on a worker's thread. Results are attributes, read after the ``yield``."""

    @property
    def queue(self) -> JobQueue:
        """Who runs it."""
        ...

    def run(self) -> None:
        """Do it; raise CacheError if it could not be done."""
        ...


Steps = Generator[Job, None, int]
"""An operation's life: yields jobs, returns the pages that reached where they should be."""


class Leg(Enum):
    """The four ways between tiers."""

    BACKUP = "backup"
    """Device to host; and on to storage where there is one."""
    LOAD = "load"
    """Host to device."""
    STORE = "store"
    """Host to storage."""
    PREFETCH = "prefetch"
    """Storage to host."""


class OperationState(Enum):
    """Where an operation stands."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Operation:
    """Handle of one transfer. Only the controller changes it."""

    __slots__ = ("_steps", "error", "leg", "pages_count", "state")

    def __init__(self, leg: Leg, steps: Steps) -> None:
        self.leg = leg
        self.state = OperationState.RUNNING
        self.pages_count = 0
        """Pages that reached where they should be, once it is done. Zero is an answer, not a failure."""
        self.error: CacheError | None = None
        """Why it failed, if it did."""
        self._steps = steps

    def advance(self, error: CacheError | None) -> Job | None:
        """Go on after a job that ended with ``error`` or well; return the next job, None if this was the end.

        Runs on the owner's thread.
        """
        try:
            return next(self._steps) if error is None else self._steps.throw(error)
        except StopIteration as stop:
            self.state = OperationState.DONE
            self.pages_count = stop.value
        except CacheError as failure:
            self.state = OperationState.FAILED
            self.error = failure
        return None

    def abort(self, reason: CacheError) -> None:
        """End it before its time; what it held is given back. No job of it may be running."""
        self._steps.close()
        self.state = OperationState.FAILED
        self.error = reason

"""Order in which jobs of one kind get a thread: what a request waits for before backups and clears."""

from collections import deque
from dataclasses import dataclass
from threading import Condition, Lock

from unified_cache.controller.operation import Job, Operation
from unified_cache.storage_backends.wrappers import CallWatch

__all__ = ["JobLine", "JobRun"]

URGENT_TURNS_MAX = 16
"""Urgent jobs in a row while another waits that could run: a flood of requests slows backups, and starves none."""


@dataclass(slots=True, eq=False)
class JobRun:
    """A job from the moment it is queued until its operation is told, turn by turn."""

    operation: Operation
    job: Job
    watch: CallWatch | None = None
    """Watch over the calls to a store of the turn that runs; None where nobody has to watch."""
    is_replaced: bool = False
    """Whether another thread has taken the place of the one that it hangs on."""
    is_deferrable_turn: bool = False
    """Whether it counts among the deferrable jobs that have a thread."""


class JobLine:
    """Jobs waiting for one of ``threads_count`` threads: urgent ones, and deferrable ones behind them.

    Deferrable jobs have all threads but one, and one if there is one alone; so what a request waits for finds a thread
    that no backup is on. A deferrable job that is not over after its turn goes to the end of the line. Thread-safe.
    """

    __slots__ = ("_changed", "_closed", "_deferrable", "_deferrable_max", "_running_count", "_urgent", "_urgent_turns")

    def __init__(self, threads_count: int) -> None:
        self._urgent: deque[JobRun] = deque()
        self._deferrable: deque[JobRun] = deque()
        self._deferrable_max = max(1, threads_count - 1)
        self._running_count = 0
        """Deferrable jobs that have a thread."""
        self._urgent_turns = 0
        """In a row, while a deferrable job could have run."""
        self._closed = False
        self._changed = Condition(Lock())

    def put(self, run: JobRun) -> None:
        """Let a job wait for its first turn, or its next."""
        with self._changed:
            (self._urgent if run.job.is_urgent else self._deferrable).append(run)
            self._changed.notify()

    def take(self) -> JobRun | None:
        """Wait for the job whose turn it is; None once the line is closed and nobody waits. Give it to ``leave``."""
        with self._changed:
            while True:
                run = self._next()
                if run is not None or (self._closed and not self._urgent and not self._deferrable):
                    return run
                self._changed.wait()

    def leave(self, run: JobRun) -> None:
        """Note that a turn is over, or that nobody waits for it any more; a second time changes nothing."""
        with self._changed:
            if run.is_deferrable_turn:
                run.is_deferrable_turn = False
                self._running_count -= 1
                self._changed.notify()

    def close(self) -> None:
        """Let threads go once no job waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> JobRun | None:
        may_defer = bool(self._deferrable) and self._running_count < self._deferrable_max
        if self._urgent and not (may_defer and self._urgent_turns >= URGENT_TURNS_MAX):
            self._urgent_turns = self._urgent_turns + 1 if may_defer else 0
            return self._urgent.popleft()
        if not may_defer:
            return None
        self._urgent_turns = 0
        self._running_count += 1
        run = self._deferrable.popleft()
        run.is_deferrable_turn = True
        return run

"""Workers under a scheduler: every job is begun, moved on and ended by a step of its own, in any order."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.sim.faults import COPY_FAIL_RATE, Faults
from tests.sim.job_audit import JobAudit, PutAs
from tests.sim.memory import ContentMemory
from tests.support.clock import ManualClock
from tests.support.store_calls import StoreCall, WatchedStorage
from unified_cache.controller import Operation, OperationState, TransferKind
from unified_cache.controller.controller import Finished, run_turn
from unified_cache.controller.jobs import FetchJob, StoreJob
from unified_cache.controller.operation import Job
from unified_cache.core.errors import CacheError, CopyError

OVER = object()
LAG_S_MAX = 0.02
"""How long a job may lie in its queue."""


@dataclass(eq=False)
class ScheduledJob:
    """A job from its submission until its operation is told."""

    operation: Operation
    job: Job
    due_s: float
    copies: list[Callable[[], None]] = field(default_factory=list)
    """Of a job that has begun: what it has still to move, in its order."""
    has_begun: bool = False
    has_run: bool = False
    """It is over but for its copies."""
    put_as: PutAs = PutAs.ALLOWED
    error: CacheError | None = None
    calls: list[StoreCall] = field(default_factory=list)
    """Of a job that has begun: its calls to the store, with what came of them."""
    turns: Iterator[None] | None = None
    """Of a fetch that has begun: the calls that it has still to make."""

    @property
    def is_void(self) -> bool:
        """Whether it has still to take back what it has put."""
        return self.put_as is PutAs.VOID and not self.has_run and isinstance(self.job, StoreJob)

    def run(self) -> tuple[bool, CacheError | None]:
        """Run a turn; of a fetch that is one call, so that others come between."""
        if not isinstance(self.job, FetchJob):
            return run_turn(self.job)
        self.turns = self.turns or self.job.calls()
        try:
            return next(self.turns, OVER) is OVER, None
        except CacheError as error:
            return True, error


class LaggingWorkers:
    """Jobs wait, run in slices and end when the scheduler calls ``step``; their operations hear of it later still."""

    def __init__(
        self, rng: random.Random, clock: ManualClock, memory: ContentMemory, faults: Faults, audit: JobAudit
    ) -> None:
        self._rng = rng
        self._clock = clock
        self._memory = memory
        self._faults = faults
        self._audit = audit
        self.store: WatchedStorage | None = None
        """The store that jobs call; None while there is none."""
        self.tasks: list[ScheduledJob] = []
        """Every job whose operation has not been told of its end, in the order they were submitted."""
        self._clears: list[Operation] = []
        self._over: list[ScheduledJob] = []
        """Those that have ended."""

    def submit(self, operation: Operation, job: Job) -> None:
        """Queue a job."""
        if operation.kind is TransferKind.CLEAR:
            self._clears.append(operation)
            for other in self.tasks:
                if other.has_begun and not other.has_run and other.put_as is PutAs.ALLOWED:
                    other.put_as = PutAs.VOID
        self.tasks.append(ScheduledJob(operation, job, self._clock() + self._rng.random() * LAG_S_MAX))

    def step(self) -> str:
        """Move one job on by one slice, whichever the seed says; tell what was done, nothing if all wait."""
        ready = [task for task in self.tasks if task.due_s <= self._clock() and task not in self._over]
        if not ready:
            return "idle"
        task = self._rng.choice(ready)
        if not task.has_run:
            self._run_turn(task)
            return f"run {type(task.job).__name__}"
        if task.copies and task.error is None:
            if self._faults.strikes("copy fails", COPY_FAIL_RATE):
                task.error = CopyError("a copy fails on purpose")
            else:
                task.copies.pop(0)()
            return "copy"
        self._over.append(task)
        return "end"

    def _run_turn(self, task: ScheduledJob) -> None:
        """Run a turn of a job; once it is over, compare it with what it was made for."""
        told_to_stop = task.operation.is_stopping or task.operation.state is not OperationState.RUNNING
        if not task.has_begun:
            task.has_begun = True
            is_clearing = any(not clear.is_released for clear in self._clears)  # on another rank perhaps, and over here
            if is_clearing or any(other.is_void for other in self.tasks):
                task.put_as = PutAs.BARRED
        self._memory.captured, self._memory.moved = [], []
        before_s = self._clock()
        task.has_run, task.error = task.run()
        task.copies, self._memory.captured = self._memory.captured, None
        calls = [] if self.store is None else self.store.take()
        assert not (told_to_stop and calls), "a job went on calling the store though it was told to stop"
        task.calls += self._audit.verified(task.job, calls)
        if task.has_run:
            self._audit.check_copies(task.job, self._memory.moved)
            has_deadline = task.operation.respond_by_s < math.inf
            stopped = told_to_stop or (has_deadline and isinstance(task.job, FetchJob) and task.job._stopped)
            self._audit.check_calls(task.job, task.calls, task.put_as, was_stopped=stopped, error=task.error)
        # A store's delay is the job's own: the rest of the world does not wait for it.
        task.due_s += self._clock() - before_s
        self._clock.now_s = before_s

    def finished(self, timeout_s: float) -> list[Finished]:
        """Hand over one job that has ended; with time to wait, move jobs on until there is one."""
        while timeout_s > 0 and self.tasks and not self._over:
            if self.step() == "idle":
                self._clock.now_s = min(task.due_s for task in self.tasks)
        if not self._over:
            self._clock.sleep(min(max(timeout_s, 0.0), LAG_S_MAX))  # another rank may need the rest
            return []
        task = self._over.pop(self._rng.randrange(len(self._over)))
        self.tasks.remove(task)
        return [(task.operation, task.error)]

    def close(self, timeout_s: float) -> list[str]:
        """Forget the jobs that wait; there is no worker to stop."""
        self.tasks.clear()
        self._over.clear()
        return []

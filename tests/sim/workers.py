"""Workers under a scheduler: every job is begun, moved on and ended by a step of its own, in any order."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.sim.faults import COPY_FAIL_RATE, Faults
from tests.sim.memory import ContentMemory
from tests.support.clock import ManualClock
from tests.support.store_calls import ScriptedStorage
from unified_cache.controller import Operation, OperationState
from unified_cache.controller.controller import Finished, run_turn
from unified_cache.controller.jobs import FetchJob
from unified_cache.controller.operation import Job
from unified_cache.core.errors import CacheError, CopyError
from unified_cache.storage_backends.wrappers.layer import Method

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
    has_run: bool = False
    """It is over but for its copies."""
    error: CacheError | None = None
    turns: Iterator[None] | None = None
    """Of a fetch that has begun: the calls that it has still to make."""

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

    def __init__(self, rng: random.Random, clock: ManualClock, memory: ContentMemory, faults: Faults) -> None:
        self._rng = rng
        self._clock = clock
        self._memory = memory
        self._faults = faults
        self.store: ScriptedStorage | None = None
        """The store that jobs call; None while there is none."""
        self.tasks: list[ScheduledJob] = []
        """Every job whose operation has not been told of its end, in the order they were submitted."""
        self._over: list[ScheduledJob] = []
        """Those that have ended."""

    def submit(self, operation: Operation, job: Job) -> None:
        """Queue a job."""
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
        """Run a turn of a job: one that was told to stop before it calls the store no more."""
        told_to_stop = task.operation.is_stopping or task.operation.state is not OperationState.RUNNING
        self._memory.captured = []
        before_s = self._clock()
        task.has_run, task.error = task.run()
        task.copies, self._memory.captured = self._memory.captured, None
        calls = [] if self.store is None else [call.method for call in self.store.take()]
        called = any(method in calls for method in (Method.EXISTS, Method.GET, Method.PUT))
        assert not (told_to_stop and called), "a job went on calling the store though it was told to stop"
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

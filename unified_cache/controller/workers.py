"""Workers that run jobs: threads, or the owner itself for a deterministic run."""

import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from typing import Protocol

from unified_cache.controller.operation import Job, JobQueue, Operation
from unified_cache.errors import CacheError, CopyError, StorageError, StorageTimeoutError
from unified_cache.storage_backends.common.bounded_call import AGAIN, LOOK_S, Again, BoundedCall, CallThreads

__all__ = ["Finished", "InlineWorkers", "ThreadWorkers", "Workers"]

Finished = tuple[Operation, CacheError | None]
"""An operation whose job has ended, and how."""


class Workers(Protocol):
    """Run jobs somewhere and hand back which operations may go on.

    Queues need no bound of their own: an operation has one job at a time, and the controller bounds operations.
    """

    def submit(self, operation: Operation, job: Job) -> None:
        """Have ``job`` run; never blocks."""
        ...

    def finished(self, timeout_s: float) -> Iterable[Finished]:
        """Return all jobs that ended since the last call; wait for the first one at most ``timeout_s``."""
        ...

    def close(self, timeout_s: float) -> list[str]:
        """Stop; return the names of workers that did not within ``timeout_s``."""
        ...


def run_turn(job: Job) -> tuple[bool, CacheError | None]:
    """Run a turn of a job; tell whether the job is over, and why it failed, if it did.

    A worker survives whatever a job or a backend raises.
    """
    try:
        return job.run(), None
    except BaseException as error:  # the edge: other people's code runs here (a panic of a native library is no
        # Exception), and the thread must live
        return True, failure_of(job, error)


def failure_of(job: Job, error: BaseException) -> CacheError:
    """Return what a job has failed by that raised ``error``."""
    if isinstance(error, CacheError):
        return error
    reason = f"{type(error).__name__} in a transfer: {error}"
    in_storage = job.queue is JobQueue.STORAGE
    failure: CacheError = StorageError(reason, retryable=False) if in_storage else CopyError(reason)
    failure.__cause__ = error
    return failure


def run_job(job: Job) -> CacheError | None:
    """Run a job to its end and return why it failed, if it did: for workers without threads."""
    while True:
        is_over, error = run_turn(job)
        if is_over:
            return error


class InlineWorkers:
    """Run each job at once, on the caller's thread."""

    __slots__ = ("_finished",)

    def __init__(self) -> None:
        self._finished: deque[Finished] = deque()

    def submit(self, operation: Operation, job: Job) -> None:
        """Run ``job`` now; its operation goes on at the next ``finished``.

        Raises:
            KeyboardInterrupt, SystemExit: they came while the job ran, on the caller's thread. The job has failed.
        """
        failure = run_job(job)
        self._finished.append((operation, failure))
        if failure is not None and isinstance(failure.__cause__, (KeyboardInterrupt, SystemExit)):
            raise failure.__cause__

    def finished(self, timeout_s: float) -> list[Finished]:
        """Return all jobs run since the last call; never waits, there is nothing to wait for."""
        finished = list(self._finished)
        self._finished.clear()
        return finished

    def close(self, timeout_s: float) -> list[str]:
        """Do nothing: there is no worker to stop."""
        return []


class ThreadWorkers:
    """Threads for each kind of job, on demand, and those that hang in a call to a store.

    A job whose store does not return from a call in time has ended, for its operation, by StorageTimeoutError: whoever
    asks for ``finished`` gives it up. Another thread takes the place of the one that hangs, which ends when the store
    returns. The store's guard bounds how many can hang, and fails what is started beyond that at once. What a request
    waits for goes first, and finds a thread that no backup and no clear is on.
    """

    __slots__ = ("_finished", "_has_finished", "_threads")

    def __init__(self, threads: Mapping[JobQueue, CallThreads]) -> None:
        self._threads = threads
        self._finished: deque[Finished] = deque()
        self._has_finished = threading.Event()

    @classmethod
    def start(cls, *, copy: int = 2, storage: int = 2) -> "ThreadWorkers":
        """Have ``copy`` threads for copies, so that a load goes beside a backup, and ``storage`` for storage."""
        counts = {JobQueue.COPY: copy, JobQueue.STORAGE: storage}
        return cls({kind: CallThreads(kind.value, n, deferrable_max=max(1, n - 1)) for kind, n in counts.items()})

    def submit(self, operation: Operation, job: Job) -> None:
        """Queue ``job`` for the threads of its kind."""

        def turn() -> Again | None:
            return None if job.run() else AGAIN

        def finish(call: BoundedCall[Again | None]) -> None:
            self._finish(operation, job, call.take_error())

        self._threads[job.queue].submit(turn, finish, is_urgent=job.is_urgent)

    def finished(self, timeout_s: float) -> Generator[Finished, None, None]:
        """Yield all jobs that ended since the last call; wait for the first one at most ``timeout_s``.

        An interrupt of the owner's thread loses none: what may not have been taken is yielded once more.
        """
        self._has_finished.clear()
        wait_s = min(timeout_s, LOOK_S)
        if not self._finished and wait_s > 0:
            self._has_finished.wait(wait_s)
        for threads in self._threads.values():
            threads.give_up_late()
        while self._finished:
            yield self._finished[0]
            self._finished.popleft()

    def close(self, timeout_s: float) -> list[str]:
        """Let queued jobs end and stop the threads; name those that did not stop within ``timeout_s``, all together.

        Threads of jobs that were given up are not waited for: their stores are named by their calls.
        """
        until_s = time.monotonic() + timeout_s
        for threads in self._threads.values():
            threads.close(0)
        return [name for each in self._threads.values() for name in each.close(until_s - time.monotonic())]

    def _finish(self, operation: Operation, job: Job, error: BaseException | None) -> None:
        if isinstance(error, StorageTimeoutError):
            job.stop()  # its thread may go on with it
        self._finished.append((operation, None if error is None else failure_of(job, error)))
        self._has_finished.set()

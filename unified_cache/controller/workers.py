"""Who runs jobs: threads, or the owner itself for a deterministic run."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import Protocol

from unified_cache.controller.operation import Job, JobQueue, Operation
from unified_cache.errors import CacheError, CopyError, StorageError

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

    def finished(self, timeout_s: float) -> list[Finished]:
        """Return all jobs that ended since the last call; wait for the first one at most ``timeout_s``."""
        ...

    def close(self, timeout_s: float) -> list[str]:
        """Stop; return the names of workers that did not within ``timeout_s``."""
        ...


def run_job(job: Job) -> CacheError | None:
    """Run a job and return why it failed, if it did: a worker survives whatever a job or a backend raises."""
    try:
        job.run()
    except CacheError as error:
        return error
    except BaseException as error:  # the edge: other people's code runs here (a panic of a native library is no
        # Exception), and the thread must live
        reason = f"{type(error).__name__} in a transfer: {error}"
        in_storage = job.queue is JobQueue.STORAGE
        failure: CacheError = StorageError(reason, retryable=False) if in_storage else CopyError(reason)
        failure.__cause__ = error
        return failure
    return None


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
    """A fixed number of daemon threads behind one queue per kind of job."""

    __slots__ = ("_finished", "_queues", "_threads")

    def __init__(self, counts: Mapping[JobQueue, int]) -> None:
        """Make ``counts[kind]`` threads for each kind of job; ``start`` starts them."""
        self._finished: SimpleQueue[Finished] = SimpleQueue()
        self._queues: dict[JobQueue, SimpleQueue[tuple[Operation, Job] | None]] = {
            kind: SimpleQueue() for kind in counts
        }
        self._threads = [
            (kind, threading.Thread(target=self._work, args=(kind,), name=f"{kind.value}-{number}", daemon=True))
            for kind, count in counts.items()
            for number in range(count)
        ]

    @classmethod
    def start(cls, *, copy: int = 1, storage: int = 2) -> "ThreadWorkers":
        """Start ``copy`` threads for copies and ``storage`` for storage."""
        workers = cls({JobQueue.COPY: copy, JobQueue.STORAGE: storage})
        for _, thread in workers._threads:
            thread.start()
        return workers

    def submit(self, operation: Operation, job: Job) -> None:
        """Queue ``job`` for the threads of its kind."""
        self._queues[job.queue].put((operation, job))

    def finished(self, timeout_s: float) -> list[Finished]:
        """Return all jobs that ended since the last call; wait for the first one at most ``timeout_s``."""
        finished: list[Finished] = []
        try:
            finished.append(self._finished.get(timeout=timeout_s) if timeout_s > 0 else self._finished.get_nowait())
            while True:
                finished.append(self._finished.get_nowait())
        except Empty:
            return finished

    def close(self, timeout_s: float) -> list[str]:
        """Let queued jobs end and stop the threads; name those that did not stop within ``timeout_s``, all together."""
        for kind, _ in self._threads:
            self._queues[kind].put(None)
        deadline_s = time.monotonic() + timeout_s
        for _, thread in self._threads:
            thread.join(max(0, deadline_s - time.monotonic()))
        return [thread.name for _, thread in self._threads if thread.is_alive()]

    def _work(self, kind: JobQueue) -> None:
        while (item := self._queues[kind].get()) is not None:
            operation, job = item
            self._finished.put((operation, run_job(job)))

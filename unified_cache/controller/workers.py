"""Workers that run jobs: threads, or the owner itself for a deterministic run."""

import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from typing import Protocol

from unified_cache.controller.job_line import JobLine, JobRun
from unified_cache.controller.operation import Job, JobQueue, Operation
from unified_cache.errors import CacheError, CopyError, StorageError

__all__ = ["Finished", "InlineWorkers", "ThreadWorkers", "Workers"]

LATE_LOOK_S = 0.05
"""Between two looks, while somebody waits for jobs, whether one is late."""

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
    except CacheError as error:
        return True, error
    except BaseException as error:  # the edge: other people's code runs here (a panic of a native library is no
        # Exception), and the thread must live
        reason = f"{type(error).__name__} in a transfer: {error}"
        in_storage = job.queue is JobQueue.STORAGE
        failure: CacheError = StorageError(reason, retryable=False) if in_storage else CopyError(reason)
        failure.__cause__ = error
        return True, failure


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
    """A fixed number of daemon threads behind one line per kind of job, and those that hang in a call to a store.

    A job whose store does not return from a call in time has ended, for its operation, by StorageTimeoutError: whoever
    asks for ``finished`` gives it up. Another thread takes the place of the one that hangs, which ends when the store
    returns. The store's guard bounds how many can hang, and fails what is started beyond that at once.
    """

    __slots__ = ("_closed", "_finished", "_has_finished", "_lines", "_runs", "_threads", "_threads_count")

    def __init__(self, counts: Mapping[JobQueue, int]) -> None:
        """Make ``counts[kind]`` threads for each kind of job; ``start`` starts them."""
        self._finished: deque[Finished] = deque()
        self._has_finished = threading.Event()
        self._lines = {kind: JobLine(count) for kind, count in counts.items()}
        self._threads_count = dict.fromkeys(counts, 0)
        """Of each kind, ever made."""
        self._threads = {self._new_thread(kind): kind for kind, count in counts.items() for _ in range(count)}
        self._runs: dict[threading.Thread, JobRun] = {}
        """By thread: the job that it runs, if it is watched. A thread enters and removes its own."""
        self._closed = False

    @classmethod
    def start(cls, *, copy: int = 2, storage: int = 2) -> "ThreadWorkers":
        """Start ``copy`` threads for copies, so that a load goes beside a backup, and ``storage`` for storage."""
        workers = cls({JobQueue.COPY: copy, JobQueue.STORAGE: storage})
        for thread in workers._threads:
            thread.start()
        return workers

    def submit(self, operation: Operation, job: Job) -> None:
        """Queue ``job`` for the threads of its kind."""
        self._lines[job.queue].put(JobRun(operation, job))

    def finished(self, timeout_s: float) -> Generator[Finished, None, None]:
        """Yield all jobs that ended since the last call; wait for the first one at most ``timeout_s``.

        An interrupt of the owner's thread loses none: what may not have been taken is yielded once more.
        """
        self._has_finished.clear()
        wait_s = min(timeout_s, LATE_LOOK_S)
        if not self._finished and wait_s > 0:
            self._has_finished.wait(wait_s)
        self._give_up_late()
        while self._finished:
            yield self._finished[0]
            self._finished.popleft()

    def close(self, timeout_s: float) -> list[str]:
        """Let queued jobs end and stop the threads; name those that did not stop within ``timeout_s``, all together.

        Threads of jobs that were given up are not waited for: their stores are named by their calls.
        """
        self._closed = True
        for line in self._lines.values():
            line.close()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0, deadline_s - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _new_thread(self, kind: JobQueue) -> threading.Thread:
        name = f"{kind.value}-{self._threads_count[kind]}"
        self._threads_count[kind] += 1
        return threading.Thread(target=self._work, args=(self._lines[kind],), name=name, daemon=True)

    def _work(self, line: JobLine) -> None:
        thread = threading.current_thread()
        while (run := line.take()) is not None:
            is_over, error = self._run_turn(thread, run)
            line.leave(run)
            if run.watch is not None and run.watch.is_given_up:
                if run.is_replaced:
                    return
            elif is_over:
                self._finish(run.operation, error)
            else:
                line.put(run)

    def _run_turn(self, thread: threading.Thread, run: JobRun) -> tuple[bool, CacheError | None]:
        if run.job.guard is None:
            return run_turn(run.job)
        run.watch = run.job.guard.watch()
        self._runs[thread] = run
        with run.watch:
            outcome = run_turn(run.job)
        del self._runs[thread]
        return outcome

    def _finish(self, operation: Operation, error: CacheError | None) -> None:
        self._finished.append((operation, error))
        self._has_finished.set()

    def _give_up_late(self) -> None:
        """Give up the jobs whose calls are late, and put other threads in the place of theirs."""
        for thread, run in self._runs.copy().items():
            error = None if run.watch is None else run.watch.give_up_if_late()
            if error is not None:
                run.job.stop()
                self._replace(thread, run)
                self._finish(run.operation, error)

    def _replace(self, thread: threading.Thread, run: JobRun) -> None:
        run.is_replaced = True  # before there is another: the late thread may go on at any moment
        kind = self._threads.pop(thread)
        self._lines[kind].leave(run)
        if self._closed:
            return
        other = self._new_thread(kind)
        try:
            other.start()
        except RuntimeError:  # the system has no thread left: the late one goes on once its store has returned
            other, run.is_replaced = thread, False
        self._threads[other] = kind

"""Run operations: workers run their jobs, and each goes on when the owner polls. Never sees the tree."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeGuard

import numpy as np

from unified_cache.controller.operation import (
    Job,
    NotStarted,
    Operation,
    OperationState,
    PageTally,
    Steps,
    TransferKind,
)
from unified_cache.controller.ranks.group import LocalRanks, RankGroup, failed_ranks
from unified_cache.core.errors import (
    CacheError,
    CallInFlight,
    CancelledError,
    ClosedError,
    CopyError,
    InternalError,
    OperationTimeoutError,
    RankError,
    RankLostError,
    StorageError,
    StorageTimeoutError,
    WaitTimeoutError,
)
from unified_cache.storage_backends.common.bounded_call import AGAIN, LOOK_S, Again, BoundedCall, CallThreads

Finished = tuple[Operation, CacheError | None]
"""An operation whose job has ended, and how."""


class Workers(Protocol):
    """Run jobs somewhere and hand back which operations may go on.

    Queues need no bound of their own: an operation has one job at a time, and the controller bounds operations.
    """

    def submit(self, operation: Operation, job: Job) -> None:
        """Queue ``job``; never blocks."""
        ...

    def finished(self, timeout_s: float) -> Iterable[Finished]:
        """Return all jobs that ended since the last call; wait for the first one at most ``timeout_s``."""
        ...

    def close(self, timeout_s: float) -> list[str]:
        """Stop; return the names of workers that did not within ``timeout_s``."""
        ...


def run_turn(job: Job) -> tuple[bool, CacheError | None]:
    """Run a turn of a job; return whether the job is over, and why it failed, if it did."""
    try:
        return job.run(), None
    except BaseException as error:  # noqa: BLE001  # the edge: other people's code runs here (a panic of a native
        # library is no Exception), and the thread must live
        return True, failure_of(job, error)


def failure_of(job: Job, error: BaseException) -> CacheError:
    """Return what a job has failed by that raised ``error``."""
    if isinstance(error, CacheError):
        return error
    reason = f"{type(error).__name__} in a transfer: {error}"
    failure: CacheError = StorageError(reason, retryable=False) if job.uses_storage else CopyError(reason)
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

    A job whose store does not return from a call in time ends by StorageTimeoutError, and another thread takes the
    place of its own. What a request waits for goes first, and finds a thread that no backup and no clear is on.
    """

    __slots__ = ("_copying", "_finished", "_has_finished", "_storing")

    def __init__(self, copying: CallThreads, storing: CallThreads) -> None:
        self._copying = copying
        self._storing = storing
        self._finished: deque[Finished] = deque()
        self._has_finished = threading.Event()

    @classmethod
    def start(cls, *, copy: int = 2, storage: int = 2) -> "ThreadWorkers":
        """Start ``copy`` threads for copies, so that a load runs beside a backup, and ``storage`` for storage."""
        return cls(
            CallThreads("copy", copy, deferrable_max=max(1, copy - 1)),
            CallThreads("storage", storage, deferrable_max=max(1, storage - 1)),
        )

    def submit(self, operation: Operation, job: Job) -> None:
        """Queue ``job`` for the threads of its kind."""

        def turn() -> Again | None:
            return None if job.run() else AGAIN

        def finish(call: BoundedCall[Again | None]) -> None:
            error = call.take_error()
            self._finished.append((operation, None if error is None else failure_of(job, error)))
            self._has_finished.set()

        threads = self._storing if job.uses_storage else self._copying
        threads.submit(turn, finish, is_urgent=job.is_urgent)

    def finished(self, timeout_s: float) -> Generator[Finished, None, None]:
        """Yield all jobs that ended since the last call; wait for the first one at most ``timeout_s``.

        An interrupt of the owner's thread loses none: what may not have been taken is yielded once more.
        """
        self._has_finished.clear()
        wait_s = min(timeout_s, LOOK_S)
        if not self._finished and wait_s > 0:
            self._has_finished.wait(wait_s)
        self._copying.give_up_late()
        self._storing.give_up_late()
        while self._finished:
            yield self._finished[0]
            self._finished.popleft()

    def close(self, timeout_s: float) -> list[str]:
        """Finish queued jobs and stop the threads; name those that did not stop within ``timeout_s``, all together."""
        until_s = time.monotonic() + timeout_s
        for threads in (self._copying, self._storing):
            threads.close(0)
        return [name for each in (self._copying, self._storing) for name in each.close(until_s - time.monotonic())]


logger = logging.getLogger(__name__)

QUARANTINE_LOOK_S = 0.02
"""Between two looks, while nothing else is left to wait for, whether a store has returned from a call given up."""

RANKS_LOOK_S = 0.005
"""Longest wait for a job of this rank's own while others may wait for this rank; also, every 5 ms one collective."""


class Readiness(NamedTuple):
    """Readiness of an operation to go on: on this rank, or, once agreed on, on all ranks."""

    ended: bool
    """Its job has ended."""
    succeeded: bool
    """Its job has ended without an error."""
    free: bool
    """Nobody uses its pages: no store that is still in its call (quarantine), no engine that reads layer by layer."""
    in_time: bool
    unanswered: bool
    """Its request may still wait; once this is False, it is done, and what arrives later is for others."""


@dataclass(slots=True)
class OperationCounts:
    """Operations of one kind by outcome, since the cache was opened."""

    done: int = 0
    partial: int = 0
    """Ended well, and left pages out: ``pages`` says why."""
    failed: int = 0
    cancelled: int = 0
    declined: int = 0
    """Not started, because too many were under way or a rank is lost."""
    pages: PageTally = field(default_factory=PageTally)
    """Pages that all of them were asked for, those asked for again once more."""

    def add(self, operation: Operation) -> None:
        """Count an operation that is over."""
        if operation.state is OperationState.DONE:
            self.done += 1
        elif operation.state is OperationState.PARTIAL:
            self.partial += 1
        elif operation.state is OperationState.CANCELLED:
            self.cancelled += 1
        else:
            self.failed += 1
        self.pages.add(operation.tally)

    def copy(self) -> "OperationCounts":
        """Return them, the caller's own."""
        pages = PageTally()
        pages.add(self.pages)
        return replace(self, pages=pages)


class Controller:
    """Operations under way, at most ``operations_max``, each for at most ``timeout_s``. As HiCacheController in SGLang.

    Everything but the jobs themselves runs on the owner's thread. An operation is *live* until it has given back what
    it held: that is after its outcome is known, where its job still runs, where a late store may still use its pages
    (quarantine), and where an engine follows it.

    When jobs end, how, and what the clock says differs between ranks. So each look at the operations takes one
    agreement on the readiness of each, and they go on in the order in which they started: on every rank the same ones,
    after the same look. What failed on one rank has failed.
    """

    __slots__ = (
        "_clock",
        "_completed",
        "_ended",
        "_is_loss_reported",
        "_live",
        "_operations_max",
        "_ranks",
        "_timeout_s",
        "_workers",
        "counts",
        "released_count",
    )

    def __init__(
        self,
        workers: Workers,
        operations_max: int,
        timeout_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        ranks: RankGroup = LocalRanks(),
    ) -> None:
        self._workers = workers
        self._operations_max = operations_max
        self._timeout_s = timeout_s
        self._clock = clock
        self._ranks = ranks
        self._live: dict[Operation, None] = {}
        """In the order in which they started."""
        self._ended: dict[Operation, CacheError | None] = {}
        """Of those, the ones whose job has ended on this rank, and how; they wait for other ranks, or in quarantine."""
        self._completed: list[Operation] = []
        """Those whose outcome has become known since the last poll."""
        self.counts = {kind: OperationCounts() for kind in TransferKind}
        """Operations by kind and outcome: those that ``take_completed`` has returned, and those that never began."""
        self.released_count = 0
        """Operations so far that have given back what they held while a job of theirs ran."""
        self._is_loss_reported = False
        """Whether the caller knows that a rank is lost."""

    @property
    def live_count(self) -> int:
        """Operations that hold something."""
        return len(self._live)

    @property
    def room(self) -> int:
        """Operations that may start now, beside those that are live."""
        return self._operations_max - len(self._live)

    @property
    def quarantined(self) -> list[CallInFlight]:
        """Calls that a store has not returned from in time; each holds the pages of its operation."""
        return [error.call for error in self._ended.values() if in_flight(error)]

    def start(
        self,
        kind: TransferKind,
        steps: Steps,
        deadline_s: float = math.inf,
        tally: PageTally | None = None,
        keep: Callable[[Operation], None] | None = None,
    ) -> Operation | NotStarted:
        """Start an operation, unless too many are under way or a rank is lost; stop it after ``deadline_s``.

        ``keep`` keeps what its job has brought by then; without it, it ends with its job.
        """
        if len(self._live) >= self._operations_max or self._ranks.is_lost:
            self.counts[kind].declined += 1
            return NotStarted.RANK_LOST if self._ranks.is_lost else NotStarted.TOO_MANY
        now_s = self._clock()
        operation = Operation(kind, steps, now_s, now_s + self._timeout_s, now_s + deadline_s, tally, keep)
        operation.advance(None)
        if operation.state is not OperationState.RUNNING:
            self._completed.append(operation)
        if not operation.is_released:
            self._live[operation] = None
            if operation.job is not None:
                self._workers.submit(operation, operation.job)
        return operation

    def cancel(self, operation: Operation) -> bool:
        """End an operation that nobody waits for any more; return whether it was still running."""
        if operation.state is not OperationState.RUNNING:
            return False
        self._end(operation, OperationState.CANCELLED, CancelledError(f"the {operation.kind.value} was cancelled"))
        return True

    def stop_all(self) -> None:
        """Stop every operation; each keeps what has arrived by now."""
        for operation in self._live:
            operation.stop()

    def leave_all(self) -> None:
        """End all layer-wise reading."""
        for operation in self._live:
            operation.followers.clear()

    def poll(self) -> list[Operation]:
        """Advance operations whose job has ended on every rank; return those whose outcome is now known.

        Each operation is returned once, also one that was over when ``start`` returned. Waits for no job; while
        something is live, for the other ranks to poll.

        Raises:
            RankLostError: another rank did not; raised once. Every operation has failed, and no other will start.
        """
        if self._live:
            self._poll_once(0, has_time=True)
        if self._ranks.is_lost:
            self._report_loss()
        return self.take_completed()

    def take_completed(self) -> list[Operation]:
        """Return the operations whose outcome has become known and that no call has returned yet."""
        completed, self._completed = self._completed, []
        for operation in completed:
            self.counts[operation.kind].add(operation)
            if operation.state is OperationState.FAILED and not isinstance(operation.error, ClosedError):
                unexpected = operation.error if isinstance(operation.error, InternalError) else None
                logger.warning("the %s failed: %s", operation.kind.value, operation.error, exc_info=unexpected)
        return completed

    def wait_all(self, timeout_s: float, until: Operation | None = None) -> None:
        """Advance operations until none is live, or the outcome of ``until`` is known.

        ``take_completed`` or ``poll`` returns those that are over.

        Raises:
            WaitTimeoutError: something still is after ``timeout_s`` on some rank; it goes on all the same.
            RankLostError: as ``poll``.
        """
        deadline = self._clock() + timeout_s
        has_all_time = True
        while self._live and (until is None or until.state is OperationState.RUNNING):
            if not has_all_time:
                kinds = sorted(operation.kind.value for operation in self._live)
                raise WaitTimeoutError(f"time is over, and {len(kinds)} operations still run: {', '.join(kinds)}")
            left_s = deadline - self._clock()
            has_all_time = self._poll_once(self._wait_s(left_s), has_time=left_s > 0)
            if self._ranks.is_lost:
                self._report_loss()

    def try_wait_all(self, timeout_s: float) -> None:
        """Wait as ``wait_all`` does and raise nothing; of a rank that is lost meanwhile the next poll tells."""
        was_loss_reported = self._is_loss_reported
        with suppress(WaitTimeoutError, RankLostError):
            self.wait_all(timeout_s)
        self._is_loss_reported = was_loss_reported

    def close(self, timeout_s: float) -> list[str]:
        """Finish running jobs, release the slots of operations, stop the workers; name those that are stuck.

        An operation whose job or store is stuck keeps its slots: a thread may still write to them.
        """
        stuck = self._workers.close(timeout_s)
        self._ended.update(self._workers.finished(0))
        self._ended.update({operation: None for operation in self._live if operation.awaited is not None})
        for operation, error in list(self._ended.items()):
            if not in_flight(error):
                self._release(operation)
            self._close(operation)
        for operation in self._live:
            self._close(operation)
        return stuck + [f"{call.name} of the store" for call in self.quarantined]

    def _close(self, operation: Operation) -> None:
        """Fail an operation that still runs, since the cache is closed."""
        if operation.state is OperationState.RUNNING:
            operation.set_outcome(OperationState.FAILED, ClosedError("the cache was closed"))
            self._completed.append(operation)

    def _wait_s(self, left_s: float) -> float:
        """Return how long to wait for a job: not past the next moment at which something else could happen."""
        for operation in self._live:
            if operation.awaited is not None and operation.is_woken:
                return 0
        held_up = bool(self._ended) and any(in_use(operation, error) for operation, error in self._ended.items())
        if self._ranks.size > 1:
            left_s = min(left_s, RANKS_LOOK_S if held_up or len(self._ended) < len(self._live) else 0)
        elif held_up:
            left_s = min(left_s, QUARANTINE_LOOK_S)
        now_s = self._clock()
        for operation in self._live:
            for moment in (operation.fail_at_s, operation.respond_by_s):
                if now_s < moment < now_s + left_s:
                    left_s = moment - now_s
        return max(0, left_s)

    def _poll_once(self, wait_s: float, *, has_time: bool) -> bool:
        """Agree with all ranks on the readiness of each operation, advance it, and return whether all have time."""
        self._ended.update(self._workers.finished(wait_s))
        live = list(self._live)
        now_s = self._clock()
        agreed: list[Readiness] = []
        for operation in live:
            error = self._ended.get(operation)
            readiness = Readiness(
                ended=operation in self._ended,
                succeeded=error is None,
                free=not in_use(operation, error),
                in_time=now_s < operation.fail_at_s,
                unanswered=now_s < operation.respond_by_s,
            )
            agreed.append(readiness)
        failures = self._ended
        if self._ranks.size > 1:
            try:
                has_time, agreed = self._agreed(agreed, has_time=has_time)
                failures = self._failures(live, agreed)
            except RankLostError as loss:
                # What is left is to give back what they hold, and nobody waits for that.
                self._fail_all(loss)
                failures = {}
        for operation, readiness in zip(live, agreed, strict=True):
            self._advance(operation, readiness, failures.get(operation))
        for operation in live:
            if operation.awaited is not None and operation.is_woken:  # the same ones on every rank
                self._resume(operation, operation.error)
        return has_time

    def _agreed(self, ours: list[Readiness], *, has_time: bool) -> tuple[bool, list[Readiness]]:
        """Return whether all ranks have time, and the readiness of each operation on all of them."""
        bits = self._ranks.agree(np.array([has_time, *(bit for readiness in ours for bit in readiness)], np.bool_))
        return bool(bits[0]), [Readiness(*row) for row in bits[1:].reshape(len(ours), -1).tolist()]

    def _failures(self, live: list[Operation], agreed: list[Readiness]) -> dict[Operation, CacheError | None]:
        """Return errors that name the ranks, of jobs that have ended on every rank and failed on one."""
        each = zip(live, agreed, strict=True)
        failed = [operation for operation, readiness in each if readiness.ended and not readiness.succeeded]
        if not failed:
            return {}
        ours = [self._ended[operation] for operation in failed]
        where = failed_ranks(self._ranks, [error is not None for error in ours])
        failures: dict[Operation, CacheError | None] = {}
        for operation, ranks, error in zip(failed, where, ours, strict=True):
            failure = RankError(f"the {operation.kind.value} failed on ranks {ranks}: {error or 'not here'}")
            failure.__cause__ = error
            failures[operation] = failure
        return failures

    def _advance(self, operation: Operation, readiness: Readiness, failure: CacheError | None) -> None:
        """Report how an operation ends, if it does; then resume it, or keep pages of one that is stopped."""
        if operation.state is OperationState.RUNNING:
            if not readiness.in_time:
                reason = OperationTimeoutError(f"the {operation.kind.value} took longer than {self._timeout_s} s")
                self._end(operation, OperationState.FAILED, reason)
            elif failure is not None and not readiness.free:
                self._end(operation, OperationState.FAILED, failure)
            elif not readiness.unanswered:
                operation.stop()
        if readiness.ended and readiness.free:
            self._resume(operation, failure or operation.error)
        elif operation.is_stopping:
            self._keep(operation)

    def _fail_all(self, error: RankLostError) -> None:
        for operation in self._live:
            if operation.state is OperationState.RUNNING:
                self._end(operation, OperationState.FAILED, error)

    def _report_loss(self) -> None:
        """Raise what a group says that has lost a rank, wherever that was found out; once."""
        if not self._is_loss_reported:
            self._is_loss_reported = True
            try:
                self._ranks.agree(np.empty(0, np.bool_))
            except RankLostError as error:
                logger.error("a rank is lost, nothing will be moved any more: %s", error)
                raise

    def _end(self, operation: Operation, state: OperationState, reason: CacheError) -> None:
        """Report an operation as over before its job is, which ends at its next batch."""
        operation.stop()
        operation.set_outcome(state, reason)
        self._completed.append(operation)

    def _keep(self, operation: Operation) -> None:
        """Keep what the job of a stopped operation has brought by now, once; its request waits no longer.

        What is on its way is kept at the end of the job, for others.
        """
        keep, operation.keep = operation.keep, None
        if keep is None or self._ranks.is_lost:
            return
        was_running = operation.state is OperationState.RUNNING
        try:
            keep(operation)
            operation.set_outcome(OperationState.DONE, None)
        except RankLostError as error:
            operation.set_outcome(OperationState.FAILED, error)
        if was_running:
            self._completed.append(operation)

    def _resume(self, operation: Operation, error: CacheError | None) -> None:
        was_running = operation.state is OperationState.RUNNING
        self._ended.pop(operation, None)
        try:
            operation.advance(error)
        finally:
            if operation.is_released:
                del self._live[operation]
                self.released_count += 1
            if was_running and operation.state is not OperationState.RUNNING:
                self._completed.append(operation)
        if operation.job is not None:
            self._workers.submit(operation, operation.job)

    def _release(self, operation: Operation) -> None:
        del self._live[operation]
        self.released_count += 1
        self._ended.pop(operation, None)
        operation.release()


def in_use(operation: Operation, error: CacheError | None) -> bool:
    """Return whether a store may still use the pages of an operation whose job has ended so."""
    return bool(operation.followers) or in_flight(error)


def in_flight(error: CacheError | None) -> TypeGuard[StorageTimeoutError]:
    """Return whether a store is still in a call that is late."""
    return isinstance(error, StorageTimeoutError) and not error.call.returned

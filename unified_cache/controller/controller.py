"""Drive operations: run their jobs on workers, let them go on when the owner polls. Never sees the tree."""

import math
import time
from collections.abc import Callable

from unified_cache.controller.operation import Leg, Operation, OperationState, Steps
from unified_cache.controller.workers import Finished, Workers
from unified_cache.errors import (
    CacheError,
    CallInFlight,
    CancelledError,
    ClosedError,
    OperationTimeoutError,
    SettleTimeoutError,
    StorageTimeoutError,
)

__all__ = ["Controller"]

QUARANTINE_LOOK_S = 0.02
"""Between two looks, while nothing else is left to wait for, whether a store has returned from a call given up."""


class Controller:
    """Operations under way, at most ``operations_max`` of them, each for at most ``timeout_s``.

    Everything but the jobs themselves runs on the owner's thread, inside ``start``, ``poll``, ``settle``, ``cancel``
    or ``close``. An operation is *live* until it has given back what it held. One that is cancelled or too late is
    told so at once, and stays live until its job has ended. One whose store did not return in time stays live until
    the store has: till then its pages are in quarantine, since the store may still read or fill them.
    """

    __slots__ = (
        "_clock",
        "_live",
        "_operations_max",
        "_quarantined",
        "_timeout_s",
        "_told",
        "_workers",
        "declined_count",
    )

    def __init__(
        self,
        workers: Workers,
        operations_max: int,
        timeout_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._operations_max = operations_max
        self._timeout_s = timeout_s
        self._clock = clock
        self._live: set[Operation] = set()
        self._quarantined: list[tuple[Operation, StorageTimeoutError]] = []
        self._told: list[Operation] = []
        """Those whose outcome has become known since the last poll."""
        self.declined_count = 0
        """Operations not started because too many were under way."""

    @property
    def live_count(self) -> int:
        """Operations that hold something."""
        return len(self._live)

    @property
    def quarantined(self) -> list[CallInFlight]:
        """Calls that a store has not returned from in time; each holds the pages of its operation."""
        return [error.call for _, error in self._quarantined]

    def start(self, leg: Leg, steps: Steps, patience_s: float = math.inf) -> Operation | None:
        """Start an operation; None if too many are under way: it then never began and holds nothing.

        After ``patience_s`` it makes do with what has come by then.
        """
        if len(self._live) >= self._operations_max:
            self.declined_count += 1
            return None
        now_s = self._clock()
        operation = Operation(leg, steps, now_s + self._timeout_s, now_s + patience_s)
        job = operation.advance(None)
        if job is not None:
            self._live.add(operation)
            self._workers.submit(operation, job)
        return operation

    def cancel(self, operation: Operation) -> bool:
        """End an operation before its time and keep nothing of it; tell whether it was still running."""
        if operation.state is not OperationState.RUNNING:
            return False
        self._end_early(operation, OperationState.CANCELLED, CancelledError(f"the {operation.leg.value} was cancelled"))
        return True

    def stop_all(self) -> None:
        """Have every operation make do with what has come by now."""
        for operation in self._live:
            operation.stop()

    def poll(self) -> list[Operation]:
        """Let operations go on whose job has ended; return those whose outcome is known now. Never waits."""
        self._look_at_clock()
        return self._advance(self._workers.finished(0))

    def settle(self, timeout_s: float) -> list[Operation]:
        """Poll until nothing is live; return the operations whose outcome became known.

        Raises:
            SettleTimeoutError: something still is after ``timeout_s``; it goes on all the same.
        """
        deadline = self._clock() + timeout_s
        over: list[Operation] = []
        while self._live:
            self._look_at_clock()
            left_s = deadline - self._clock()
            if left_s <= 0:
                self._told = over + self._told
                legs = sorted(operation.leg.value for operation in self._live)
                raise SettleTimeoutError(f"{len(legs)} operations still run after {timeout_s} s: {', '.join(legs)}")
            over += self._advance(self._workers.finished(self._wait_s(left_s)))
        return over + self._take_told()

    def close(self, timeout_s: float) -> list[str]:
        """Let running jobs end, give back what operations hold, stop the workers; name those that are stuck.

        An operation whose job or store is stuck keeps its slots: somebody may still be writing to them.
        """
        stuck = self._workers.close(timeout_s)
        for operation, error in self._workers.finished(0):
            if isinstance(error, StorageTimeoutError) and not error.call.returned:
                self._quarantined.append((operation, error))
            else:
                self._live.discard(operation)
                operation.release()
            operation.conclude(OperationState.FAILED, ClosedError("the cache was closed"))
        return stuck + [f"{error.call.name} of the store" for _, error in self._quarantined if not error.call.returned]

    def _wait_s(self, left_s: float) -> float:
        """Return how long to wait for a job: not past the next moment at which the clock alone ends something."""
        if self._quarantined:
            left_s = min(left_s, QUARANTINE_LOOK_S)
        moments = [moment for operation in self._live for moment in (operation.due_s, operation.stop_s)]
        now_s = self._clock()
        return min([left_s, *(moment - now_s for moment in moments if now_s < moment < math.inf)])

    def _look_at_clock(self) -> None:
        """End operations that are too late, stop those whose patience is over, go on with those out of quarantine."""
        now_s = self._clock()
        for operation in self._live:
            if operation.state is OperationState.RUNNING:
                if now_s >= operation.due_s:
                    reason = OperationTimeoutError(f"the {operation.leg.value} took longer than {self._timeout_s} s")
                    self._end_early(operation, OperationState.FAILED, reason)
                elif now_s >= operation.stop_s:
                    operation.stop()
        waiting, self._quarantined = self._quarantined, []
        for operation, error in waiting:
            if not error.call.returned:
                self._quarantined.append((operation, error))
            elif operation.state is OperationState.CANCELLED:
                self._let_go(operation)
            else:
                self._go_on(operation, error)

    def _end_early(
        self, operation: Operation, state: OperationState, reason: CancelledError | OperationTimeoutError
    ) -> None:
        operation.conclude(state, reason)
        operation.stop()
        self._told.append(operation)

    def _advance(self, finished: list[Finished]) -> list[Operation]:
        for operation, error in finished:
            if isinstance(error, StorageTimeoutError) and not error.call.returned:
                if operation.state is OperationState.RUNNING:
                    operation.conclude(OperationState.FAILED, error)
                    self._told.append(operation)
                self._quarantined.append((operation, error))
            elif operation.state is not OperationState.RUNNING:
                self._let_go(operation)
            else:
                self._go_on(operation, error)
        return self._take_told()

    def _go_on(self, operation: Operation, error: CacheError | None) -> None:
        was_running = operation.state is OperationState.RUNNING
        job = operation.advance(error)
        if job is not None:
            self._workers.submit(operation, job)
            return
        self._live.discard(operation)
        if was_running:
            self._told.append(operation)

    def _let_go(self, operation: Operation) -> None:
        self._live.discard(operation)
        operation.release()

    def _take_told(self) -> list[Operation]:
        told, self._told = self._told, []
        return told

"""Drive operations: run their jobs on workers, let them go on when the owner polls. Never sees the tree."""

import time
from collections.abc import Callable

from unified_cache.controller.operation import Leg, Operation, Steps
from unified_cache.controller.workers import Finished, Workers
from unified_cache.errors import ClosedError, SettleTimeoutError

__all__ = ["Controller"]


class Controller:
    """Operations under way, at most ``operations_max`` of them.

    Everything but the jobs themselves runs on the owner's thread, inside ``start``, ``poll``, ``settle`` or
    ``close``.
    """

    __slots__ = ("_clock", "_live", "_operations_max", "_workers", "declined_count")

    def __init__(self, workers: Workers, operations_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = workers
        self._operations_max = operations_max
        self._clock = clock
        self._live: set[Operation] = set()
        self.declined_count = 0
        """Operations not started because too many were under way."""

    @property
    def live_count(self) -> int:
        """Operations under way."""
        return len(self._live)

    def start(self, leg: Leg, steps: Steps) -> Operation | None:
        """Start an operation; None if too many are under way: it then never began and holds nothing."""
        if len(self._live) >= self._operations_max:
            self.declined_count += 1
            return None
        operation = Operation(leg, steps)
        job = operation.advance(None)
        if job is not None:
            self._live.add(operation)
            self._workers.submit(operation, job)
        return operation

    def poll(self) -> list[Operation]:
        """Let operations go on whose job has ended; return those that are over now. Never waits."""
        return self._advance(self._workers.finished(0))

    def settle(self, timeout_s: float) -> list[Operation]:
        """Poll until nothing is under way; return the operations that ended.

        Raises:
            SettleTimeoutError: something still is after ``timeout_s``; it goes on all the same.
        """
        deadline = self._clock() + timeout_s
        over: list[Operation] = []
        while self._live:
            left_s = deadline - self._clock()
            if left_s <= 0:
                legs = sorted(operation.leg.value for operation in self._live)
                raise SettleTimeoutError(f"{len(legs)} operations still run after {timeout_s} s: {', '.join(legs)}")
            over += self._advance(self._workers.finished(left_s))
        return over

    def close(self, timeout_s: float) -> list[str]:
        """Let running jobs end, give back what operations hold, stop the workers; name those that are stuck.

        An operation whose job is stuck keeps its slots: a worker may still be writing to them.
        """
        stuck = self._workers.close(timeout_s)
        for operation, _ in self._workers.finished(0):
            self._live.discard(operation)
            operation.abort(ClosedError("the cache was closed"))
        return stuck

    def _advance(self, finished: list[Finished]) -> list[Operation]:
        over: list[Operation] = []
        for operation, error in finished:
            job = operation.advance(error)
            if job is None:
                self._live.discard(operation)
                over.append(operation)
            else:
                self._workers.submit(operation, job)
        return over

"""A wrapper that bounds how long anybody waits for a store: a call that hangs becomes an error, and its thread is lost.

On most threads a call is handed over to a thread of the wrapper's own, and the caller waits for it. On a thread that
runs a ``BoundedCall``, which somebody else waits for anyway, it runs in place, as a ``StoreStep`` of that.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition, Lock
from typing import TypeVar

from unified_cache.errors import ClosedError, ConfigError, StorageError, StorageTimeoutError
from unified_cache.storage_backends.common.bounded_call import (
    BoundedCall,
    CallState,
    CallThreads,
    StoreStep,
    current_call,
)
from unified_cache.storage_backends.protocol import Capability, StorageBackend
from unified_cache.storage_backends.wrappers.layer import Method, StorageLayer

__all__ = ["DeadlineStorage", "StuckCall"]

Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True, slots=True)
class StuckCall:
    """A call that has outlived its deadline and has not returned."""

    method: Method
    age_s: float
    """Seconds since it started."""

    def __str__(self) -> str:
        return f"{self.method.value} for {self.age_s:.1f} s"


class DeadlineStorage(StorageLayer):
    """Wait at most ``deadline_s`` for every call, the wait for a free place among ``calls_max`` included.

    A call that misses its deadline raises StorageTimeoutError, goes on, and may still read or fill its buffers: the
    error carries the call, which tells when it has returned. At most ``calls_max`` calls are in flight, stuck ones
    included. Once all of them are stuck, further calls raise StorageError at once and are not started: their buffers
    are free.

    It owns the wrapped backend. Thread-safe. ``clock`` gives seconds, for ages and deadlines; waiting is real.
    """

    def __init__(
        self,
        backend: StorageBackend,
        deadline_s: float,
        calls_max: int,
        clock: Callable[[], float] = time.monotonic,
        on_late: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``on_late`` is called with the thread of a ``BoundedCall`` that is given up in a call of this store."""
        if deadline_s <= 0 or calls_max < 1:
            raise ConfigError(f"a deadline needs deadline_s > 0 and calls_max >= 1, found {deadline_s} and {calls_max}")
        self.deadline_s = deadline_s
        super().__init__(backend)
        self._calls_max = calls_max
        self._clock = clock
        self._on_late = on_late
        self._threads = CallThreads("storage-call", calls_max, total_max=calls_max, clock=clock)
        self._in_flight: list[StoreStep] = []
        """Calls that the store has not returned from; nobody waits for those of them that are stuck."""
        self._changed = Condition(Lock())
        self._closed = False
        self._closing: BoundedCall[None] | None = None

    def stuck_calls(self) -> list[StuckCall]:
        """Name the calls that have outlived their deadline and have not returned, the oldest first."""
        with self._changed:
            return self._named(call for call in self._in_flight if call.is_stuck)

    def capability(self) -> Capability:
        """Return what the wrapped backend can do; a call that is given up here goes on using its buffers."""
        return replace(super().capability(), bounded=False)

    def close(self, timeout_s: float | None = None) -> None:
        """Refuse calls, let those in flight return, close the wrapped backend; wait at most ``timeout_s`` in all.

        ``timeout_s`` is the deadline unless given. The backend is closed once no call is in flight, if need be by the
        thread of the last one, long after this has raised. Calling it again waits again.

        Raises:
            StorageTimeoutError: calls still hang; the message names them all, ``call`` is the oldest.
        """
        bound_s = self.deadline_s if timeout_s is None else timeout_s
        until_s = time.monotonic() + bound_s
        with self._changed:
            self._closed = True
            self._close_when_idle()
            self._changed.notify_all()
        self._threads.withdraw_waiting()
        self._threads.close(0)
        with self._changed:
            if not self._changed.wait_for(lambda: self._closing is not None, bound_s):
                calls = ", ".join(map(str, self._named(self._in_flight)))
                message = f"the store was not closed within {bound_s} s: {calls}"
                raise StorageTimeoutError(message, self._in_flight[0].call)
        assert self._closing is not None
        left_s = max(until_s - time.monotonic(), 0.0)
        if not self._closing.settle(left_s):
            message = f"the store was not closed within {bound_s} s: {StuckCall(Method.CLOSE, left_s)}"
            raise StorageTimeoutError(message, self._closing)
        error = self._closing.take_error()
        if error is not None:
            raise error

    def _call(self, method: Method, work: Callable[[], Result]) -> Result:
        running = current_call()
        if running is not None and not running.is_in_store:
            return self._make_step(method, work)
        handed_over = self._threads.submit(partial(self._make_step, method, work))
        if not handed_over.settle(self.deadline_s):
            self._threads.leave(handed_over)
        if handed_over.state is CallState.WITHDRAWN:
            with self._changed:
                raise self._not_started(method)
        return handed_over.result()

    def _make_step(self, method: Method, work: Callable[[], Result]) -> Result:
        """Make a call of the store as a step of the ``BoundedCall`` that this thread runs."""
        call = current_call()
        assert call is not None
        with StoreStep(call, method.value, self._clock(), self.deadline_s, self._note_late) as step:
            with self._changed:
                self._wait_for_place(method)
                call.check()
                self._in_flight.append(step)
            try:
                return work()
            finally:
                with self._changed:
                    self._in_flight.remove(step)
                    if self._closed:
                        self._close_when_idle()
                    self._changed.notify_all()

    def _wait_for_place(self, method: Method) -> None:
        if len(self._in_flight) >= self._calls_max:
            self._changed.wait_for(self._may_start, self.deadline_s)
        if self._closed or len(self._in_flight) >= self._calls_max:
            raise self._not_started(method)

    def _may_start(self) -> bool:
        """Tell whether waiting is over: for a place that is free, or because none will be."""
        return self._closed or len(self._in_flight) < self._calls_max or all(call.is_stuck for call in self._in_flight)

    def _not_started(self, method: Method) -> StorageError | ClosedError:
        if self._closed:
            return ClosedError("this store with a deadline was closed")
        calls = ", ".join(map(str, self._named(self._in_flight)))
        return StorageError(f"{method.value} was not started, no thread is free: {calls}", retryable=True)

    def _close_when_idle(self) -> None:
        """Once closed and idle, close the backend on a thread of its own."""
        if not self._in_flight and self._closing is None:
            threads = CallThreads("storage-close", 1, clock=self._clock)
            self._closing = threads.submit(self._backend.close, name=Method.CLOSE.value)
            threads.close(0)

    def _note_late(self, thread_id: int) -> None:
        with self._changed:
            self._changed.notify_all()
        self._on_late(thread_id)

    def _named(self, calls: Iterable[StoreStep]) -> list[StuckCall]:
        now_s = self._clock()
        return [StuckCall(Method(call.name), now_s - call.started_s) for call in calls]

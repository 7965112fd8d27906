"""The guard between a cache or a service and its store: deadline, retries and circuit breaker, in the one right order.

    get ──> breaker ──> deadline ──> retries ──> store

The breaker is outside: a fault that a second try cures is none.

On most threads a call is handed over to a thread of the guard's own, and the caller waits for it. On a thread that
runs a ``BoundedCall``, which somebody else waits for anyway, it runs in place, as a ``StoreStep`` of that.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from threading import Condition, Lock
from typing import TypeVar, cast

from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import ClosedError, StorageError, StorageTimeoutError
from unified_cache.core.process import HomeProcess
from unified_cache.core.seal import Label
from unified_cache.storage_backends.common.bounded_call import (
    BoundedCall,
    CallState,
    CallThreads,
    Clock,
    StoreStep,
    call_within,
    current_call,
)
from unified_cache.storage_backends.common.breaker import Admission, Backoff, CircuitBreaker
from unified_cache.storage_backends.protocol import Answer, Capability, Store
from unified_cache.storage_backends.wrappers.layer import Method, StorageLayer, capability_of, check_answers

DECLARATION_S = 60.0
"""Longest wait for a store to say what it can do, and with it how long its other calls may take."""

RETRIED = frozenset({Method.EXISTS, Method.GET, Method.PUT})
"""Calls that are made again: those for pages."""

Result = TypeVar("Result")


def declared_capability(backend: Store, clock: Clock = time.monotonic) -> Capability:
    """Ask a store what it can do, within ``DECLARATION_S``, before anything else is asked of it."""
    return call_within(DECLARATION_S, Method.CAPABILITY.value, partial(capability_of, backend), clock)


class StorageGuard(StorageLayer):
    """A store that answers in time, is asked again where a fault may pass, and is paused where it keeps failing.

    **Deadline.** A call waits at most ``deadline_s``, or what is left to the call that it is a part of. That includes
    its tries, each of which is given what is left, the pauses between them, and the wait for a free place among
    ``calls_max``. One that misses it raises StorageTimeoutError, goes on, and may still read or fill its buffers: the
    error carries the call, which tells when it has returned. At most ``calls_max`` calls are in flight, stuck ones
    included. Once all of them are stuck, further calls raise StorageError and are not started: their buffers are free.

    **Retries.** ``exists``, ``get`` and ``put`` are tried again, after a pause, when they fail in a way that may pass.
    A pause is shortened by up to a half at random, so that callers do not come back together. A declined put, a miss,
    an error that is not retryable and a timeout, whose buffers are still in use, are never tried again. A store that
    has no answer for one page says UNAVAILABLE of it, and does not raise.

    **Breaker.** Failures are counted by method, after the retries: any exception but those that a working store raises,
    a store that is full or closed, and wrong input. While it is open, every page and every put is UNAVAILABLE, and
    nothing is touched; ``register``, ``remove``, ``clear`` and ``scan``, which have no such answer, raise StorageError.

    It owns the wrapped backend. Thread-safe. ``clock`` gives seconds, for ages and deadlines; waiting is real.
    """

    def __init__(
        self,
        backend: Store,
        capability: Capability,
        config: GuardConfig,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        """A call that may take longer by the store's own word, its ``capability``, has a longer deadline."""
        super().__init__(backend)
        self._capability = replace(capability, bounded=False)
        self.deadline_s = max(config.deadline_s, capability.call_s_max)
        self._may_wait = not capability.bounded or capability.call_s_max > 0
        """Whether a call of the store may take any time at all: else the caller makes it."""
        self._calls_max = config.calls_max
        self._pauses_s = [config.retry_pause_s * 2**number for number in range(config.retry_rounds_max - 1)]
        pauses = Backoff(config.breaker_pause_s, config.breaker_pause_s_max)
        self.breaker = CircuitBreaker(config.breaker_failures_max, pauses, clock, capability.name)
        self._clock = clock
        self._sleep = sleep
        self._rng = rng or random.Random()  # noqa: S311  # it keeps the pauses of several callers from falling together
        self._threads = CallThreads("storage-call", config.calls_max, total_max=config.calls_max, clock=clock)
        self._in_flight: list[StoreStep] = []
        """Calls that the store has not returned from; nobody waits for those of them that are stuck."""
        self._lock = Lock()
        self._changed = Condition(self._lock)
        """Notified when a caller that waits for a place may find one, and once closed."""
        self._closed = False
        self._home = HomeProcess("this guarded store")
        self._closing: BoundedCall[None] | None = None
        self.retries_count = 0

    @property
    def stuck_count(self) -> int:
        """Calls that have outlived their deadline and have not returned."""
        with self._changed:
            return sum(step.is_stuck for step in self._in_flight)

    def capability(self) -> Capability:
        """Return what the wrapped backend said that it can do; a call that is given up goes on using its buffers."""
        self._check_open()
        return self._capability

    def touch(self, labels: Sequence[Label]) -> None:
        """Make pages recent; none while the breaker is open."""
        self._call(Method.TOUCH, partial(self._backend.touch, labels), paused=lambda: None)

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects; a StorageError while the breaker is open."""
        return self._call(Method.REMOVE, partial(self._backend.remove, labels))

    def close(self, timeout_s: float | None = None) -> None:
        """Refuse calls, let those in flight return, close the wrapped backend; wait ``timeout_s`` or the deadline.

        The backend is closed once no call is in flight, if need be long after this has raised StorageTimeoutError,
        which names the calls that hang. Calling it again waits again. A forked child closes nothing.
        """
        if not self._home.is_here:
            return
        bound_s = self.deadline_s if timeout_s is None else max(timeout_s, 0.0)
        with self._changed:
            self._closed = True
            if self._closing is None:
                threads = CallThreads("storage-close", 1, clock=self._clock)
                self._closing = threads.submit(self._close_when_idle, name=Method.CLOSE.value)
                threads.close(0)
            self._changed.notify_all()
        self._threads.withdraw_waiting()
        self._threads.close(0)
        if not self._closing.settle(bound_s):
            with self._lock:
                late = [step.call for step in self._in_flight] or [self._closing]
            raise StorageTimeoutError(f"the store was not closed within {bound_s} s: {self._named(late)}", late[0])
        error = self._closing.take_error()
        if error is not None:
            raise error

    def _close_when_idle(self) -> None:
        """Close the wrapped backend once no call is in flight; on a thread of its own."""
        with self._changed:
            self._changed.wait_for(lambda: not self._in_flight)
        self._backend.close()

    def _call(
        self,
        method: Method,
        work: Callable[[], Result],
        asked_count: int | None = None,
        paused: Callable[[], Result] | None = None,
    ) -> Result:
        """Make a call, once more after a pause where a fault of one for pages may pass, as long as there is time.

        A put, too, of pages that were stored by a call that failed. While the breaker is open, pages are UNAVAILABLE,
        and ``paused`` says what other calls return; without it, they raise StorageError.
        """
        self._check_open()
        admission, due_s = self.breaker.admit(method.value), self._due_s()
        if admission is None:
            if paused is not None:
                return paused()
            if asked_count is not None:
                return cast("Result", [Answer.UNAVAILABLE] * asked_count)
            message = f"the store is paused after {self.breaker.failures_max} failures"
            raise StorageError(message, retryable=True)
        pauses_s = iter(self._pauses_s if method in RETRIED else ())
        with admission:
            while True:
                try:
                    found = self._within(due_s, method, work, admission)
                    if asked_count is not None:
                        check_answers(self._backend, method, found, asked_count)
                    return found
                except StorageTimeoutError:
                    raise
                except StorageError as error:
                    pause_s = next(pauses_s, math.inf) * self._rng.uniform(0.5, 1.0)
                    if not error.retryable or self._clock() + pause_s >= due_s:
                        raise
                self._sleep(pause_s)
                with self._lock:
                    self.retries_count += 1

    def _due_s(self) -> float:
        """Return when a call that begins now is late."""
        call, due_s = current_call(), self._clock() + self.deadline_s
        if call is None:
            return due_s
        return min(due_s, call.due_s) if call.step is None else min(due_s, call.due_s, call.step.due_s)

    def _within(self, due_s: float, method: Method, work: Callable[[], Result], admission: Admission) -> Result:
        """Make one call of the store that is late at ``due_s``, as a step of the ``BoundedCall`` that this thread runs.

        Where it runs none, or one that is in a store, the call is handed over to a thread of the guard's own.
        """
        left_s = due_s - self._clock()
        if left_s <= 0:
            raise StorageError(f"{method.value} was not started, its time was over", retryable=True)
        if not self._may_wait:
            return work()
        call = current_call()
        if call is None or call.step is not None:
            handed = self._threads.submit(partial(self._within, due_s, method, work, admission))
            if not handed.settle(left_s):
                self._threads.leave(handed)
            if handed.state is CallState.WITHDRAWN:
                with self._lock:
                    raise self._not_started(method)
            return handed.result()
        with StoreStep(call, method.value, self._clock, left_s, partial(self._record_late, admission)) as step:
            with self._lock:
                if len(self._in_flight) >= self._calls_max:
                    self._changed.wait_for(self._may_start, left_s)
                if self._closed or len(self._in_flight) >= self._calls_max:
                    raise self._not_started(method)
                if call.is_given_up:
                    call.check()
                self._in_flight.append(step)
            try:
                return work()
            finally:
                with self._lock:
                    is_place_free = len(self._in_flight) == self._calls_max
                    self._in_flight.remove(step)
                    if is_place_free or self._closed:
                        self._changed.notify_all()

    def _may_start(self) -> bool:
        """Return whether waiting is over: for a place that is free, or because none will be."""
        return self._closed or len(self._in_flight) < self._calls_max or all(step.is_stuck for step in self._in_flight)

    def _check_open(self) -> None:
        self._home.check()
        if self._closed:
            raise ClosedError("this guarded store was closed")

    def _not_started(self, method: Method) -> StorageError:
        self._check_open()
        calls = self._named(step.call for step in self._in_flight)
        return StorageError(f"{method.value} was not started, no thread is free: {calls}", retryable=True)

    def _record_late(self, admission: Admission) -> None:
        """Count a call that is given up as a failure now; how it ends, if ever, counts for nothing."""
        with self._changed:
            self._changed.notify_all()
        self.breaker.record_outcome(admission, failed=True)

    def _named(self, calls: Iterable[BoundedCall[object]]) -> str:
        now_s = self._clock()
        return ", ".join(f"{call.name} for {now_s - call.started_s:.1f} s" for call in calls)

"""A wrapper that bounds how long anybody waits for a store: a call that hangs becomes an error, and its thread is lost.

On most threads a call is handed over to a thread of the wrapper's own, and the caller waits for it. That costs some
150 us. A worker's thread, whose work somebody else waits for anyway, is watched instead (``CallWatch``): its calls run
in place, and whoever waits for the worker gives it up when a call is late.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Condition, Event, Lock, Thread, get_ident
from types import TracebackType
from typing import Generic, TypeVar

from unified_cache.errors import ClosedError, ConfigError, StorageError, StorageTimeoutError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label
from unified_cache.storage_backends.catalog import Catalog
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, Scan, StorageBackend
from unified_cache.storage_backends.removals import RemovalFeed, removals_of
from unified_cache.storage_backends.wrappers.method import Method
from unified_cache.storage_backends.wrappers.wrapped_catalog import WrappedCatalog

__all__ = ["CallWatch", "DeadlineStorage", "StuckCall", "call_within"]

Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True, slots=True)
class StuckCall:
    """A call that has outlived its deadline and has not returned."""

    method: Method
    age_s: float
    """Seconds since it started."""

    def __str__(self) -> str:
        return f"{self.method.value} for {self.age_s:.1f} s"


class _Call:
    """One call to a store; a ``CallInFlight``."""

    __slots__ = ("_changed", "is_stuck", "method", "returned", "started_s")

    def __init__(self, method: Method, started_s: float, changed: Condition) -> None:
        self.method = method
        self.started_s = started_s
        self.returned = False
        """Whether the store has let go of the call and its buffers."""
        self.is_stuck = False
        """Whether it has been given up."""
        self._changed = changed

    @property
    def name(self) -> str:
        """Method of the store."""
        return self.method.value

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the call to return; tell whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self.returned, timeout_s)

    def end(self) -> None:
        """Note that it has returned."""
        self.returned = True


class _HandedCall(_Call, Generic[Result]):
    """A call on another thread than the caller's, and what came of it."""

    __slots__ = ("_error", "_result", "_returned", "_work")

    _result: Result

    def __init__(self, method: Method, started_s: float, changed: Condition, work: Callable[[], Result]) -> None:
        super().__init__(method, started_s, changed)
        self._work: Callable[[], Result] | None = work
        self._error: BaseException | None = None
        self._returned = Event()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the call to return; tell whether it has."""
        return self._returned.wait(timeout_s)

    def run(self) -> None:
        """Call the store, and keep what it returns or raises for the thread that asked."""
        if self._work is not None:
            with self:
                self._result = self._work()
            self._work = None  # and with it the buffers

    def end(self) -> None:
        """Note that it has returned, and wake the caller."""
        self.returned = True
        self._returned.set()

    def raise_error(self) -> None:
        """Raise what the store raised, if it did; a second time there is nothing to raise."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame, which would hold it

    def result(self) -> Result:
        """Return or raise, once it has returned, what the store did."""
        self.raise_error()
        return self._result

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        self._error = error
        return True


def call_within(deadline_s: float, method: Method, work: Callable[[], Result], clock: Callable[[], float]) -> Result:
    """Run one call on a thread of its own and wait for it at most ``deadline_s``: for what is rare.

    Raises:
        StorageTimeoutError: it has not returned; it goes on.
    """
    call = _HandedCall(method, clock(), Condition(Lock()), work)

    def run() -> None:
        call.run()
        call.end()

    Thread(target=run, name=f"storage-{method.value}", daemon=True).start()
    if not call.wait(deadline_s):
        raise StorageTimeoutError(f"the store did not return from {method.value} within {deadline_s} s", call)
    return call.result()


class CallWatch:
    """One piece of work on one thread whose calls to a store run in place; whoever waits for the work watches it.

    The thread does its work inside of ``with watch:``. Any other thread may ask ``give_up_if_late`` meanwhile. Once it
    was given up, no further call of the work is made, and its buffers are in use until the work is over: it is itself
    the ``CallInFlight``, which has *returned* when the thread has left the with block.
    """

    __slots__ = ("_call", "_deadline", "_given_up", "_on_late", "_thread_id", "returned")

    def __init__(self, deadline: "DeadlineStorage", on_late: Callable[[int], None]) -> None:
        self._deadline = deadline
        self._on_late = on_late
        self._call: _Call | None = None
        """The call that the thread is in, or waits to start."""
        self._given_up: _Call | None = None
        self._thread_id = 0
        self.returned = False
        """Whether the thread has let go of the work and its buffers."""

    @property
    def name(self) -> str:
        """Method of the call that was given up."""
        return "" if self._given_up is None else self._given_up.name

    @property
    def started_s(self) -> float:
        """Time at which the call that was given up started."""
        return 0.0 if self._given_up is None else self._given_up.started_s

    @property
    def is_given_up(self) -> bool:
        """Whether a call was late, and nobody waits for the work any more."""
        return self._given_up is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the work to be over; tell whether it is."""
        with self._deadline.changed:
            return self._deadline.changed.wait_for(lambda: self.returned, timeout_s)

    def give_up_if_late(self) -> StorageTimeoutError | None:
        """Give the work up if its call has outlived the deadline; return the error that it has ended by, once."""
        with self._deadline.changed:
            call = self._call
            if call is None or self._given_up is not None or self._deadline.left_s(call) > 0:
                return None
            self._given_up = call
            call.is_stuck = True
            self._deadline.changed.notify_all()
        self._on_late(self._thread_id)
        return self._late()

    def check(self) -> None:
        """Raise what the work has ended by if it was given up; for its own thread.

        Raises:
            StorageTimeoutError: it was.
        """
        if self._given_up is not None:
            raise self._late()

    def begin(self, call: _Call) -> None:
        """Note the call that the thread is about to start."""
        self._call = call

    def end(self) -> None:
        """Note that the thread is in no call."""
        self._call = None

    def __enter__(self) -> "CallWatch":
        self._thread_id = get_ident()
        self._deadline.watches[self._thread_id] = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._deadline.changed:
            del self._deadline.watches[self._thread_id]
            self.returned = True
            self._deadline.changed.notify_all()

    def _late(self) -> StorageTimeoutError:
        return StorageTimeoutError(
            f"the store did not return from {self.name} within {self._deadline.deadline_s} s", self
        )


class DeadlineStorage:
    """Wait at most ``deadline_s`` for every call, the wait for a free place among ``calls_max`` included.

    A call that misses its deadline raises StorageTimeoutError, goes on, and may still read or fill its buffers: the
    error carries the call, which tells when it has returned. At most ``calls_max`` calls are in flight, stuck ones
    included. Once all of them are stuck, further calls raise StorageError at once and are not started: their buffers
    are free. A call runs on a daemon thread of the wrapper's, or in place where a ``CallWatch`` watches the caller.

    It owns the wrapped backend. Thread-safe. ``clock`` gives seconds, for ages and deadlines; waiting is real.
    """

    def __init__(
        self,
        backend: StorageBackend,
        deadline_s: float,
        calls_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if deadline_s <= 0 or calls_max < 1:
            raise ConfigError(f"a deadline needs deadline_s > 0 and calls_max >= 1, found {deadline_s} and {calls_max}")
        self.deadline_s = deadline_s
        self.watches: dict[int, CallWatch] = {}
        """By thread: who watches it. A thread enters and removes itself."""
        self.changed = Condition(Lock())
        self._backend = backend
        self._calls_max = calls_max
        self._clock = clock
        self._waiting: SimpleQueue[_HandedCall[object] | None] = SimpleQueue()
        # Some of the calls in flight are stuck: nobody waits for them any more. Threads are as many as there ever
        # were calls handed over at a time, so one that was handed over never waits behind a stuck one.
        self._in_flight: list[_Call] = []
        self._handed_count = 0
        """Of the calls in flight, those on threads of our own."""
        self._threads_count = 0
        self._closed = False
        self._closing: _HandedCall[None] | None = None

    def left_s(self, call: _Call) -> float:
        """Return the seconds until a call is late."""
        return call.started_s + self.deadline_s - self._clock()

    def stuck_calls(self) -> list[StuckCall]:
        """Name the calls that have outlived their deadline and have not returned, the oldest first."""
        with self.changed:
            return self._named(call for call in self._in_flight if call.is_stuck)

    def capability(self) -> Capability:
        """Return what the wrapped backend can do; a call that is given up here goes on using its buffers."""
        return replace(self._run(Method.CAPABILITY, self._backend.capability), bounded=False)

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Announce an identity to the wrapped backend."""
        self._run(Method.REGISTER, lambda: self._backend.register(manifest, slabs))

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Ask the wrapped backend."""
        return self._run(Method.EXISTS, lambda: self._backend.exists(labels))

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers.

        Raises:
            StorageTimeoutError: the buffers may be written until ``call.returned``.
        """
        return self._run(Method.GET, lambda: self._backend.get(pages))

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Store pages.

        Raises:
            StorageTimeoutError: the buffers are read until ``call.returned``; the pages may be stored after all.
        """
        return self._run(Method.PUT, lambda: self._backend.put(pages, level))

    def touch(self, labels: Sequence[Label]) -> None:
        """Make pages recent in the wrapped backend."""
        self._run(Method.TOUCH, lambda: self._backend.touch(labels))

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects from the wrapped backend."""
        return self._run(Method.REMOVE, lambda: self._backend.remove(labels))

    def clear(self, identity: bytes) -> int:
        """Clear one identity in the wrapped backend; a clear that misses its deadline goes on."""
        return self._run(Method.CLEAR, lambda: self._backend.clear(identity))

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of the wrapped backend."""
        return self._run(Method.SCAN, lambda: self._backend.scan(identity, cursor))

    def removals(self) -> RemovalFeed | None:
        """Have the wrapped backend tell what goes; asking it waits for nothing."""
        return removals_of(self._backend)

    def catalog(self) -> Catalog | None:
        """Wait for the wrapped backend's catalog no longer than for its other calls."""
        return WrappedCatalog.of(self._backend, self._run)

    def close(self, timeout_s: float | None = None) -> None:
        """Refuse calls, let those in flight return, close the wrapped backend; wait at most ``timeout_s`` in all.

        ``timeout_s`` is the deadline unless given. The backend is closed once no call is in flight, if need be by the
        thread of the last one, long after this has raised. Calling it again waits again.

        Raises:
            StorageTimeoutError: calls still hang; the message names them all, ``call`` is the oldest.
        """
        bound_s = self.deadline_s if timeout_s is None else timeout_s
        with self.changed:
            self._closed = True
            self._let_go_when_idle()
            self.changed.notify_all()
            self.changed.wait_for(self._is_let_go, bound_s)
            if self._in_flight:
                calls = ", ".join(map(str, self._named(self._in_flight)))
                raise StorageTimeoutError(f"the store was not closed within {bound_s} s: {calls}", self._in_flight[0])
        if self._closing is not None:
            self._closing.raise_error()

    def _run(self, method: Method, work: Callable[[], Result]) -> Result:
        watch = self.watches.get(get_ident())
        if watch is not None:
            return self._run_in_place(watch, _Call(method, self._clock(), self.changed), work)
        asked_s = self._clock()
        with self.changed:
            self._wait_for_place(method)
            call = _HandedCall(method, self._clock(), self.changed, work)
            self._hand_over(call)
        if not call.wait(max(0.0, asked_s + self.deadline_s - self._clock())):
            with self.changed:
                if not call.returned:
                    call.is_stuck = True
                    self.changed.notify_all()
                    message = f"the store did not return from {call.name} within {self.deadline_s} s"
                    raise StorageTimeoutError(message, call)
        return call.result()

    def _run_in_place(self, watch: CallWatch, call: _Call, work: Callable[[], Result]) -> Result:
        with self.changed:
            watch.begin(call)
            try:
                watch.check()
                self._wait_for_place(call.method)
                watch.check()
            except BaseException:
                watch.end()
                raise
            self._in_flight.append(call)
        try:
            result = work()
        finally:
            with self.changed:
                watch.end()
                self._end(call)
        watch.check()
        return result

    def _wait_for_place(self, method: Method) -> None:
        if len(self._in_flight) >= self._calls_max:
            self.changed.wait_for(self._may_start, self.deadline_s)
        if self._closed:
            raise ClosedError("this store with a deadline was closed")
        if len(self._in_flight) >= self._calls_max:
            calls = ", ".join(map(str, self._named(self._in_flight)))
            raise StorageError(f"{method.value} was not started, no thread is free: {calls}", retryable=True)

    def _may_start(self) -> bool:
        """Tell whether waiting is over: for a place that is free, or because none will be."""
        return self._closed or len(self._in_flight) < self._calls_max or all(call.is_stuck for call in self._in_flight)

    def _hand_over(self, call: _HandedCall[object]) -> None:
        if self._handed_count == self._threads_count:
            thread = Thread(target=self._work, name=f"storage-call-{self._threads_count}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise StorageError(f"{call.name} was not started: {error}", retryable=True) from error
            self._threads_count += 1
        self._handed_count += 1
        self._in_flight.append(call)
        self._waiting.put(call)

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            call.run()
            with self.changed:
                self._handed_count -= 1
                self._end(call)

    def _end(self, call: _Call) -> None:
        self._in_flight.remove(call)
        call.end()  # under the guard: who sees that it returned finds a place free
        self._let_go_when_idle()
        self.changed.notify_all()

    def _let_go_when_idle(self) -> None:
        """Once closed and idle, close the backend; once that has returned, end the threads."""
        if not self._closed or self._in_flight:
            return
        if self._closing is None:
            closing = _HandedCall(Method.CLOSE, self._clock(), self.changed, self._backend.close)
            self._hand_over(closing)
            self._closing = closing
        elif self._closing.returned:
            for _ in range(self._threads_count):
                self._waiting.put(None)
            self._threads_count = 0

    def _is_let_go(self) -> bool:
        return self._closing is not None and self._closing.returned

    def _named(self, calls: Iterable[_Call]) -> list[StuckCall]:
        now_s = self._clock()
        return [StuckCall(call.method, now_s - call.started_s) for call in calls]

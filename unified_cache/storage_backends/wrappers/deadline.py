"""A wrapper that never waits long: a call that hangs becomes an error, and the thread it hangs on is given up."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Event, Lock, Thread
from types import TracebackType
from typing import Generic, TypeVar

from unified_cache.errors import ClosedError, ConfigError, StorageError, StorageTimeoutError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, Scan, StorageBackend
from unified_cache.storage_backends.wrappers.method import Method

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


class _Call(Generic[Result]):
    """One call on a thread of ours, and what came of it; a ``CallInFlight``."""

    __slots__ = ("_answer", "_ended", "_error", "_work", "method", "started_s")

    _answer: Result

    def __init__(self, method: Method, work: Callable[[], Result], started_s: float) -> None:
        self.method = method
        self.started_s = started_s
        self._work: Callable[[], Result] | None = work
        self._error: BaseException | None = None
        self._ended = Event()

    @property
    def name(self) -> str:
        """Method of the store."""
        return self.method.value

    @property
    def returned(self) -> bool:
        """Whether the store has let go of the call and its buffers."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the call to return; tell whether it has."""
        return self._ended.wait(timeout_s)

    def run(self) -> None:
        """Call the store, and keep what it answers or raises for the thread that asked."""
        if self._work is not None:
            with self:
                self._answer = self._work()
            self._work = None  # and with it the buffers

    def end(self) -> None:
        """Say that it has returned."""
        self._ended.set()

    def raise_error(self) -> None:
        """Raise what the store raised, if it did; a second time there is nothing to raise."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame, which would hold it

    def answer(self) -> Result:
        """Return or raise, once it has returned, what the store did."""
        self.raise_error()
        return self._answer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        self._error = error
        return True


class DeadlineStorage:
    """Run every call on a thread of its own and wait at most ``deadline_s`` for it, the wait for a thread included.

    A call that misses its deadline raises StorageTimeoutError, goes on, and may still read or fill its buffers: the
    error carries the call, which tells when it has returned. There are at most ``calls_max`` threads, all daemons. Once
    all of them are stuck, further calls raise StorageError at once and are not started: their buffers are free.

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
        self._backend = backend
        self._deadline_s = deadline_s
        self._calls_max = calls_max
        self._clock = clock
        self._waiting: SimpleQueue[_Call[object] | None] = SimpleQueue()
        # Of the calls in flight, some are stuck: nobody waits for them any more. Threads are as many as there ever
        # were calls in flight at a time, so one that was handed over never waits behind a stuck one.
        self._in_flight: list[_Call[object]] = []
        self._stuck: list[_Call[object]] = []
        self._threads_count = 0
        self._closed = False
        self._closing: _Call[None] | None = None
        self._changed = Condition(Lock())

    def stuck_calls(self) -> list[StuckCall]:
        """Name the calls that have outlived their deadline and have not returned, in the order they were given up."""
        with self._changed:
            return self._named(self._stuck)

    def capability(self) -> Capability:
        """Say what the wrapped backend can do."""
        return self._run(Method.CAPABILITY, self._backend.capability)

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

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects from the wrapped backend."""
        return self._run(Method.REMOVE, lambda: self._backend.remove(labels))

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of the wrapped backend."""
        return self._run(Method.SCAN, lambda: self._backend.scan(identity, cursor))

    def close(self, timeout_s: float | None = None) -> None:
        """Refuse calls, let those in flight return, close the wrapped backend; wait at most ``timeout_s`` in all.

        ``timeout_s`` is the deadline unless given. The backend is closed once no call is in flight, if need be by the
        thread of the last one, long after this has raised. Calling it again waits again.

        Raises:
            StorageTimeoutError: calls still hang; the message names them all, ``call`` is the oldest.
        """
        bound_s = self._deadline_s if timeout_s is None else timeout_s
        with self._changed:
            self._closed = True
            self._let_go_when_idle()
            self._changed.notify_all()
            self._changed.wait_for(self._is_let_go, bound_s)
            if self._in_flight:
                raise StorageTimeoutError(
                    f"the store was not closed within {bound_s} s: {self._text(self._in_flight)}", self._in_flight[0]
                )
        if self._closing is not None:
            self._closing.raise_error()

    def _run(self, method: Method, work: Callable[[], Result]) -> Result:
        asked_s = self._clock()
        call = self._start(method, work)
        if not call.wait(max(0.0, asked_s + self._deadline_s - self._clock())):
            with self._changed:
                if not call.returned:
                    self._stuck.append(call)
                    self._changed.notify_all()
                    message = f"the store did not return from {call.name} within {self._deadline_s} s"
                    raise StorageTimeoutError(message, call)
        return call.answer()

    def _start(self, method: Method, work: Callable[[], Result]) -> _Call[Result]:
        with self._changed:
            self._changed.wait_for(self._may_start, self._deadline_s)
            if self._closed:
                raise ClosedError("this store with a deadline was closed")
            if len(self._in_flight) >= self._calls_max:
                message = f"{method.value} was not started, no thread is free: {self._text(self._in_flight)}"
                raise StorageError(message, retryable=True)
            call = _Call(method, work, self._clock())
            self._hand_over(call)
            return call

    def _may_start(self) -> bool:
        """Tell whether waiting is over: for a thread that is free, or because none will be."""
        return self._closed or len(self._in_flight) < self._calls_max or len(self._stuck) >= self._calls_max

    def _hand_over(self, call: _Call[object]) -> None:
        if len(self._in_flight) == self._threads_count:
            thread = Thread(target=self._work, name=f"storage-call-{self._threads_count}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise StorageError(f"{call.name} was not started: {error}", retryable=True) from error
            self._threads_count += 1
        self._in_flight.append(call)
        self._waiting.put(call)

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            call.run()
            with self._changed:
                self._in_flight.remove(call)
                if call in self._stuck:
                    self._stuck.remove(call)
                call.end()  # under the guard: who sees that it returned finds a thread free
                self._let_go_when_idle()
                self._changed.notify_all()

    def _let_go_when_idle(self) -> None:
        """Once closed and idle, close the backend; once that has returned, end the threads."""
        if not self._closed or self._in_flight:
            return
        if self._closing is None:
            closing = _Call(Method.CLOSE, self._backend.close, self._clock())
            self._hand_over(closing)
            self._closing = closing
        elif self._closing.returned:
            for _ in range(self._threads_count):
                self._waiting.put(None)
            self._threads_count = 0

    def _is_let_go(self) -> bool:
        return self._closing is not None and self._closing.returned

    def _named(self, calls: Sequence[_Call[object]]) -> list[StuckCall]:
        now_s = self._clock()
        return [StuckCall(call.method, now_s - call.started_s) for call in calls]

    def _text(self, calls: Sequence[_Call[object]]) -> str:
        return ", ".join(map(str, self._named(calls)))

"""A call to a store that may hang: one thread makes it, another leaves it, its buffers stay in use until it returns.

A store is other people's code on other people's hardware, and nothing in Python ends a call to it. So work that calls a
store runs on a thread that can be spared, as a ``BoundedCall``, and the caller that waits leaves at a deadline::

    WAITING ─────> RUNNING ──────> RETURNED               result() returns or raises what the work did
     │  ^           │   │
     │  └── again ──┘   └────────> GIVEN_UP ───> LET_GO   result() raises StorageTimeoutError
     │
     └──────────────────────────────────────> WITHDRAWN   the work never began

    WAITING, RUNNING                 somebody waits for it
    RETURNED, GIVEN_UP, WITHDRAWN    it is *settled*: nobody waits any more, and its outcome stays what it is
    RETURNED, LET_GO, WITHDRAWN      it has *returned*: nobody reads or writes its buffers any more

Buffers of a call that is GIVEN_UP are in quarantine: host slots of a cache, bounce buffers of an engine's store.
StorageTimeoutError carries the call, and the owner of the buffers asks it for ``returned``.

Work may call stores several times. Each time is a ``StoreStep`` with a deadline of its own, and runs in place: to hand
it over to another thread costs some 40 us. The waiting caller looks whether this one is late. Work that is given up
begins no further one. Work that answers AGAIN is not over: it runs once more after what waits.

The deadline travels with the call: whatever lies below asks for ``time_left_s``, and gives all of its tries together
no more than that. Work that makes several calls for one wait bounds them together, see ``bound_steps``.

``CallThreads`` (``call_threads``) starts the threads, and nothing else does, and changes states, under its lock. The
calls to a store take no lock of these.
"""

import math
from collections.abc import Callable
from enum import Enum
from threading import Lock, get_ident, local
from types import TracebackType
from typing import Generic, TypeVar

from unified_cache.core.errors import StorageError, StorageTimeoutError

Result = TypeVar("Result", covariant=True)


class CallState(Enum):
    """State of a call, as drawn above."""

    WAITING = "waiting"
    RUNNING = "running"
    RETURNED = "returned"
    GIVEN_UP = "given up"
    LET_GO = "released"
    WITHDRAWN = "withdrawn"


class Again:
    """Answer of work that is not over: it runs once more after what waits."""


SIGNAL_LOOK_S = 0.5
"""Longest wait without a look at signals: a Ctrl-C that comes as a wait begins is seen only when it ends."""

AGAIN = Again()


class BoundedCall(Generic[Result]):
    """Work that ``CallThreads`` runs on a thread, and the ``CallInFlight`` of its StorageTimeoutError."""

    _result: Result | Again

    def __init__(
        self,
        work: Callable[[], Result | Again],
        on_settled: "Callable[[BoundedCall[Result]], None] | None" = None,
        *,
        is_urgent: bool = True,
        name: str = "",
    ) -> None:
        """``name`` is that of the one call to a store that the work is; empty where it may make several."""
        self.state = CallState.WAITING
        self.is_urgent = is_urgent
        self.thread_id = 0
        self.due_s = math.inf
        """When each call to a store that it is in is late at the latest, by the clock of its threads."""
        self.step: StoreStep | None = None
        """The call to a store that it is in."""
        self._name = name
        self._started_s = 0.0
        self._work: Callable[[], Result | Again] | None = work
        self._on_settled = on_settled
        self._error: BaseException | None = None
        self._late: StoreStep | None = None
        self._settled = Lock()
        """Held until it is settled."""
        self._settled.acquire()
        self._let_go: Lock | None = None
        """Of a call that was given up: held until it has returned."""
        self._is_given_up = False

    @property
    def returned(self) -> bool:
        """Whether nobody uses its buffers any more."""
        state = self.state
        return state is CallState.RETURNED or state is CallState.LET_GO or state is CallState.WITHDRAWN

    @property
    def name(self) -> str:
        """Name of the call to a store that it was given up in, or is in; empty if in none."""
        step = self._late or self.step
        return self._name if step is None else step.name

    @property
    def started_s(self) -> float:
        """Start of that call, by the clock."""
        step = self._late or self.step
        return self._started_s if step is None else step.started_s

    @property
    def is_in_store(self) -> bool:
        """Whether it is in a call to a store."""
        return self.step is not None or bool(self._name)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until nobody uses its buffers; return whether that is so."""
        lock = self._let_go or self._settled
        return _is_free(lock, timeout_s)

    def settle(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until it is settled; return whether it is."""
        return _is_free(self._settled, timeout_s)

    def result(self) -> Result:
        """Return or raise, once it is settled, what the work did; StorageTimeoutError where it was given up."""
        error = self.take_error()
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame, which would hold it
        assert not isinstance(self._result, Again)
        return self._result

    def take_error(self) -> BaseException | None:
        """Return what ``result`` raises; what the work has raised is returned once, and its frames with it."""
        if self.state is CallState.WITHDRAWN:
            return StorageError("the call was not started, no thread was free", retryable=True)
        if self._is_given_up:
            return self._late_error()
        error, self._error = self._error, None
        return error

    def _late_error(self) -> StorageTimeoutError:
        late = self._late
        if late is None:
            return StorageTimeoutError("the work was given up between two calls to the store", self)
        return StorageTimeoutError(f"the store did not return from {late.name} within {late.deadline_s:.6g} s", self)

    def check(self) -> None:
        """Raise StorageTimeoutError if it was given up."""
        if self._is_given_up:
            raise self._late_error()

    def begin(self, now_s: float) -> None:
        """Start it on this thread. Under the lock of its threads."""
        self.state, self.thread_id, self._started_s = CallState.RUNNING, get_ident(), now_s

    def make(self) -> None:
        """Do the work on this thread and keep what it returns or raises; as a part of the call that it runs, if any."""
        before = _current.call
        _current.call = before or self
        try:
            if self._work is not None:
                self._result = self._work()
        except BaseException as error:  # noqa: BLE001  # the edge: a store's code, whose panics are no Exception
            self._error = error
        finally:
            _current.call = before

    def give_up(self) -> None:
        """Leave it in the call to a store that it is in. Under the lock of its threads."""
        self._let_go = Lock()
        self._let_go.acquire()
        self.state, self._is_given_up = CallState.GIVEN_UP, True
        self._late = self.step  # looked at last, see StoreStep

    def end(self) -> CallState:
        """Return the state after a turn of the work. Under the lock of its threads."""
        if self.state is CallState.GIVEN_UP:
            self.state, self._error = CallState.LET_GO, None
        elif self._error is None and isinstance(self._result, Again):
            self.state = CallState.WAITING
            return self.state
        else:
            self.state = CallState.RETURNED
        self._work = None  # and with it the buffers
        return self.state

    def drop(self) -> None:
        """Release work that will not begin. Under the lock of its threads."""
        self.state, self._work = CallState.WITHDRAWN, None

    def report(self, state: CallState) -> None:
        """Wake callers that wait for a state that it has taken, and call those who asked for it; without the lock."""
        if state is CallState.GIVEN_UP and self._late is not None:
            self._late.is_stuck = True
            self._late.on_late(self.thread_id)
        if state is not CallState.LET_GO:
            on_settled, self._on_settled = self._on_settled, None
            if on_settled is not None:
                on_settled(self)
            self._settled.release()
        elif self._let_go is not None:
            self._let_go.release()


class StoreStep:
    """One call to a store within a BoundedCall, on its thread; entering and leaving raise if that is given up."""

    __slots__ = ("call", "clock", "deadline_s", "due_s", "is_stuck", "name", "on_late", "started_s")

    def __init__(
        self,
        call: BoundedCall[object],
        name: str,
        clock: Callable[[], float],
        deadline_s: float,
        on_late: Callable[[int], None] = lambda _: None,
    ) -> None:
        """``on_late`` is called with the thread that hangs in it when the BoundedCall is given up."""
        self.call = call
        self.name = name
        self.clock = clock
        self.started_s = clock()
        self.deadline_s = deadline_s
        self.due_s = self.started_s + deadline_s
        self.on_late = on_late
        self.is_stuck = False

    def __enter__(self) -> "StoreStep":
        # First shown, then looked: a caller that gives up also says so, then looks. So one of them sees the other.
        self.call.step = self
        try:
            self.call.check()
        except StorageTimeoutError:
            self.call.step = None
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.call.step = None
        if kind is None:
            self.call.check()


class _Current(local):
    call: BoundedCall[object] | None = None


_current = _Current()


def current_call() -> BoundedCall[object] | None:
    """Return the call that this thread runs, if it does."""
    return _current.call


def bound_steps(due_s: float) -> None:
    """Bound each call to a store that the call of this thread begins: it is late at ``due_s`` at the latest."""
    if _current.call is not None:
        _current.call.due_s = due_s


def time_left_s() -> float:
    """Return the seconds until the call to a store that this thread is in is late; infinite where it is in none."""
    step = None if _current.call is None else _current.call.step
    return math.inf if step is None else max(step.due_s - step.clock(), 0.0)


def _is_free(lock: Lock, timeout_s: float) -> bool:
    left_s = max(timeout_s, 0.0)
    while not lock.acquire(timeout=min(left_s, SIGNAL_LOOK_S)):
        left_s -= SIGNAL_LOOK_S
        if left_s <= 0.0:
            return False
    lock.release()
    return True

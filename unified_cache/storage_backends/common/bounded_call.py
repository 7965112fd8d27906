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

``CallThreads`` starts the threads, and nothing else does, and changes states, under its lock. The calls to a store take
no lock of these. ``CallsInFlight`` is for a store that waits, when it is closed, for the calls that it is in.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from threading import Condition, Lock, Thread, get_ident, local
from types import FrameType, TracebackType
from typing import Generic, TypeVar

from unified_cache.core.errors import ClosedError, StorageError, StorageTimeoutError
from unified_cache.core.process import HomeProcess

Result = TypeVar("Result", covariant=True)

Clock = Callable[[], float]

SIGNAL_LOOK_S = 0.5
"""Longest wait without a look at signals: a Ctrl-C that comes as a wait begins is seen only when it ends."""

LOOK_S = 0.05
"""Between two looks of a caller whether a call to a store is late."""

CLOSING_LOOK_S = 0.1
"""Between two looks, while a close waits, whether a call was interrupted on its way out."""

URGENT_TURNS_MAX = 16
"""Urgent calls in a row while another waits that could run: a flood of requests slows backups, and starves none."""


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
    ) -> None:
        self.state = CallState.WAITING
        self.is_urgent = is_urgent
        self.thread_id = 0
        self.due_s = math.inf
        """When each call to a store that it is in is late at the latest, by the clock of its threads."""
        self.step: StoreStep | None = None
        """The call to a store that it is in."""
        self.is_given_up = False
        self._work: Callable[[], Result | Again] | None = work
        self._on_settled = on_settled
        self._error: BaseException | None = None
        self._late: StoreStep | None = None
        self._settled = Lock()
        """Held until it is settled."""
        self._settled.acquire()
        self._let_go: Lock | None = None
        """Of a call that was given up: held until it has returned."""

    @property
    def returned(self) -> bool:
        """Whether nobody uses its buffers any more."""
        state = self.state
        return state is CallState.RETURNED or state is CallState.LET_GO or state is CallState.WITHDRAWN

    @property
    def name(self) -> str:
        """Name of the call to a store that it was given up in, or is in; empty if in none."""
        step = self._late or self.step
        return "" if step is None else step.name

    @property
    def started_s(self) -> float:
        """Start of that call, by the clock; 0 if it is in none."""
        step = self._late or self.step
        return 0.0 if step is None else step.started_s

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until nobody uses its buffers; return whether that is so."""
        return _is_free(self._let_go or self._settled, timeout_s)

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
        if self.is_given_up:
            return self._late_error()
        error, self._error = self._error, None
        return error

    def check(self) -> None:
        """Raise StorageTimeoutError if it was given up."""
        if self.is_given_up:
            raise self._late_error()

    def _late_error(self) -> StorageTimeoutError:
        late = self._late
        if late is None:
            return StorageTimeoutError("the work was given up between two calls to the store", self)
        within = "" if math.isinf(late.deadline_s) else f" within {late.deadline_s:.2g} s"
        return StorageTimeoutError(f"the store did not return from {late.name}{within}", self)

    def make(self) -> None:
        """Do the work on this thread and keep what it returns or raises; as a part of the call that it runs, if any."""
        self.thread_id = get_ident()
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
        self.state, self.is_given_up = CallState.GIVEN_UP, True
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
            self._late.on_late()
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
        clock: Clock,
        deadline_s: float = math.inf,
        on_late: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_late`` is called when the BoundedCall is given up in it."""
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
        call = self.call
        call.step = self
        if call.is_given_up:
            call.step = None
            call.check()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        call = self.call
        call.step = None
        if kind is None and call.is_given_up:
            call.check()


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


@contextmanager
def on_its_own() -> Iterator[None]:
    """Make calls to a store no part of the call of this thread, which may be given up: each has its own deadline."""
    before, _current.call = _current.call, None
    try:
        yield
    finally:
        _current.call = before


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


def start_thread(target: Callable[[], None], name: str) -> None:
    """Start a daemon thread, which may hang in a store; raise RuntimeError where the system has no thread left."""
    Thread(target=target, name=name, daemon=True).start()


class CallThreads:
    """Threads on demand, and calls that wait for one. Thread-safe.

    The thread of a call that is given up is *lost*: another takes its place, and it ends when the store returns to it,
    unless it is needed::

        urgent      [ call | call | ... ] ─┐                     ┌─> thread ──> store
                                           ├─ one at a time ─────┤
        deferrable  [ call | ... ] ────────┘  deferrable_max     └─> thread ──> store hangs: lost

    Urgent calls go first; a request waits for them. Deferrable calls, such as backups, have at most ``deferrable_max``
    threads, so that an urgent one finds a thread that none of them is on.

    At most ``threads_max`` threads are not lost; all of them are at most ``total_max``, or as many as the store's guard
    lets hang. Of them ``deferrable_max`` run deferrable calls. Where every thread is lost and no other may take its
    place, what waits and what comes is withdrawn.
    """

    def __init__(
        self,
        name: str,
        threads_max: int,
        *,
        total_max: int | None = None,
        deferrable_max: int | None = None,
        clock: Clock = time.monotonic,
        start: Callable[[Callable[[], None], str], None] = start_thread,
    ) -> None:
        self._clock = clock
        self._lock = Lock()
        self._changed = Condition(self._lock)
        """Notified when what waits or runs becomes less, once closed, and when a lost thread has come back."""
        self._idle: list[Lock] = []
        """Of each thread that waits for a call: held until it is woken. The last to wait is woken first."""
        self._name = name
        self._threads_max, self._total_max = threads_max, total_max
        self._deferrable_max = threads_max if deferrable_max is None else deferrable_max
        self._start = start
        self._urgent: deque[BoundedCall[object]] = deque()
        self._deferrable: deque[BoundedCall[object]] = deque()
        self._urgent_turns = 0
        """In a row, while a deferrable call could have run."""
        self._running: dict[BoundedCall[object], str] = {}
        """Calls on a thread, given up or not, and the thread's name."""
        self._deferred: set[BoundedCall[object]] = set()
        """The deferrable ones of them that are not given up."""
        self._lost: set[BoundedCall[object]] = set()
        """Those of them that are given up."""
        self._threads_count = self._started_count = 0
        self._closed = False

    @property
    def lost_count(self) -> int:
        """Threads in calls that nobody waits for."""
        return len(self._lost)

    def submit(
        self,
        work: Callable[[], Result | Again],
        on_settled: Callable[[BoundedCall[Result]], None] | None = None,
        *,
        is_urgent: bool = True,
        name: str = "",
    ) -> BoundedCall[Result]:
        """Hand work over; never waits. ``on_settled`` is called once, on the thread that settles the call.

        ``name`` is that of the one call to a store that the work is; empty where it may make several.
        """
        call = BoundedCall(work, on_settled, is_urgent=is_urgent)
        if name:
            call.step = StoreStep(call, name, self._clock)
        withdrawn: Sequence[BoundedCall[object]] = ()
        with self._lock:
            if self._closed:
                call.drop()
                withdrawn = (call,)
            else:
                (self._urgent if is_urgent else self._deferrable).append(call)
                waiting_count = len(self._urgent) + len(self._deferrable)
                if self._lost or self._threads_count < waiting_count + len(self._running):
                    withdrawn = self._staff()
                if self._idle:
                    self._idle.pop().release()
        for each in withdrawn:
            each.report(CallState.WITHDRAWN)
        return call

    def give_up(self, call: BoundedCall[object]) -> bool:
        """Wait no longer for a call that runs, and put another thread in the place of its own; False if it is not."""
        with self._changed:
            if call.state is not CallState.RUNNING:
                return False
            call.give_up()
            self._lost.add(call)
            self._deferred.discard(call)
            withdrawn = self._staff()
            self._wake()
            self._changed.notify_all()
        call.report(CallState.GIVEN_UP)
        for each in withdrawn:
            each.report(CallState.WITHDRAWN)
        return True

    def give_up_if_late(self, call: BoundedCall[object]) -> bool:
        """Give a call up if the call to a store that it is in is late; return whether it was."""
        step = call.step
        return step is not None and step.due_s <= self._clock() and self.give_up(call)

    def give_up_late(self) -> None:
        """Give up every call that is late."""
        for call in self._running.copy():
            self.give_up_if_late(call)

    def withdraw(self, call: BoundedCall[object]) -> bool:
        """Take a call out of the line; False if it is not there."""
        with self._changed:
            if call.state is not CallState.WAITING:
                return False
            self._line_of(call).remove(call)
            call.drop()
            self._changed.notify_all()
        call.report(CallState.WITHDRAWN)
        return True

    def leave(self, call: BoundedCall[object]) -> None:
        """Wait no longer for a call of one turn: withdraw it or give it up, unless it is settled."""
        if not self.withdraw(call):
            self.give_up(call)

    def leave_all(self) -> None:
        """Withdraw every call that waits, and give up every one that runs."""
        self.withdraw_waiting()
        for call in self._running.copy():
            self.give_up(call)

    def withdraw_waiting(self) -> None:
        """Withdraw every call that waits."""
        with self._lock:
            withdrawn = self._dropped()
        for each in withdrawn:
            each.report(CallState.WITHDRAWN)

    def wait_for_lost(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until no thread is lost; return whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lost, timeout_s)

    def close(self, timeout_s: float) -> list[str]:
        """Take nothing any more and let the rest end; name threads not done in time, but those that are lost."""
        with self._changed:
            self._closed = True
            self._wake_all()
            self._changed.wait_for(lambda: not self._waiting_count and len(self._running) == len(self._lost), timeout_s)
            return [name for call, name in self._running.items() if call not in self._lost]

    @property
    def _waiting_count(self) -> int:
        return len(self._urgent) + len(self._deferrable)

    def _line_of(self, call: BoundedCall[object]) -> deque[BoundedCall[object]]:
        return self._urgent if call.is_urgent else self._deferrable

    def _dropped(self) -> list[BoundedCall[object]]:
        """Take every call out of the lines. Under the lock."""
        waiting = [*self._urgent, *self._deferrable]
        self._urgent.clear()
        self._deferrable.clear()
        for call in waiting:
            call.drop()
        self._changed.notify_all()
        return waiting

    def _staff(self) -> list[BoundedCall[object]]:
        """Start the threads that calls wait for; return what is withdrawn, where there can be none."""
        while self._threads_count < self._waiting_count + len(self._running):
            is_full = self._total_max is not None and self._threads_count >= self._total_max
            if is_full or self._threads_count - len(self._lost) >= self._threads_max:
                break
            name = f"{self._name}-{self._started_count}"
            try:
                self._start(partial(self._work, name), name)
            except RuntimeError:
                break  # the system has no thread left
            self._threads_count += 1
            self._started_count += 1
        return self._dropped() if self._threads_count == len(self._lost) else []

    def _work(self, name: str) -> None:
        is_needed, woken = True, Lock()
        while is_needed and (call := self._take(name, woken)) is not None:
            call.make()
            state, is_needed = self._leave(call)
            if state is not CallState.WAITING:
                call.report(state)
            del call  # and with it its result

    def _take(self, name: str, woken: Lock) -> BoundedCall[object] | None:
        """Wait for the call whose turn it is; None once the threads are closed and nothing waits."""
        while True:
            with self._lock:
                call: BoundedCall[object] | None = None
                may_defer = bool(self._deferrable) and len(self._deferred) < self._deferrable_max
                if self._urgent and not (may_defer and self._urgent_turns >= URGENT_TURNS_MAX):
                    self._urgent_turns = self._urgent_turns + 1 if may_defer else 0
                    call = self._urgent.popleft()
                elif may_defer:
                    self._urgent_turns = 0
                    call = self._deferrable.popleft()
                    self._deferred.add(call)
                if call is not None:
                    call.state, self._running[call] = CallState.RUNNING, name
                    return call
                if self._closed and not self._deferrable:
                    self._threads_count -= 1
                    return None
                woken.acquire(blocking=False)
                self._idle.append(woken)
            woken.acquire()

    def _leave(self, call: BoundedCall[object]) -> tuple[CallState, bool]:
        """End a turn of a call; return its state, and whether its thread is needed."""
        with self._lock:
            del self._running[call]
            self._deferred.discard(call)
            was_lost = call in self._lost
            self._lost.discard(call)
            state = call.end()
            if state is CallState.WAITING:
                self._line_of(call).append(call)
            is_needed = self._threads_count - len(self._lost) <= self._threads_max
            self._threads_count -= not is_needed
            if self._closed:
                self._wake_all()
            elif self._idle and (self._urgent or self._deferrable):
                self._wake()
            if self._closed or was_lost:
                self._changed.notify_all()
            return state, is_needed

    def _wake(self) -> None:
        """Wake one idle thread. Under the lock."""
        if self._idle:
            self._idle.pop().release()

    def _wake_all(self) -> None:
        while self._idle:
            self._wake()


def run_here(work: Callable[[], Result]) -> BoundedCall[Result]:
    """Do work on the caller's own thread, where every call to a store returns by itself; return the settled call."""
    call = BoundedCall(work)
    call.state = CallState.RUNNING
    call.make()
    call.report(call.end())
    return call


def call_within(timeout_s: float, name: str, work: Callable[[], Result], clock: Clock = time.monotonic) -> Result:
    """Make one call to a store on a thread of its own, and wait at most ``timeout_s``; a late one goes on."""
    threads = CallThreads(f"storage-{name}", 1, clock=clock)
    call = threads.submit(work, name=name)
    threads.close(0)
    if not call.settle(timeout_s):
        raise StorageTimeoutError(f"the store did not return from {name} within {timeout_s} s", call)
    return call.result()


class CallsInFlight:
    """Calls in flight: each enters while the store is open, and closing waits until the last has left.

    Entering and leaving take no lock, for they are on the path of every call: a call shows itself before it looks
    whether the store is closed, and closing looks for calls after it has said so, so one of them sees the other.

    An interrupt from the keyboard can cut a call short before it has left. So a call is known by the frame that it runs
    in: of one that is not running any more, nothing is in flight.

    A forked child is refused, and its close is not the one that is to release: locks may be held there by threads that
    it does not have, and what it would release is its parent's.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._home = HomeProcess(store)
        self._frames: dict[FrameType, None] = {}
        self._closed = False
        self._last_left = Condition(Lock())

    def __enter__(self) -> None:
        self._home.check()
        self._frames[sys._getframe(1)] = None  # noqa: SLF001  # documented, and nothing else names the caller's frame
        if self._closed:
            self._frames.pop(sys._getframe(1), None)  # noqa: SLF001
            self._notify()
            raise ClosedError(f"{self._store} was closed")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._frames.pop(sys._getframe(1), None)  # noqa: SLF001  # as on entering
        if self._closed:
            self._notify()

    def close(self, timeout_s: float = math.inf) -> bool:
        """Refuse new calls and wait for those in flight; True for the one caller that is to release."""
        if not self._home.is_here:
            return False
        with self._last_left:
            first = not self._closed
            self._closed = True
            while timeout_s > 0 and any(map(is_running, self._frames.copy())):
                self._last_left.wait(CLOSING_LOOK_S)
                timeout_s -= CLOSING_LOOK_S
            return first

    def _notify(self) -> None:
        with self._last_left:
            self._last_left.notify_all()


def is_running(frame: FrameType) -> bool:
    """Return whether a frame has not returned and raised nothing yet; one that has releases what it held.

    Python tells it of no frame, but refuses to clear one that runs. Without this, a Ctrl-C between two lines of
    ``__enter__`` or ``__exit__`` left a call in flight for ever, and a close that waits for it. No method that enters
    is a generator, which this would close where it waits.
    """
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False

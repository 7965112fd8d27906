"""Threads that make the calls to stores: started on demand, lost where a call hangs, replaced at once.

The thread of a call that is given up is *lost*: another takes its place, and it ends when the store returns to it,
unless it is needed::

    urgent      [ call | call | ... ] ─┐                     ┌─> thread ──> store
                                       ├─ one at a time ─────┤
    deferrable  [ call | ... ] ────────┘  deferrable_max     └─> thread ──> store hangs: lost

Urgent calls go first; a request waits for them. Deferrable calls, such as backups, have at most ``deferrable_max``
threads, so that an urgent one finds a thread that none of them is on. ``bounded_call`` draws the states of a call.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from threading import Condition, Lock, Thread

from unified_cache.core.errors import StorageTimeoutError
from unified_cache.storage_backends.common.bounded_call import Again, BoundedCall, CallState, Result

Clock = Callable[[], float]

LOOK_S = 0.05
"""Between two looks of a caller whether a call to a store is late."""

URGENT_TURNS_MAX = 16
"""Urgent calls in a row while another waits that could run: a flood of requests slows backups, and starves none."""


def start_thread(target: Callable[[], None], name: str) -> None:
    """Start a daemon thread, which may hang in a store; raise RuntimeError where the system has no thread left."""
    Thread(target=target, name=name, daemon=True).start()


class CallThreads:
    """Threads on demand, and calls that wait for one. Thread-safe.

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
        self._changed = Condition(Lock())
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
        """Hand work over; never waits. ``on_settled`` is called once, on the thread that settles the call."""
        call = BoundedCall(work, on_settled, is_urgent=is_urgent, name=name)
        withdrawn: list[BoundedCall[object]] = []
        with self._changed:
            if self._closed:
                call.drop()
                withdrawn.append(call)
            else:
                (self._urgent if is_urgent else self._deferrable).append(call)
                if self._lost or self._threads_count < self._waiting_count + len(self._running):
                    withdrawn = self._staff()
                self._wake()
        _report_withdrawn(withdrawn)
        return call

    def wait(self, call: BoundedCall[object], begin_within_s: float) -> None:
        """Wait until a call of one turn is settled: withdraw it after ``begin_within_s``, give it up when it is late.

        Also where the caller is interrupted, the call is settled.
        """
        try:
            begin_until_s = self._clock() + begin_within_s
            while not call.settle(LOOK_S):
                if not self.give_up_if_late(call) and self._clock() >= begin_until_s:
                    self.withdraw(call)
        except BaseException:
            self.leave(call)
            raise

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
        _report_withdrawn(withdrawn)
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
        with self._changed:
            withdrawn = self._dropped()
        _report_withdrawn(withdrawn)

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
            with self._changed:
                call = self._next()
                if call is not None:
                    call.begin(self._clock())
                    self._running[call] = name
                    return call
                if self._closed and not self._waiting_count:
                    self._threads_count -= 1
                    return None
                woken.acquire(blocking=False)
                self._idle.append(woken)
            woken.acquire()

    def _next(self) -> BoundedCall[object] | None:
        may_defer = bool(self._deferrable) and len(self._deferred) < self._deferrable_max
        if self._urgent and not (may_defer and self._urgent_turns >= URGENT_TURNS_MAX):
            self._urgent_turns = self._urgent_turns + 1 if may_defer else 0
            return self._urgent.popleft()
        if not may_defer:
            return None
        self._urgent_turns = 0
        call = self._deferrable.popleft()
        self._deferred.add(call)
        return call

    def _leave(self, call: BoundedCall[object]) -> tuple[CallState, bool]:
        """End a turn of a call; return its state, and whether its thread is needed."""
        with self._changed:
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
            elif self._waiting_count:
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
    call.begin(0.0)
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


def _report_withdrawn(calls: Iterable[BoundedCall[object]]) -> None:
    for call in calls:
        call.report(CallState.WITHDRAWN)

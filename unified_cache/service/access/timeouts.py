"""Limits in time of every call: until its first message, between two movements, and in all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread

import grpc

from unified_cache.service.access.callers import Refused
from unified_cache.service.limits import Limits

SWEEPS_PER_TERM = 4
"""Checks in the shortest time that a call may take: its end is noticed at most a quarter of that late."""


class CallTimeouts:
    """Periodic check of the open calls: those whose time is over are cut off. Thread-safe.

    The thread of the check lives only while calls are open. ``clock`` gives seconds.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.clock = clock
        self._calls: set[TimedCall] = set()
        self._is_checked = False
        """Whether the thread of the check runs."""
        self._pause_s = min(limits.first_message_s, limits.stream_idle_s, limits.call_s_max) / SWEEPS_PER_TERM
        self._closed = Event()
        self._guard = Lock()

    @contextmanager
    def over(self, call: "TimedCall") -> Iterator[None]:
        """Watch a call for the length of the with block."""
        with self._guard:
            self._calls.add(call)
            is_checked, self._is_checked = self._is_checked, True
        if not is_checked:
            Thread(target=self._check, name="call-timeouts", daemon=True).start()
        try:
            yield
        finally:
            with self._guard:
                self._calls.discard(call)

    def close(self) -> None:
        """Watch no more; calls that are still open end with their server."""
        self._closed.set()

    def _check(self) -> None:
        while not self._closed.wait(self._pause_s):
            with self._guard:
                calls = list(self._calls)
                self._is_checked = bool(calls)
            if not calls:
                return
            now_s = self.clock()
            for call in calls:
                call.cut_if_late(now_s)


class TimedCall:
    """An open call and the time until which something must move on it. Its own thread moves it, any may cut it off.

    Whatever waits or works for a call raises ``Refused`` once it was cut off, and ``grpc.RpcError`` once its client has
    gone.
    """

    def __init__(self, context: grpc.ServicerContext, timeouts: CallTimeouts) -> None:
        self._context = context
        self._limits = timeouts.limits
        self._clock = timeouts.clock
        now_s = self._clock()
        self._ends_s = now_s + self._limits.call_s_max
        self.peer = context.peer()
        """Address and port that it comes from."""
        self.is_half_open = True
        """True until its first message has come."""
        self.late_s = min(now_s + self._limits.first_message_s, self._ends_s)
        """Time at which it is cut off unless something moves before."""
        self.why_cut = ""
        """Reason for which this server cut it off; empty where it did not."""

    def first(self, messages: Iterator[bytes]) -> bytes | None:
        """Wait for the first message; None where the client ends the call without one."""
        message = next(messages, None)
        self._check_uncut()
        self.is_half_open = False
        self.late_s = self._ends_s
        return message

    def received(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """Yield messages, each of which must come in time, from the first or after it."""
        if not self.is_half_open:
            self.moved()
        for message in messages:
            self.is_half_open = False
            self.moved()
            yield message
        self._check_uncut()

    def moved(self) -> None:
        """Begin the time again in which something must move; long work does so at every step."""
        self._check_uncut()  # gRPC tells of it a little later
        if not self._context.is_active():
            raise Refused(grpc.StatusCode.CANCELLED, "the call is over")
        self.late_s = min(self._clock() + self._limits.stream_idle_s, self._ends_s)

    def _check_uncut(self) -> None:
        """Refuse a call that was cut off here, not one that its client has ended: gRPC reports both as cancelled."""
        if self.why_cut:
            raise Refused(grpc.StatusCode.CANCELLED, self.why_cut)

    def cut(self, reason: str) -> None:
        """Cut the call off. From any thread."""
        self.why_cut = reason
        self._context.cancel()

    def cut_if_late(self, now_s: float) -> None:
        """Cut the call off if its time is over. From any thread."""
        if now_s <= self.late_s:
            return
        if now_s > self._ends_s:
            self.cut(f"it took longer than {self._limits.call_s_max:g} s")
        elif self.is_half_open:
            self.cut(f"no message in {self._limits.first_message_s:g} s")
        else:
            self.cut(f"nothing moved in {self._limits.stream_idle_s:g} s")

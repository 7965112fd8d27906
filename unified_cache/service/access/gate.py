"""The one way into every call and out of it: authenticate, check the role, count, wait for a turn; answer, log.

An open call has limits in time: until its first message, between two movements, and in all.
"""

import secrets
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event, Lock, Thread
from typing import NoReturn

import grpc

from unified_cache.core.errors import ClosedError, InputError, NotOfferedError, StorageError
from unified_cache.core.settings.service import Role
from unified_cache.proto.wire import RETRY_AFTER, Call
from unified_cache.service.access.callers import NO_CREDENTIALS, AuditEntry, Caller, Observer, Refused
from unified_cache.service.access.fairness import AdmissionSlot, FairScheduler
from unified_cache.service.limits import Limits

RETRY_KEYS = (RETRY_AFTER, "grpc-retry-pushback-ms")
"""Trailing metadata that says when to come back; the second is what gRPC's own retries obey."""

RETRY_MS = "250"
"""Time after which a refused client is asked to try again."""

FAULT_ID_BYTES = 6
"""Length of the random number that names a fault both in the log and in the answer."""

AUDITED = frozenset({Call.HELLO, Call.CLEAR, Call.DRAIN})
"""Methods whose every call is in the audit log; of others, those that are not admitted or not permitted."""

ADMINISTRATION = frozenset({Call.HELLO, Call.IDENTITIES, Call.SCAN, Call.CLEAR, Call.DRAIN})
"""Methods that clear, drain and look at a server; they move no pages."""

OK = grpc.StatusCode.OK.name
DENIED = grpc.StatusCode.PERMISSION_DENIED.name
CANCELLED = grpc.StatusCode.CANCELLED.name

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

    def watch(self, call: "TimedCall") -> None:
        """Watch a call until it is over."""
        with self._guard:
            self._calls.add(call)
            is_checked, self._is_checked = self._is_checked, True
        if not is_checked:
            Thread(target=self._check, name="call-timeouts", daemon=True).start()

    def over(self, call: "TimedCall") -> None:
        """Watch a call no more."""
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


class ServiceGate:
    """The way into every call, before any message is waited for, and out of it. Thread-safe.

    In: authentication, role, a place in flight. Out: figures, the audit log, and statuses without internals.
    """

    def __init__(
        self,
        caller_of: Callable[[grpc.ServicerContext], Caller | None],
        scheduler: FairScheduler,
        timeouts: CallTimeouts,
        observer: Observer,
    ) -> None:
        """``caller_of`` returns the caller that the transport vouches for; None if there is none."""
        self.timeouts = timeouts
        self.scheduler = scheduler
        self._caller_of = caller_of
        self._observer = observer
        self._closed = False

    def close(self) -> None:
        """Admit no further call; those in flight go on."""
        self._closed = True

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for all admitted calls to end; return whether they have."""
        return self.scheduler.wait_idle(timeout_s)

    @contextmanager
    def admitted(self, method: Call, needs: Role, context: grpc.ServicerContext) -> Iterator["AdmittedCall"]:
        """Admit a call whose headers have come, and count it in flight for the length of the with block.

        A refusal, and what the with block raises, becomes the status of the call.
        """
        started_s = self.timeouts.clock()
        call: AdmittedCall | None = None
        caller: Caller | None = None
        code = CANCELLED
        try:
            caller = self._authenticated(method, context)
            self.check_role(caller, needs, method)
            administers = method in ADMINISTRATION and caller.role.includes(Role.ADMIN)
            slot = self.scheduler.enter(caller.tenant, administers=administers)
            if slot is None:
                self.refuse(caller, method, "the tenant has as many calls in flight as it may")
            try:
                if not context.add_callback(partial(self.scheduler.leave, slot, unless_running=True)):
                    raise Refused(grpc.StatusCode.CANCELLED, "the client has gone")
                call = AdmittedCall(context, self, caller, slot, method)
                self.timeouts.watch(call)
                yield call
            finally:
                if call is not None:
                    self.timeouts.over(call)
                self.scheduler.leave(slot)
            code = OK
        except grpc.RpcError:
            # The client went away, or the call was cut off: gRPC has answered.
            raise
        except Exception as error:
            refused = self._refusal(method, error)
            code = refused.code.name
            context.set_trailing_metadata(refused.trailing)
            context.abort(refused.code, refused.message)
            raise
        finally:
            tenant, bytes_in, bytes_out = ("", 0, 0) if call is None else (call.tenant, call.bytes_in, call.bytes_out)
            if call is not None and call.why_cut:
                self._observer.anomaly("cut_off", f"{method.value} by {tenant}: {call.why_cut}")
            seconds = self.timeouts.clock() - started_s
            self._observer.call_ended(method.value, tenant, code, seconds, bytes_in, bytes_out)
            if call is None or method in AUDITED or code == DENIED:
                about = "" if call is None else call.about
                self._observer.audited(AuditEntry(method.value, caller, context.peer(), code, about))

    def check_role(self, caller: Caller, needs: Role, method: Call) -> None:
        """Raise ``Refused`` unless a caller may do what ``needs`` may."""
        if not caller.role.includes(needs):
            self._observer.anomaly("permission_denied", f"{method.value} by a {caller.role.value} of {caller.tenant}")
            text = f"{method.value} needs the role {needs.value}"
            if caller.credential == NO_CREDENTIALS:
                text += f"; callers without credentials have that of access.local_role, {caller.role.value}"
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, text)

    def refuse(self, caller: Caller, method: Call, reason: str) -> NoReturn:
        """Refuse a call that is over a quota, and say when to come back."""
        self._observer.anomaly("over_quota", f"{method.value} by {caller.tenant}: {reason}")
        hints = [(key, RETRY_MS) for key in RETRY_KEYS]
        raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{reason}; try again in {RETRY_MS} ms", hints)

    def _authenticated(self, method: Call, context: grpc.ServicerContext) -> Caller:
        if self._closed:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "this server is draining; another may do")
        caller = self._caller_of(context)
        if caller is None:
            self._observer.anomaly("unauthenticated", f"{method.value} from {context.peer()} without valid credentials")
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, "valid credentials are needed")
        return caller

    def _refusal(self, method: Call, error: Exception) -> Refused:
        if isinstance(error, Refused):
            return error
        if isinstance(error, InputError):
            return Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if isinstance(error, NotOfferedError):
            return Refused(grpc.StatusCode.FAILED_PRECONDITION, "the store cannot do this")
        if isinstance(error, StorageError | ClosedError):
            self._observer.anomaly("store_failed", f"{method.value}: {error}")
            return Refused(grpc.StatusCode.UNAVAILABLE, "the store does not answer")
        number = secrets.token_hex(FAULT_ID_BYTES)
        self._observer.anomaly("internal", f"{method.value} {number}: {''.join(traceback.format_exception(error))}")
        return Refused(grpc.StatusCode.INTERNAL, f"a fault of the server, in its log as {number}")


class AdmittedCall(TimedCall):
    """A call that a gate admitted: whose it is, what it may still take, and what it has moved.

    It is ``Refused`` where its tenant has too much in flight, and where its turn does not come in time.
    """

    def __init__(
        self, context: grpc.ServicerContext, gate: ServiceGate, caller: Caller, slot: AdmissionSlot, method: Call
    ) -> None:
        super().__init__(context, gate.timeouts)
        self._gate = gate
        self._slot = slot
        self._method = method
        self.caller = caller
        """The caller that the transport vouches for."""
        self.about = ""
        """Object of the call, for the audit log."""
        self.bytes_in = 0
        self.bytes_out = 0

    @property
    def tenant(self) -> str:
        """Tenant of the caller."""
        return self.caller.tenant

    def first(self, messages: Iterator[bytes]) -> bytes:
        """Wait for the call's first message, and then for its turn."""
        message = super().first(messages)
        if message is None:
            raise InputError("a call has a message, found none")
        self.bytes_in += len(message)
        self.hold(len(message))
        self._take_turn()
        return message

    def received(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the messages after the first, each of which must come in time."""
        for message in super().received(messages):
            self.bytes_in += len(message)
            yield message

    def hold(self, count_bytes: int) -> None:
        """Count memory that the call takes until it ends."""
        if not self._gate.scheduler.hold(self._slot, count_bytes):
            self._gate.refuse(self.caller, self._method, "the tenant has as many bytes in flight as it may")

    def _take_turn(self) -> None:
        remaining_s = self._context.time_remaining()
        turn_s_max = self._limits.turn_s_max
        wait_s = turn_s_max if remaining_s is None else min(turn_s_max, remaining_s)
        if self._gate.scheduler.wait(self._slot, wait_s):
            return
        if not self._context.is_active():
            raise Refused(grpc.StatusCode.CANCELLED, "the client has gone")
        self._gate.refuse(self.caller, self._method, "the call's turn did not come in time")

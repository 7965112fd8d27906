"""The boundary of a call: admission, figures, and statuses that tell no internals."""

import secrets
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message

from unified_cache.errors import ClosedError, InputError, StorageError
from unified_cache.proto import service_pb2 as pb
from unified_cache.service.access.callers import AnsweringContext, AuditEntry, Caller, CallPlace, Gate, Observer
from unified_cache.service.access.errors import Refused
from unified_cache.service.access.timeouts import CallTimeouts, TimedCall
from unified_cache.service.requests.checks import check_asserted
from unified_cache.settings.access import Role
from unified_cache.wire.calls import Call, parsed

__all__ = ["CallBoundary", "ServedCall"]

FAULT_ID_BYTES = 6
"""Length of the random number that names a fault both in the log and in the answer."""

AUDITED = frozenset({Call.HELLO, Call.CLEAR, Call.DRAIN})
"""Methods whose every call is in the audit log; of others, those that are not admitted or not permitted."""

OK = grpc.StatusCode.OK.name
DENIED = grpc.StatusCode.PERMISSION_DENIED.name
CANCELLED = grpc.StatusCode.CANCELLED.name

Request = TypeVar("Request", bound=Message)


class ServedCall:
    """One call under way: whose it is, what it may still take, and what it has moved."""

    def __init__(self, place: CallPlace, timed: TimedCall) -> None:
        self._place = place
        self._timed = timed
        self.caller = place.caller
        self.tenant = place.caller.tenant
        self.about = ""
        """Object of the call, for the audit log."""
        self.bytes_in = 0
        self.bytes_out = 0

    def first(self, messages: Iterator[bytes]) -> bytes:
        """Wait for the call's first message, and then for its turn.

        Raises:
            InputError: the client ended the call without one.
            Refused: the tenant has too much in flight, or the turn did not come in time.
            Refused, grpc.RpcError: none came in time, or the client has gone.
        """
        message = self._timed.first(messages)
        if message is None:
            raise InputError("a call has a message, found none")
        self.bytes_in += len(message)
        self._place.hold(len(message))
        self._place.take_turn()
        return message

    def received(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the messages after the first, each of which must come in time.

        Raises:
            Refused, grpc.RpcError: one did not come in time, or the client has gone.
        """
        for message in self._timed.received(messages):
            self.bytes_in += len(message)
            yield message

    def moved(self) -> None:
        """Tell that the call goes on; long work does so at every step.

        Raises:
            Refused: the call was cut off, or its client has gone.
        """
        self._timed.moved()

    def hold(self, count_bytes: int) -> None:
        """Count memory that the call takes from here on.

        Raises:
            Refused: it is more than the tenant may have in flight.
        """
        self._place.hold(count_bytes)

    def check_role(self, needs: Role) -> None:
        """Check the caller's role once more, where what a call needs follows from its message.

        Raises:
            Refused: it is too low.
        """
        self._place.check_role(needs)

    def parsed(self, kind: type[Request], message: bytes) -> Request:
        """Read a request, and check whom it thinks it comes from.

        Raises:
            InputError: no such request.
            Refused: it asserts another tenant than the caller's.
        """
        request = parsed(kind, message)
        self.check_asserted(request)
        return request

    def check_asserted(self, request: Message) -> None:
        """Check whom a request, or the start of one, thinks it comes from.

        Raises:
            InputError: no name of a tenant.
            Refused: another tenant than the caller's.
        """
        if request.HasField("tenant"):
            # Every request of the contract has this field.
            check_asserted(cast("pb.StatsRequest", request).tenant, self.tenant)


class CallBoundary:
    """CallPlace of every call through the gate, and conversion of its errors into statuses. Thread-safe."""

    def __init__(
        self, gate: Gate, timeouts: CallTimeouts, observer: Observer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gate = gate
        self._timeouts = timeouts
        self._observer = observer
        self._clock = clock

    def unary(
        self, method: Call, needs: Role, kind: type[Request], answer: Callable[[ServedCall, Request], Message]
    ) -> Callable[[Iterator[bytes], AnsweringContext], bytes]:
        """Return a method of one message each way."""

        def respond(messages: Iterator[bytes], context: AnsweringContext) -> bytes:
            with self.admitted(method, needs, context) as call:
                request = call.parsed(kind, call.first(messages))
                reply = answer(call, request).SerializeToString()
                call.bytes_out = len(reply)
                return reply

        return respond

    @contextmanager
    def admitted(self, method: Call, needs: Role, context: AnsweringContext) -> Iterator[ServedCall]:
        """Admit a call whose headers have come; what the with block raises becomes its status."""
        started_s = self._clock()
        call: ServedCall | None = None
        caller: Caller | None = None
        code = CANCELLED
        try:
            with (
                self._gate.admitted(context, needs, method=method.value) as place,
                self._timeouts.over(context) as timed,
            ):
                call = ServedCall(place, timed)
                caller = call.caller
                try:
                    yield call
                finally:
                    if timed.why_cut:
                        self._observer.anomaly("cut_off", f"{method.value} by {call.tenant}: {timed.why_cut}")
            code = OK
        except grpc.RpcError:
            # The client went away, or the call was cut off: gRPC has answered.
            raise
        except Exception as error:
            refused = self._refusal(method, error)
            code = refused.code.name
            caller = caller or refused.caller
            context.set_trailing_metadata(refused.trailing)
            context.abort(refused.code, refused.message)
            raise
        finally:
            tenant, bytes_in, bytes_out = ("", 0, 0) if call is None else (call.tenant, call.bytes_in, call.bytes_out)
            self._observer.call_ended(method.value, tenant, code, self._clock() - started_s, bytes_in, bytes_out)
            if call is None or method in AUDITED or code == DENIED:
                about = "" if call is None else call.about
                self._observer.audited(AuditEntry(method.value, caller, context.peer(), code, about))

    def _refusal(self, method: Call, error: Exception) -> Refused:
        if isinstance(error, Refused):
            return error
        if isinstance(error, InputError):
            return Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if isinstance(error, StorageError | ClosedError):
            self._observer.anomaly("store_failed", f"{method.value}: {error}")
            return Refused(grpc.StatusCode.UNAVAILABLE, "the store does not answer")
        number = secrets.token_hex(FAULT_ID_BYTES)
        self._observer.anomaly("internal", f"{method.value} {number}: {''.join(traceback.format_exception(error))}")
        return Refused(grpc.StatusCode.INTERNAL, f"a fault of the server, in its log as {number}")

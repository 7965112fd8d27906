"""The boundary of a call: admission, figures, and statuses that tell no internals."""

import secrets
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from unified_cache.errors import ClosedError, InputError, StorageError
from unified_cache.service.access.callers import AuditEntry, Caller, Observer
from unified_cache.service.access.errors import Refused
from unified_cache.service.access.gate import AdmittedCall, ServiceGate
from unified_cache.service.requests.checks import checked_request
from unified_cache.settings.access import Role
from unified_cache.wire.calls import Call

__all__ = ["CallBoundary"]

FAULT_ID_BYTES = 6
"""Length of the random number that names a fault both in the log and in the answer."""

AUDITED = frozenset({Call.HELLO, Call.CLEAR, Call.DRAIN})
"""Methods whose every call is in the audit log; of others, those that are not admitted or not permitted."""

OK = grpc.StatusCode.OK.name
DENIED = grpc.StatusCode.PERMISSION_DENIED.name
CANCELLED = grpc.StatusCode.CANCELLED.name

Request = TypeVar("Request", bound=Message)


class CallBoundary:
    """Admission of every call by the gate, and conversion of its errors into statuses. Thread-safe."""

    def __init__(self, gate: ServiceGate, observer: Observer, clock: Callable[[], float] = time.monotonic) -> None:
        self._gate = gate
        self._observer = observer
        self._clock = clock

    def unary(
        self, method: Call, needs: Role, kind: type[Request], answer: Callable[[AdmittedCall, Request], Message]
    ) -> Callable[[Iterator[bytes], grpc.ServicerContext], bytes]:
        """Return a method of one message each way."""

        def respond(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            with self.admitted(method, needs, context) as call:
                request = checked_request(kind, call.first(messages), call.tenant)
                reply = answer(call, request).SerializeToString()
                call.bytes_out = len(reply)
                return reply

        return respond

    @contextmanager
    def admitted(self, method: Call, needs: Role, context: grpc.ServicerContext) -> Iterator[AdmittedCall]:
        """Admit a call whose headers have come; what the with block raises becomes its status."""
        started_s = self._clock()
        call: AdmittedCall | None = None
        caller: Caller | None = None
        code = CANCELLED
        try:
            with self._gate.admitted(context, needs, method=method.value) as call:
                caller = call.caller
                try:
                    yield call
                finally:
                    if call.why_cut:
                        self._observer.anomaly("cut_off", f"{method.value} by {call.tenant}: {call.why_cut}")
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

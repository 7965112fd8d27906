"""The boundary of a call: admission, figures, and statuses that tell no internals."""

import secrets
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message

from unified_cache.errors import ClosedError, InputError, StorageError
from unified_cache.proto import service_pb2 as pb
from unified_cache.service.access.callers import Gate, Observer
from unified_cache.service.access.errors import Refused
from unified_cache.service.requests.checks import check_asserted, parsed
from unified_cache.service.settings import Role
from unified_cache.wire.calls import Call

__all__ = ["CallBoundary", "CallRecord"]

FAULT_ID_BYTES = 6
"""Length of the random number that names a fault both in the log and in the answer."""

OK = grpc.StatusCode.OK.name
CANCELLED = grpc.StatusCode.CANCELLED.name

Request = TypeVar("Request", bound=Message)


class CallRecord:
    """Tenant and bytes of one call under way."""

    __slots__ = ("bytes_in", "bytes_out", "tenant")

    def __init__(self) -> None:
        self.tenant = ""
        """Empty until the caller is admitted."""
        self.bytes_in = 0
        self.bytes_out = 0

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
    """Admission of every call through the gate, and conversion of its errors into statuses. Thread-safe."""

    def __init__(self, gate: Gate, observer: Observer, clock: Callable[[], float]) -> None:
        self._gate = gate
        self._observer = observer
        self._clock = clock

    def unary(
        self, call: Call, needs: Role, kind: type[Request], answer: Callable[[str, Request], Message]
    ) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """Return a call of one message each way; ``answer`` takes the tenant and the request."""

        def respond(message: bytes, context: grpc.ServicerContext) -> bytes:
            with self.admitted(call, needs, context, len(message)) as record:
                record.bytes_in = len(message)
                reply = answer(record.tenant, record.parsed(kind, message)).SerializeToString()
                record.bytes_out = len(reply)
                return reply

        return grpc.unary_unary_rpc_method_handler(respond)

    @contextmanager
    def admitted(self, call: Call, needs: Role, context: grpc.ServicerContext, held_bytes: int) -> Iterator[CallRecord]:
        """Admit a call that keeps ``held_bytes`` in memory; what the with block raises becomes its status."""
        started_s = self._clock()
        record = CallRecord()
        code = CANCELLED
        try:
            with self._gate.admitted(context, needs, method=call.value, request_bytes=held_bytes) as caller:
                record.tenant = caller.tenant
                yield record
            code = OK
        except grpc.RpcError:
            # The client went away, or the stream was cut off: gRPC has answered.
            raise
        except Exception as error:
            refused = self._refusal(call, error)
            code = refused.code.name
            context.set_trailing_metadata(refused.trailing)
            context.abort(refused.code, refused.message)
            raise
        finally:
            seconds = self._clock() - started_s
            self._observer.call_ended(call.value, record.tenant, code, seconds, record.bytes_in, record.bytes_out)

    def _refusal(self, call: Call, error: Exception) -> Refused:
        if isinstance(error, Refused):
            return error
        if isinstance(error, InputError):
            return Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if isinstance(error, StorageError | ClosedError):
            self._observer.anomaly("store_failed", f"{call.value}: {error}")
            return Refused(grpc.StatusCode.UNAVAILABLE, "the store does not answer")
        number = secrets.token_hex(FAULT_ID_BYTES)
        self._observer.anomaly("internal", f"{call.value} {number}: {''.join(traceback.format_exception(error))}")
        return Refused(grpc.StatusCode.INTERNAL, f"a fault of the server, in its log as {number}")

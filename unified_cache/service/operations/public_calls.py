"""Health and reflection: calls without credentials, bounded, since everybody may make them and each takes a thread.

gRPC parses no message of theirs: a stream whose message its deserializer cannot read stays open in a server for ever.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock

import grpc
from grpc_health.v1 import health, health_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection, reflection_pb2  # type: ignore[import-untyped]

from unified_cache.core.errors import InputError
from unified_cache.proto.wire import parsed
from unified_cache.service.access.callers import Refused
from unified_cache.service.access.gate import CallTimeouts, TimedCall

OVERALL = ""
"""Name of the server as a whole."""

_Reply = health_pb2.HealthCheckResponse


class PublicCalls:
    """Places for public calls of one kind. Thread-safe.

    Where all are taken, a call that is still half open gives its place up: the oldest of the host, and there of the
    connection, that has most of them. So who sends headers alone cannot shut out who also sends a message. Where each
    call has sent one, the new call is refused.
    """

    def __init__(self, calls_max: int, timeouts: CallTimeouts) -> None:
        self._calls_max = calls_max
        self._timeouts = timeouts
        self._open: dict[TimedCall, str] = {}
        """Those with a place, the oldest first, each with the address and port that it comes from."""
        self._guard = Lock()

    @contextmanager
    def admitted(self, context: grpc.ServicerContext) -> Iterator[TimedCall]:
        """Give a call a place for the length of the with block; ends the call where there is none."""
        call = TimedCall(context, self._timeouts)
        self._timeouts.watch(call)
        try:
            if not self._enter(call, context.peer()):
                raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls of this kind")
            yield call
        except Refused as error:
            context.abort(error.code, error.message)
        except InputError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._timeouts.over(call)
            with self._guard:
                self._open.pop(call, None)

    def _enter(self, call: TimedCall, peer: str) -> bool:
        with self._guard:
            self._open[call] = peer
            if len(self._open) <= self._calls_max:
                return True
            silent = self._least_missed(call)
            del self._open[silent or call]
        if silent is not None:
            silent.cut("another call needed its place")
        return silent is not None

    def _least_missed(self, entering: TimedCall) -> TimedCall | None:
        """Return the call that is to make room; None if all but the entering one have sent a message."""
        connections = Counter(self._open.values())
        hosts = Counter(map(_host, self._open.values()))
        half_open = [call for call in self._open if call.is_half_open and call is not entering]
        peers = self._open
        return max(half_open, key=lambda call: (hosts[_host(peers[call])], connections[peers[call]]), default=None)


class HealthService:
    """Health of the server and its services, all the same: SERVING, and from ``stop_serving`` on NOT_SERVING.

    It keeps nothing by the names that clients ask for, and has no ``Watch``, which would hold a thread for each.
    """

    def __init__(self, services: Iterable[str], calls_max: int, timeouts: CallTimeouts) -> None:
        self._names = frozenset((OVERALL, *services))
        self._checks = PublicCalls(calls_max, timeouts)
        self._status = _Reply.SERVING

    def rpc_methods(self) -> grpc.GenericRpcHandler:
        """Return what a ``grpc.Server`` is given."""
        method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(self._check)
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": method})

    def stop_serving(self) -> None:
        """Answer NOT_SERVING from now on."""
        self._status = _Reply.NOT_SERVING

    def _check(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._checks.admitted(context) as call:
            if parsed(health_pb2.HealthCheckRequest, call.first(messages) or b"").service not in self._names:
                raise Refused(grpc.StatusCode.NOT_FOUND, "no such service")
        return bytes(_Reply(status=self._status).SerializeToString())


def reflection_methods(places: PublicCalls, *services: str) -> grpc.GenericRpcHandler:
    """Return what a ``grpc.Server`` is given, to tell about these services and itself."""
    servicer = reflection.ReflectionServicer((*services, reflection.SERVICE_NAME))

    def answer(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with places.admitted(context) as call:
            received = call.received(messages)
            requests = (parsed(reflection_pb2.ServerReflectionRequest, message) for message in received)
            for reply in servicer.ServerReflectionInfo(requests, context):
                yield reply.SerializeToString()

    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(answer)
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": method})


def _host(peer: str) -> str:
    """Return where a connection comes from, without its port."""
    return peer.rpartition(":")[0]

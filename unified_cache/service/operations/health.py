"""The health protocol of gRPC, for load balancers and probes."""

from collections.abc import Iterable, Iterator
from functools import partial
from threading import Condition

import grpc
from grpc_health.v1 import health, health_pb2  # type: ignore[import-untyped]

from unified_cache.service.access.callers import Refused
from unified_cache.service.access.timeouts import CallTimeouts, TimedCall
from unified_cache.service.operations.public_calls import PublicCalls, parsed_request

__all__ = ["HealthService"]

OVERALL = ""
"""Name of the server as a whole."""

LOOK_S = 30.0
"""Time between two looks of a watch that nothing has woken."""

_Reply = health_pb2.HealthCheckResponse


class HealthService:
    """Health of the server and its services, all the same: SERVING, and from ``stop_serving`` on NOT_SERVING.

    It keeps nothing by the names that clients ask for. Thread-safe.
    """

    def __init__(self, services: Iterable[str], calls_max: int, timeouts: CallTimeouts) -> None:
        self._names = frozenset((OVERALL, *services))
        self._checks = PublicCalls(calls_max, timeouts)
        self._watches = PublicCalls(calls_max, timeouts)
        self._is_serving = True
        self._changed = Condition()

    def rpc_methods(self) -> grpc.GenericRpcHandler:
        """Return what a ``grpc.Server`` is given."""
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)

    def stop_serving(self) -> None:
        """Say NOT_SERVING from now on, also to those who watch."""
        with self._changed:
            self._is_serving = False
            self._changed.notify_all()

    def _check(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._checks.admitted(context) as call:
            status = self._status_of(_service_in(call, messages))
            if status == _Reply.SERVICE_UNKNOWN:
                raise Refused(grpc.StatusCode.NOT_FOUND, "no such service")
        return _encoded(status)

    def _watch(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._watches.admitted(context) as call:
            name = _service_in(call, messages)
            context.add_callback(self._wake)
            told = self._status_of(name)
            yield _encoded(told)
            while context.is_active():
                with self._changed:
                    self._changed.wait_for(partial(self._has_news, context, name, told), LOOK_S)
                status = self._status_of(name)
                if status != told:
                    told = status
                    yield _encoded(told)

    def _has_news(self, context: grpc.ServicerContext, name: str, told: int) -> bool:
        return self._status_of(name) != told or not context.is_active()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _status_of(self, name: str) -> int:
        if name not in self._names:
            return int(_Reply.SERVICE_UNKNOWN)
        return int(_Reply.SERVING if self._is_serving else _Reply.NOT_SERVING)


def _service_in(call: TimedCall, messages: Iterator[bytes]) -> str:
    """Return the service that a call asks about."""
    return str(parsed_request(health_pb2.HealthCheckRequest, call.first(messages) or b"").service)


def _encoded(status: int) -> bytes:
    return bytes(_Reply(status=status).SerializeToString())

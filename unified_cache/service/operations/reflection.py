"""Reflection for tools such as grpcurl, bounded: it is open to everybody, and each of its streams takes a thread."""

from collections.abc import Callable, Iterator
from threading import BoundedSemaphore
from typing import TypeVar

import grpc
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

__all__ = ["BoundedReflection"]

_PREFIX = "/grpc.reflection."

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class BoundedReflection(grpc.ServerInterceptor):
    """Refuse reflection beyond ``calls_max`` streams at a time."""

    def __init__(self, calls_max: int) -> None:
        self._free = BoundedSemaphore(calls_max)

    @staticmethod
    def add_to(server: grpc.Server, *services: str) -> None:
        """Let ``server`` tell about services, itself included."""
        reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), server)

    def intercept_service(  # pyright: ignore[reportIncompatibleMethodOverride]  # gRPC passes both by position
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Request, Answer] | None]",
        details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Request, Answer] | None":
        """Pass everything on; a stream of reflection only while one is free."""
        found = continuation(details)
        if found is None or found.stream_stream is None or not details.method.startswith(_PREFIX):
            return found
        answer = found.stream_stream

        def bounded(requests: Iterator[Request], context: grpc.ServicerContext) -> Iterator[Answer]:
            if not self._free.acquire(blocking=False):
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many reflection streams")
            try:
                yield from answer(requests, context)
            finally:
                self._free.release()

        return grpc.stream_stream_rpc_method_handler(bounded, found.request_deserializer, found.response_serializer)

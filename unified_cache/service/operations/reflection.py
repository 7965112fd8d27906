"""Reflection for tools such as grpcurl."""

from collections.abc import Iterator

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2  # type: ignore[import-untyped]

from unified_cache.service.operations.public_calls import PublicCalls

__all__ = ["reflection_methods"]


def reflection_methods(places: PublicCalls, *services: str) -> grpc.GenericRpcHandler:
    """Return what a ``grpc.Server`` is given, to tell about these services and itself."""
    servicer = reflection.ReflectionServicer((*services, reflection.SERVICE_NAME))

    def answer(
        messages: Iterator[reflection_pb2.ServerReflectionRequest], context: grpc.ServicerContext
    ) -> Iterator[object]:
        with places.admitted(context) as call:
            yield from servicer.ServerReflectionInfo(call.received(messages), context)

    method = grpc.stream_stream_rpc_method_handler(
        answer,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": method})

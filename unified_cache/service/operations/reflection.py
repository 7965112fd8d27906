"""Reflection for tools such as grpcurl."""

from collections.abc import Iterator

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2  # type: ignore[import-untyped]

from unified_cache.service.operations.public_calls import PublicCalls, parsed_request

__all__ = ["reflection_methods"]


def reflection_methods(places: PublicCalls, *services: str) -> grpc.GenericRpcHandler:
    """Return what a ``grpc.Server`` is given, to tell about these services and itself."""
    servicer = reflection.ReflectionServicer((*services, reflection.SERVICE_NAME))

    def answer(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with places.admitted(context) as call:
            received = call.received(messages)
            requests = (parsed_request(reflection_pb2.ServerReflectionRequest, message) for message in received)
            for reply in servicer.ServerReflectionInfo(requests, context):
                yield reply.SerializeToString()

    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(answer)
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, {"ServerReflectionInfo": method})

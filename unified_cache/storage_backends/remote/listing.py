"""The identities that a server knows of its caller, or has pages of."""

from collections.abc import Iterator

import grpc

from unified_cache.errors import InputError, StorageError
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.remote.server import Server, is_unknown_call, storage_error
from unified_cache.wire.calls import Call, parsed

__all__ = ["listed_identities"]


def listed_identities(server: Server) -> Iterator[Manifest]:
    """Yield the manifests of one server in the order of their digests, as clients name them.

    Raises:
        StorageError: it does not answer, is older than this call, or lists them in no order.
    """
    after = b""
    while True:
        request = pb.IdentitiesRequest(tenant=server.tenant, after=after)
        try:
            reply = parsed(pb.IdentitiesReply, server.ask(Call.IDENTITIES, request.SerializeToString())())
        except (grpc.RpcError, InputError) as error:
            if isinstance(error, grpc.RpcError) and is_unknown_call(error):
                raise StorageError(
                    f"{server.name} must say which identities it has, and is older than that call: update it",
                    retryable=False,
                ) from error
            raise storage_error(error, Call.IDENTITIES, server) from error
        if not reply.manifests:
            return
        for manifest in reply.manifests:
            if manifest.identity <= after:
                raise StorageError(f"{server.name} must list identities in order, found one twice", retryable=False)
            after = manifest.identity
            yield manifest

"""The identities that a server knows of its caller, or has pages of."""

from collections.abc import Iterator

from unified_cache.errors import StorageError
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.remote.server import Server, is_unknown_call
from unified_cache.wire.calls import Call

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
            reply = server.answer(Call.IDENTITIES, request, pb.IdentitiesReply)
        except StorageError as error:
            if is_unknown_call(error.__cause__):
                raise StorageError(
                    f"{server.name} must say which identities it has, and is older than that call: update it",
                    retryable=False,
                ) from error
            raise
        if not reply.manifests:
            return
        for manifest in reply.manifests:
            if manifest.identity <= after:
                raise StorageError(f"{server.name} must list identities in order, found one twice", retryable=False)
            after = manifest.identity
            yield manifest

"""The identities of one tenant as its clients name them, a bounded number at a time."""

from collections.abc import Iterable

from unified_cache.errors import StorageError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.proto.service_pb2 import IdentitiesReply
from unified_cache.storage_backends.manifest import description_for, manifest_of

__all__ = ["REPLY_BYTES_MAX", "listed_after"]

REPLY_BYTES_MAX = 1 << 20
"""Of manifests in one reply, and one manifest at least: a server takes none that is a tenth of that."""


def listed_after(
    after: bytes, tenant: str, registered: Iterable[Manifest], stored: Iterable[Manifest]
) -> IdentitiesReply:
    """Return the identities of a tenant that follow the digest ``after``, in the order of their digests.

    ``registered`` are as clients say them, ``stored`` are those of all tenants as the store has them. One that makes
    no sense is left out: nobody could say Hello for it.
    """
    known = {manifest.identity: manifest for manifest in registered}
    for manifest in stored:
        plain = _as_clients_say_it(tenant, manifest)
        if plain is not None:
            known.setdefault(plain.identity, plain)
    reply = IdentitiesReply()
    reply_bytes = 0
    for digest in sorted(digest for digest in known if digest > after):
        reply_bytes += known[digest].ByteSize()
        if reply.manifests and reply_bytes > REPLY_BYTES_MAX:
            break
        reply.manifests.append(known[digest])
    return reply


def _as_clients_say_it(tenant: str, manifest: Manifest) -> Manifest | None:
    try:
        described = description_for(tenant, manifest)
    except StorageError:
        return None
    return None if described is None else manifest_of(described.identity, described.layout)

"""Registered identities: by tenant and digest, each with its layout and its name in the store.

The digest of an identity covers the model's name, revision, dtype, shard and the whole layout. So one tenant may use
bf16 and fp8 pages, or two page sizes, of one model at the same time, as in a rolling upgrade.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from threading import Lock

import grpc

from unified_cache.core.errors import InputError, StorageError
from unified_cache.core.pool import ModelLayout
from unified_cache.core.seal import FORMAT_VERSION, HEADER_BYTES
from unified_cache.core.settings.service import Role
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.proto.service_pb2 import IdentitiesReply
from unified_cache.proto.wire import REASON, REASON_HELLO
from unified_cache.service.access.callers import Caller, Refused
from unified_cache.service.limits import Limits
from unified_cache.storage_backends.manifest import described_by, description_for, manifest_of, model_of_tenant

POOLS_MAX = 256
"""Pools of one layout; the largest published one has eight."""

FACTS_MAX = 64
"""Facts of one identity; an engine tells a dozen."""

REPLY_BYTES_MAX = 1 << 20
"""Of manifests in one reply, and one manifest at least: a server takes none that is a tenth of that."""

TEXT_CHARS_MAX = 256
"""Names of models, revisions, dtypes, shards, components, tensors and facts, and the values of facts."""


@dataclass(frozen=True, slots=True)
class Registration:
    """One identity of one tenant, as a client registered it by Hello."""

    manifest: Manifest
    """Manifest as the client has it, without fields that are unknown here."""
    layout: ModelLayout
    object_bytes: Mapping[str, int]
    """Length of a page by pool, header included; pools without bytes have no objects."""
    stored: Manifest
    """Manifest for the store: the model's name holds the tenant, so that no two tenants share a digest."""


_Recent = OrderedDict[bytes, Registration]
"""Identities of one tenant by digest, the one unused for longest first."""


class Registry:
    """Identities that clients named by Hello, a bounded number for each tenant. Thread-safe.

    Those of a tenant's writers are registered, those of its readers are known beside them: no reader changes, delays or
    displaces what a writer registered. Both are soft state. A restart loses them, and beyond the bound the one that was
    unused for longest is dropped; a client that still uses it is asked to say Hello again.
    """

    def __init__(self, limits: Limits) -> None:
        self._registered: defaultdict[str, _Recent] = defaultdict(OrderedDict)
        self._known_to_readers: defaultdict[str, _Recent] = defaultdict(OrderedDict)
        """Both by tenant."""
        self._limits = limits
        self._guard = Lock()

    def add(self, caller: Caller, manifest: Manifest) -> Registration:
        """Check a manifest and register it, or know it for readers; idempotent."""
        tenant = caller.tenant
        said = self._checked(tenant, manifest)
        with self._guard:
            registered, known = self._registered[tenant], self._known_to_readers[tenant]
            earlier = registered.get(manifest.identity)
            if caller.role.includes(Role.WRITER):
                known.pop(manifest.identity, None)
                return self._keep(registered, said)
            if earlier is not None:
                return self._keep(registered, earlier)
            return self._keep(known, said)

    def find(self, tenant: str, identity: bytes) -> Registration:
        """Return what a tenant's clients named by a digest; it is then the most recently used.

        Raises:
            Refused: the tenant must say Hello for it, for the first time or again.
        """
        with self._guard:
            for kept in (self._registered[tenant], self._known_to_readers[tenant]):
                if identity in kept:
                    return self._keep(kept, kept[identity])
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION, "say Hello for this identity first", [(REASON, REASON_HELLO)]
        )

    def of(self, tenant: str) -> list[Registration]:
        """Return all of a tenant, the registered ones first."""
        with self._guard:
            return [*self._registered[tenant].values(), *self._known_to_readers[tenant].values()]

    def registered(self, tenant: str) -> list[Registration]:
        """Return those that writers of a tenant registered."""
        with self._guard:
            return list(self._registered[tenant].values())

    def forget(self, tenant: str, identity: bytes) -> None:
        """Drop an identity; a client that still uses it is asked to say Hello again."""
        with self._guard:
            self._registered[tenant].pop(identity, None)
            self._known_to_readers[tenant].pop(identity, None)

    def _keep(self, kept: _Recent, registration: Registration) -> Registration:
        """Keep an identity as the most recently used, and drop the one unused for longest where they are too many."""
        kept[registration.manifest.identity] = registration
        kept.move_to_end(registration.manifest.identity)
        if len(kept) > self._limits.identities_max:
            kept.popitem(last=False)
        return registration

    def _checked(self, tenant: str, manifest: Manifest) -> Registration:
        if manifest.format_version != FORMAT_VERSION:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"format version: expected {FORMAT_VERSION}, found {manifest.format_version}",
            )
        texts = [manifest.model, manifest.revision, manifest.dtype, manifest.shard]
        texts += [component.name for component in manifest.components]
        texts += [pool.tensors for component in manifest.components for pool in component.pools]
        texts += [text for fact in manifest.facts for text in (fact.name, fact.value)]
        if not manifest.model or not all(len(text) <= TEXT_CHARS_MAX and text.isprintable() for text in texts):
            raise InputError(f"names in a manifest are printable and at most {TEXT_CHARS_MAX} long; a model has one")
        if sum(len(component.pools) for component in manifest.components) > POOLS_MAX:
            raise InputError(f"a layout has at most {POOLS_MAX} pools")
        if len(manifest.facts) > FACTS_MAX:
            raise InputError(f"an identity has at most {FACTS_MAX} facts")
        try:
            described = described_by(manifest)
        except StorageError as error:
            raise InputError(str(error)) from error
        layout = described.layout
        object_bytes = {pool.name: HEADER_BYTES + pool.page_bytes for pool in layout.pools if pool.page_bytes}
        if max(object_bytes.values(), default=0) > self._limits.page_bytes_max:
            raise InputError(f"a page has at most {self._limits.page_bytes_max} bytes in one pool")
        # What is kept is made again from what was understood: a message keeps fields that nobody knows, however long.
        plain = manifest_of(described.identity, layout)
        scoped = replace(described.identity, model=model_of_tenant(tenant, described.identity.model))
        return Registration(plain, layout, object_bytes, manifest_of(scoped, layout))


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

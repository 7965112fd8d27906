"""Registered identities: by tenant and digest, each with its layout and its name in the store.

The digest of an identity covers the model's name, revision, dtype, shard and the whole layout. So one tenant may use
bf16 and fp8 pages, or two page sizes, of one model at the same time, as in a rolling upgrade.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Lock

import grpc

from unified_cache.errors import InputError, StorageError
from unified_cache.pool import ModelLayout
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import FORMAT_VERSION, HEADER_BYTES
from unified_cache.service.access.callers import Caller, Refused, Role
from unified_cache.settings.limits import LimitSettings
from unified_cache.storage_backends.manifest import described_by, manifest_of, model_of_tenant
from unified_cache.wire.calls import REASON, REASON_HELLO

__all__ = ["Registration", "Registry"]

POOLS_MAX = 256
"""Pools of one layout; the largest published one has eight."""

FACTS_MAX = 64
"""Facts of one identity; an engine tells a dozen."""

TEXT_CHARS_MAX = 256
"""Names of models, revisions, dtypes, shards, components and facts, and the values of facts."""


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
    vocabulary: int
    """One more than the largest token id that a lookup may name; 0 for no bound."""

    def check_pool(self, pool: str) -> None:
        """Check that pages of a pool can be stored.

        Raises:
            InputError: the layout has no such pool, or no objects in it.
        """
        if pool not in self.object_bytes:
            raise InputError(f"a pool is one of {', '.join(self.object_bytes)}, found {pool!r}")


class Registry:
    """Identities that clients named by Hello, a bounded number for each tenant. Thread-safe.

    Those of a tenant's writers are registered, those of its readers are known beside them: no reader changes, delays or
    displaces what a writer registered. Both are soft state. A restart loses them, and beyond the bound the one that was
    unused for longest is dropped; a client that still uses it is told to say Hello again.
    """

    def __init__(self, limits: LimitSettings) -> None:
        self._registered = _RecentIdentities(limits.identities_max)
        self._known_to_readers = _RecentIdentities(limits.identities_max)
        self._limits = limits
        self._guard = Lock()

    def add(self, caller: Caller, manifest: Manifest, vocabulary: int) -> Registration:
        """Check a manifest and register it, or know it for readers; idempotent.

        Of two writers that say different vocabularies the larger holds, and none is larger than any: no client can
        narrow what another may look up.

        Raises:
            InputError: the manifest makes no sense, or its digest is not that of its content.
            Refused: its pages have another format version.
        """
        tenant = caller.tenant
        said = self._checked(tenant, manifest, vocabulary)
        with self._guard:
            registered = self._registered.find(tenant, manifest.identity)
            if caller.role.includes(Role.WRITER):
                self._known_to_readers.forget(tenant, manifest.identity)
                return self._registered.keep(tenant, _merged(registered, said))
            if registered is not None:
                return registered
            known = self._known_to_readers.find(tenant, manifest.identity)
            return self._known_to_readers.keep(tenant, _merged(known, said))

    def find(self, tenant: str, identity: bytes) -> Registration:
        """Return what a tenant's clients named by a digest; it is then the most recently used.

        Raises:
            Refused: the tenant must say Hello for it, for the first time or again.
        """
        with self._guard:
            found = self._registered.find(tenant, identity) or self._known_to_readers.find(tenant, identity)
        if found is None:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION, "say Hello for this identity first", [(REASON, REASON_HELLO)]
            )
        return found

    def of(self, tenant: str) -> list[Registration]:
        """Return all of a tenant, the registered ones first."""
        with self._guard:
            return [*self._registered.of(tenant), *self._known_to_readers.of(tenant)]

    def registered(self, tenant: str) -> list[Registration]:
        """Return those that writers of a tenant registered."""
        with self._guard:
            return self._registered.of(tenant)

    def forget(self, tenant: str, identity: bytes) -> None:
        """Drop an identity; a client that still uses it is told to say Hello again."""
        with self._guard:
            self._registered.forget(tenant, identity)
            self._known_to_readers.forget(tenant, identity)

    def _checked(self, tenant: str, manifest: Manifest, vocabulary: int) -> Registration:
        if manifest.format_version != FORMAT_VERSION:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"format version: expected {FORMAT_VERSION}, found {manifest.format_version}",
            )
        texts = [manifest.model, manifest.revision, manifest.dtype, manifest.shard]
        texts += [component.name for component in manifest.components]
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
        # What is kept is made anew from what was understood: a message keeps fields that nobody knows, however long.
        plain = manifest_of(described.identity, layout)
        scoped = replace(described.identity, model=model_of_tenant(tenant, described.identity.model))
        return Registration(plain, layout, object_bytes, manifest_of(scoped, layout), vocabulary)


class _RecentIdentities:
    """The identities of each tenant that were used last, a bounded number. Not thread-safe."""

    def __init__(self, identities_max: int) -> None:
        self._identities_max = identities_max
        self._kept: dict[str, OrderedDict[bytes, Registration]] = {}
        """By tenant, the identity that was unused for longest first."""

    def keep(self, tenant: str, registration: Registration) -> Registration:
        """Keep an identity as the most recently used, and drop the one unused for longest where they are too many."""
        kept = self._kept.setdefault(tenant, OrderedDict())
        kept[registration.manifest.identity] = registration
        kept.move_to_end(registration.manifest.identity)
        if len(kept) > self._identities_max:
            kept.popitem(last=False)
        return registration

    def find(self, tenant: str, identity: bytes) -> Registration | None:
        """Return an identity, which is then the most recently used; None if it is not kept."""
        kept = self._kept.get(tenant)
        if kept is None or identity not in kept:
            return None
        kept.move_to_end(identity)
        return kept[identity]

    def of(self, tenant: str) -> list[Registration]:
        """Return all of a tenant."""
        return list(self._kept.get(tenant, {}).values())

    def forget(self, tenant: str, identity: bytes) -> None:
        """Drop an identity, if it is kept."""
        self._kept.get(tenant, OrderedDict[bytes, Registration]()).pop(identity, None)


def _merged(earlier: Registration | None, said: Registration) -> Registration:
    """Return what was said last, with the larger vocabulary of both; 0 is larger than any."""
    if earlier is None:
        return said
    bounds = (earlier.vocabulary, said.vocabulary)
    return replace(said, vocabulary=max(bounds) if all(bounds) else 0)

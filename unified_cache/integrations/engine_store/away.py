"""An engine's store once it is there, and the registrations that it is then given, again where one fails."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from threading import Lock

from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import CacheError
from unified_cache.core.pool import Identity, ModelLayout
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.common.breaker import Backoff, Retries
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Capability, Store
from unified_cache.storage_backends.wrappers import StorageGuard
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """A store, verified and guarded, and what it says of itself.

    Innermost first: the store, verification, deadline, retries, breaker. So a page is
    verified on the thread that read it, in the same call, while it is in that processor's caches.
    """

    verified: VerifiedStorage
    guard: StorageGuard
    capability: Capability
    memory: Store | None
    """The store itself, where it reads pages from memory: that waits for nothing, so it needs no guard."""

    @classmethod
    def around(cls, backend: Store, name: str, config: GuardConfig, clock: Clock) -> "OpenedStore":
        """Take a store over; asks it what it can do, without a bound on the time. The log calls it ``name``, if any."""
        capability = backend.capability()
        verified = VerifiedStorage(backend)
        named = replace(capability, name=name or capability.name)
        guard = StorageGuard(verified, named, config, clock)
        return cls(verified, guard, capability, backend.memory_reader())


class _Registration:
    """One identity, and whether the store has taken it."""

    __slots__ = ("is_taken", "manifest", "pools", "retries")

    def __init__(self, manifest: Manifest, pools: tuple[str, ...], retries: Retries) -> None:
        self.manifest = manifest
        self.pools = pools
        self.retries = retries
        self.is_taken = False


class Registrations:
    """Manifests by identity. A call announces what its pages need; what fails is announced again after a pause."""

    __slots__ = ("_by_identity", "_clock", "_guard", "_pauses")

    def __init__(self, pauses: Backoff, clock: Clock) -> None:
        self._by_identity: dict[bytes, _Registration] = {}
        self._pauses = pauses
        self._clock = clock
        self._guard = Lock()

    @property
    def taken_count(self) -> int:
        """Identities that the store has taken."""
        return sum(each.is_taken for each in list(self._by_identity.values()))

    @property
    def count(self) -> int:
        """Identities in all."""
        return len(self._by_identity)

    def remember(self, identity: Identity, layout: ModelLayout) -> list[bytes]:
        """Remember an identity; return the digests that its pools are stored under.

        Raises:
            LayoutError: the layout's pools cannot be those of the identity's shard.
        """
        parts = identity.parts(layout)
        manifests = [manifest_of(part.identity, part.layout) for part in parts]
        with self._guard:
            for manifest, part in zip(manifests, parts, strict=True):
                if manifest.identity not in self._by_identity:
                    retries = Retries(f"registering {identity.model} with the store", self._pauses, self._clock)
                    self._by_identity[manifest.identity] = _Registration(manifest, part.names, retries)
        return [manifest.identity for manifest in manifests]

    def may_ask(self, identities: Collection[bytes]) -> bool:
        """Return whether the store has taken these identities, or may be asked to now.

        Not one that nobody has remembered, nor one that it refused a moment ago.
        """
        for identity in identities:
            found = self._by_identity.get(identity)
            if found is None or not (found.is_taken or found.retries.is_due):
                return False
        return True

    def are_taken(self, identities: Collection[bytes]) -> bool:
        """Return whether the store has taken all of these identities."""
        return all(found is not None and found.is_taken for found in map(self._by_identity.get, identities))

    def announce(self, store: Store, identities: Collection[bytes], memory: memoryview) -> None:
        """Announce those of these identities that the store has not taken, with the memory that pages lie in.

        Raises:
            CacheError: the store does not take one, or does not answer.
        """
        for identity in identities:
            found = self._by_identity[identity]
            if found.is_taken:
                continue
            slabs: Mapping[str, memoryview] = dict.fromkeys(found.pools, memory)
            try:
                store.register(found.manifest, slabs)
            except CacheError as error:
                with self._guard:
                    found.retries.record_failure(error)
                raise
            with self._guard:
                found.is_taken = True
                found.retries.record_success()

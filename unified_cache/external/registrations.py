"""Identities that a store is to know before pages of them are put, remembered until it has taken them."""

from collections.abc import Callable, Collection, Mapping
from threading import Lock

from unified_cache.errors import CacheError
from unified_cache.external.retries import Retries
from unified_cache.pool import Identity, ModelLayout
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.common.backoff import Backoff
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import StorageBackend

__all__ = ["Registrations"]


class _Registration:
    """One identity, and what became of announcing it."""

    __slots__ = ("is_taken", "manifest", "next_s", "pools", "retries")

    def __init__(self, manifest: Manifest, pools: tuple[str, ...], retries: Retries, next_s: float) -> None:
        self.manifest = manifest
        self.pools = pools
        self.retries = retries
        self.is_taken = False
        self.next_s = next_s
        """When it may be announced again, by the clock."""


class Registrations:
    """Manifests by identity. A call announces what its pages need; what fails is announced again after a pause."""

    __slots__ = ("_by_identity", "_clock", "_guard", "_pauses")

    def __init__(self, pauses: Backoff, clock: Callable[[], float]) -> None:
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
                    retries = Retries(f"registering {identity.model} with the store", self._pauses)
                    registration = _Registration(manifest, part.names, retries, self._clock())
                    self._by_identity[manifest.identity] = registration
        return [manifest.identity for manifest in manifests]

    def may_ask(self, identities: Collection[bytes]) -> bool:
        """Tell whether the store has taken these identities, or may be asked to now.

        Not one that nobody has remembered, nor one that it refused a moment ago.
        """
        for identity in identities:
            found = self._by_identity.get(identity)
            if found is None or not (found.is_taken or self._clock() >= found.next_s):
                return False
        return True

    def are_taken(self, identities: Collection[bytes]) -> bool:
        """Tell whether the store has taken all of these identities."""
        return all(found is not None and found.is_taken for found in map(self._by_identity.get, identities))

    def announce(self, store: StorageBackend, identities: Collection[bytes], landing: memoryview) -> None:
        """Announce those of these identities that the store has not taken, with the memory that pages lie in.

        Raises:
            CacheError: the store does not take one, or does not answer.
        """
        for identity in identities:
            found = self._by_identity[identity]
            if found.is_taken:
                continue
            slabs: Mapping[str, memoryview] = dict.fromkeys(found.pools, landing)
            try:
                store.register(found.manifest, slabs)
            except CacheError as error:
                with self._guard:
                    found.next_s = self._clock() + found.retries.failed(error)
                raise
            with self._guard:
                found.is_taken = True
                found.retries.succeeded()

"""Stored pages of each tenant and their bytes: counted under its cap, and held to its share of the store.

A store evicts the least recently used page of any tenant, so that one tenant's puts would evict another's pages. Here
no tenant's would: before the pages that are counted outgrow the store, the tenant that is furthest above its share
loses its own oldest pages. Shares of the store's cap are by quota, among the tenants that have pages in it. A tenant
below its share loses nothing to others; what nobody claims, anybody may use.

Counting starts at zero with the process: pages that were in the store before this server are counted from when they are
read or put again. Until then they have been unused for longest, and the store evicts them first.
"""

import heapq
from collections.abc import Container, Iterable, Sequence
from threading import Lock

from unified_cache.core.seal import Label
from unified_cache.core.settings.limits import QuotaSettings
from unified_cache.storage_backends.common.lru import StoreLru, page_bytes
from unified_cache.storage_backends.protocol import PageIO

__all__ = ["COUNTED_PAGES_MAX", "TenantUsage"]

COUNTED_PAGES_MAX = 1 << 20
"""Pages of one tenant whose stored bytes are counted one by one; beyond, the oldest page is no longer counted."""

TENANTS_MAX = 10_000
"""Tenants counted; others are refused what counts."""


class TenantUsage:
    """Pages that each tenant has in the store, as far as this server put or read them. Thread-safe.

    A store evicts without a notice. A caller that finds the quota full asks for the ``oldest`` labels and drops those
    that are gone; labels that proved present come last the next time. ``store_bytes_max`` is the cap on the store, None
    where there is none to share.
    """

    def __init__(self, quota: QuotaSettings, names_max: int, store_bytes_max: int | None) -> None:
        self._quota = quota
        self._names_max = names_max
        self._store_bytes_max = store_bytes_max
        self._held: dict[str, StoreLru] = {}
        self._guard = Lock()

    def held_bytes(self, tenant: str) -> int:
        """Return the bytes counted for a tenant."""
        with self._guard:
            held = self._held.get(tenant)
            return 0 if held is None else held.bytes_used

    def by_tenant(self) -> dict[str, int]:
        """Return the bytes counted for every tenant that has any."""
        with self._guard:
            return {tenant: held.bytes_used for tenant, held in self._held.items()}

    def take(self, tenant: str, pages: Sequence[PageIO]) -> bool:
        """Count pages as the most recently used; False, and nothing counted, where the tenant's cap would be passed."""
        with self._guard:
            held = self._held.get(tenant) or StoreLru(None)
            fresh_bytes = {page.label: page_bytes(page) for page in pages if page.label not in held}
            if fresh_bytes and not self._has_room(tenant, held.bytes_used + sum(fresh_bytes.values())):
                return False
            for label, count_bytes in fresh_bytes.items():
                held.add(label, count_bytes)
            held.touch(page.label for page in reversed(pages))
            if len(held):
                self._held[tenant] = held
            while len(held) > self._names_max:
                self._release(tenant, [found.label for found in held.least_recent(1, ())[0]])
            return True

    def outgrown(self, tenant: str, labels: Iterable[Label]) -> list[Label]:
        """Return those that went as a ``surplus`` while they were on their way to a store that has a cap."""
        with self._guard:
            held = self._held.get(tenant)
            if self._store_bytes_max is None:
                return []
            return [label for label in labels if held is None or label not in held]

    def touch(self, tenant: str, labels: Sequence[Label]) -> None:
        """Record the use of pages; the first become the most recent, so a prefix goes tail first."""
        with self._guard:
            held = self._held.get(tenant)
            if held is not None:
                held.touch(reversed(labels))

    def drop(self, tenant: str, labels: Iterable[Label]) -> None:
        """Release the bytes of pages that are gone; a label that was never counted is ignored."""
        with self._guard:
            self._release(tenant, labels)

    def drop_identity(self, tenant: str, identity: bytes) -> None:
        """Count every page of one identity as gone. Linear in the tenant's pages."""
        with self._guard:
            held = self._held.get(tenant)
            self._release(tenant, [] if held is None else held.labels_of(identity))

    def oldest(self, tenant: str, count: int) -> list[Label]:
        """Return the labels that were not asked about for longest; they become the last ones."""
        with self._guard:
            held = self._held.get(tenant)
            labels = [] if held is None else held.oldest(count)
            if held is not None:
                held.touch(labels)
            return labels

    def surplus(self, arriving: Container[Label]) -> list[Label]:
        """Stop counting what the store cannot hold beside the rest, and return it for removal.

        The tenant that is furthest above its share goes down to the next one, and so on. Pages that are ``arriving``
        are the last of their tenant to go; of a chain the first pages stay.
        """
        if self._store_bytes_max is None:
            return []
        with self._guard:
            over_bytes = sum(held.bytes_used for held in self._held.values()) - self._store_bytes_max
            if over_bytes <= 0:
                return []
            gone: list[Label] = []
            fullest = [self._fullness(tenant) for tenant in self._held]
            heapq.heapify(fullest)
            while over_bytes > 0 and fullest:
                _, tenant = heapq.heappop(fullest)
                next_share = -fullest[0][0] if fullest else 0.0
                above_bytes = self._held[tenant].bytes_used - round(next_share * self._bytes_max(tenant))
                victims = self._least_recent(tenant, min(over_bytes, max(1, above_bytes)), arriving)
                over_bytes -= self._release(tenant, victims)
                gone += victims
                if tenant in self._held:
                    heapq.heappush(fullest, self._fullness(tenant))
            return gone

    def _least_recent(self, tenant: str, wanted_bytes: int, arriving: Container[Label]) -> list[Label]:
        """Name pages of a tenant that come to ``wanted_bytes``; those that are arriving where there are no others."""
        held = self._held[tenant]
        victims, short_bytes = held.least_recent(wanted_bytes, arriving)
        if short_bytes:
            victims, _ = held.least_recent(wanted_bytes, ())
        return [victim.label for victim in victims]

    def _has_room(self, tenant: str, total_bytes: int) -> bool:
        """Return whether a tenant may have so many bytes, and is one of few that have any."""
        if tenant not in self._held and len(self._held) >= TENANTS_MAX:
            return False
        return total_bytes <= self._bytes_max(tenant)

    def _bytes_max(self, tenant: str) -> int:
        return self._quota.of(tenant).stored_bytes_max

    def _fullness(self, tenant: str) -> tuple[float, str]:
        """Rank a tenant by the part of its quota that it has stored, the fullest first."""
        return -self._held[tenant].bytes_used / self._bytes_max(tenant), tenant

    def _release(self, tenant: str, labels: Iterable[Label]) -> int:
        """Stop counting pages; return their bytes. The caller holds the guard."""
        held = self._held.get(tenant)
        if held is None:
            return 0
        gone_bytes = sum(held.forget(label) for label in labels)
        if not len(held):
            del self._held[tenant]
        return gone_bytes

"""Stored pages of each tenant and their bytes: kept under its quota, and to its share of the store.

A bound evicts: a tenant at its quota loses its own least recently used pages, and declined is only what is larger than
the quota by itself. A store evicts the least recently used page of any tenant, so that one tenant's puts would evict
another's pages. Here no tenant's would: before the pages that are counted outgrow the store, the tenant that is
furthest above its share loses its own oldest pages. Shares of the store's cap are by quota, all of the cap where a
tenant has none, among the tenants that have pages in it. A tenant below its share loses nothing to others; what nobody
claims, anybody may use.

Pages that were in the store before this server are counted when they are found, as older than all that were used since.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from enum import Enum
from heapq import nlargest
from threading import Lock

from unified_cache.core.seal import Label
from unified_cache.core.settings.service import QuotaSettings
from unified_cache.storage_backends.common.lru import StoreLru
from unified_cache.storage_backends.protocol import PageIO, StoredObject, page_bytes

COUNTED_PAGES_MAX = 1 << 24
"""Pages of all tenants, counted one by one: 1 TiB of 64 KiB pages, whose names take some 4 GiB. Beyond, the tenant with
the most loses its oldest."""


class Bound(Enum):
    """Bound for which a tenant lost pages."""

    QUOTA = "quota"
    SHARE = "share"
    PAGES = "pages"
    """``COUNTED_PAGES_MAX``."""


class TenantUsage:
    """Pages that each tenant has in the store, as far as this server put, read or found them. Thread-safe.

    A store evicts without a notice: a page that it evicted counts until it is the tenant's oldest. ``store_bytes_max``
    is the cap on the store, None where there is none to share.
    """

    def __init__(
        self,
        quota: QuotaSettings,
        pages_max: int,
        store_bytes_max: int | None,
        taken_bytes: Callable[[int], int] = int,
    ) -> None:
        """``taken_bytes`` says what a page of a length takes of the store's cap, and so of a quota."""
        self._quota = quota
        self._taken_bytes = taken_bytes
        self._pages_max = pages_max
        self._store_bytes_max = store_bytes_max
        self._held: dict[str, StoreLru] = {}
        self._evicted_count: Counter[tuple[str, Bound]] = Counter()
        self._guard = Lock()

    def held_bytes(self, tenant: str) -> int:
        """Return the bytes counted for a tenant."""
        with self._guard:
            held = self._held.get(tenant)
            return 0 if held is None else held.bytes_used

    def by_tenant(self) -> dict[str, int]:
        """Return the bytes counted for every tenant that has any."""
        with self._guard:
            return {tenant: held.bytes_used for tenant, held in self._held.items() if len(held)}

    def evicted_count(self) -> Counter[tuple[str, Bound]]:
        """Return the pages that each tenant has lost so far, by bound; a copy."""
        with self._guard:
            return self._evicted_count.copy()

    def record_lost(self, tenant: str, bound: Bound, count: int) -> None:
        """Count pages that the store had, and that were removed for a bound."""
        if count:
            with self._guard:
                self._evicted_count[tenant, bound] += count

    def bytes_max(self, tenant: str) -> int | None:
        """Return the bytes that a tenant may have: its quota, else the store's cap; None where there is neither."""
        quota_bytes = self._quota.of(tenant).stored_bytes_max
        return self._store_bytes_max if quota_bytes is None else quota_bytes

    def take(self, tenant: str, pages: Sequence[PageIO], chain: Collection[Label] = ()) -> list[Label]:
        """Count pages as the most recent; return the tenant's least recent that its quota has no room for beside them.

        Those are counted no more, and are to be removed. ``chain`` is of all pages of the call that these are a part
        of, in order: none of it goes for another. Where it exceeds the quota by itself, its first pages are counted
        and the last are ``uncounted``.
        """
        with self._guard:
            held = self._pages_of(tenant)
            _, gone = held.store([page.label for page in pages], list(map(page_bytes, pages)), chain)
            if len(chain) > len(pages):
                held.touch(reversed(list(chain)))
            return gone

    def find(self, tenant: str, objects: Sequence[StoredObject]) -> list[Label]:
        """Count objects that are there from before, least recent first; return those beyond the quota, to be removed.

        They are older than all that is counted; what is counted already stays as it is.
        """
        with self._guard:
            held = self._pages_of(tenant)
            for label, object_bytes in reversed(objects):
                if label not in held:
                    held.add_oldest(label, object_bytes)
            gone = [victim.label for victim in held.victims(0, ())[0]]
            for label in gone:
                held.forget(label)
            return gone

    def uncounted(self, tenant: str, labels: Iterable[Label]) -> list[Label]:
        """Return those that found no room, or went for others while they were on their way to the store."""
        with self._guard:
            held = self._held.get(tenant)
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

    def surplus(self, arriving: Container[Label]) -> dict[tuple[str, Bound], list[Label]]:
        """Stop counting what the store cannot hold beside the rest, and return it, by tenant and bound, for removal.

        The tenant that is furthest above its share goes down to the next one, and so on. Pages that are ``arriving``
        are the last of their tenant to go; of a chain the first pages stay.
        """
        with self._guard:
            gone: defaultdict[tuple[str, Bound], list[Label]] = defaultdict(list)
            over_count = sum(map(len, self._held.values())) - self._pages_max
            if over_count > 0:
                tenant = max(self._held, key=lambda name: len(self._held[name]))
                victims, _ = self._held[tenant].least_recent(0, (), over_count)
                gone[tenant, Bound.PAGES] = [victim.label for victim in victims]
                self._release(tenant, gone[tenant, Bound.PAGES])
            for tenant, labels in self._above_shares(arriving):
                gone[tenant, Bound.SHARE] += labels
            return gone

    def _above_shares(self, arriving: Container[Label]) -> Iterator[tuple[str, list[Label]]]:
        while (
            self._store_bytes_max is not None
            and (over_bytes := sum(held.bytes_used for held in self._held.values()) - self._store_bytes_max) > 0
        ):
            parts = [(held.bytes_used / self._weight(held), tenant) for tenant, held in self._held.items()]
            (_, tenant), (next_part, _) = nlargest(2, [*parts, (0.0, "")])
            held = self._held[tenant]
            above_bytes = held.bytes_used - round(next_part * self._weight(held))
            victims = self._least_recent(held, min(over_bytes, max(1, above_bytes)), arriving)
            self._release(tenant, victims)
            yield tenant, victims

    def _weight(self, held: StoreLru) -> int:
        """Return the weight of a tenant's share: its quota, else the cap of the store."""
        return max(1, (self._store_bytes_max or 0) if held.bytes_max is None else held.bytes_max)

    def _least_recent(self, held: StoreLru, wanted_bytes: int, arriving: Container[Label]) -> list[Label]:
        """Name pages of a tenant that come to ``wanted_bytes``; those that are arriving where there are no others."""
        victims, short_bytes = held.least_recent(wanted_bytes, arriving)
        if short_bytes:
            victims, _ = held.least_recent(wanted_bytes, ())
        return [victim.label for victim in victims]

    def _pages_of(self, tenant: str) -> StoreLru:
        """Return the pages of a tenant, to be changed. The caller holds the guard."""
        held = self._held.get(tenant)
        if held is None:
            held = self._held[tenant] = StoreLru(self._quota.of(tenant).stored_bytes_max, self._taken_bytes)
        return held

    def _release(self, tenant: str, labels: Iterable[Label]) -> None:
        """Stop counting pages. The caller holds the guard."""
        held = self._held.get(tenant)
        if held is not None:
            for label in labels:
                held.forget(label)

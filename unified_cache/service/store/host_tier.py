"""Pages in this server's memory, in front of a slower store."""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from threading import Lock

from unified_cache.seal import Label
from unified_cache.service.store.pages import HeldPage, charged_bytes
from unified_cache.storage_backends.common.lru import SCAN_OBJECTS_MAX
from unified_cache.storage_backends.protocol import Scan, StoredObject

__all__ = ["HostTier"]


class _TenantPages:
    """Pages of one tenant: those in LRU order, and those that a search for a victim has met and found pinned."""

    __slots__ = ("in_order", "passed_over", "used_bytes")

    def __init__(self) -> None:
        self.in_order: OrderedDict[Label, HeldPage] = OrderedDict()
        """The least recently used first; some may be pinned."""
        self.passed_over: dict[Label, HeldPage] = {}
        """Pinned pages; no search meets them again."""
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self.in_order) + len(self.passed_over)

    def __contains__(self, label: Label) -> bool:
        return label in self.in_order or label in self.passed_over

    def contains(self, labels: Sequence[Label]) -> list[bool]:
        """Tell for each label whether its page is here."""
        has = self.__contains__ if self.passed_over else self.in_order.__contains__
        return list(map(has, labels))

    def get(self, label: Label) -> HeldPage | None:
        """Return a page that is here."""
        return self.in_order.get(label) or self.passed_over.get(label)

    def touch(self, labels: Sequence[Label]) -> None:
        """Make pages the most recent ones, the first most of all."""
        for label in reversed(labels):
            if label in self.in_order:
                self.in_order.move_to_end(label)

    def labels(self) -> Iterator[Label]:
        """Return the names of all pages."""
        return chain(self.in_order, self.passed_over)

    def pop(self, label: Label) -> HeldPage:
        """Take out a page that is here."""
        found = self.in_order.pop(label, None)
        return self.passed_over.pop(label) if found is None else found


_NOTHING = _TenantPages()
"""Pages of a tenant that has none."""


class HostTier:
    """LRU pages under a cap in bytes; the tenant that holds most bytes evicts, its least recently used page first.

    So a tenant that holds less than an equal share loses no page to the flood of another. A pin is a reference count
    on a label that forbids eviction; it holds also for a page that is admitted later. A page counts with what it takes
    beyond its bytes, see ``charged_bytes``. Thread-safe.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._tenants: dict[str, _TenantPages] = {}
        """Those that have any. Labels are those of the store, so no two tenants share one."""
        self._used_bytes = 0
        self._pins_count: Counter[Label] = Counter()
        self._evicted_count = 0
        self._clears_count: Counter[bytes] = Counter()
        """By identity: clears under way."""
        self._epoch = 0
        self._guard = Lock()

    @property
    def evicted_count(self) -> int:
        """Pages evicted so far."""
        return self._evicted_count

    @property
    def used_bytes(self) -> int:
        """Bytes that all tenants hold."""
        return self._used_bytes

    def used(self, tenant: str) -> tuple[int, int]:
        """Return pages and bytes that a tenant holds."""
        with self._guard:
            pages = self._tenants.get(tenant, _NOTHING)
            return len(pages), pages.used_bytes

    def contains(self, tenant: str, labels: Sequence[Label]) -> list[bool]:
        """Tell for each label whether its page is in memory; changes no recency."""
        with self._guard:
            return self._tenants.get(tenant, _NOTHING).contains(labels)

    def find(self, tenant: str, labels: Sequence[Label]) -> list[HeldPage | None]:
        """Return the pages that are in memory; the first become the most recent, so a prefix is evicted tail first."""
        with self._guard:
            pages = self._tenants.get(tenant, _NOTHING)
            pages.touch(labels)
            return list(map(pages.get, labels))

    def touch(self, tenant: str, labels: Sequence[Label]) -> None:
        """Make pages the most recent ones, the first most of all, as ``find`` does."""
        with self._guard:
            self._tenants.get(tenant, _NOTHING).touch(labels)

    def scan(self, tenant: str, identity: bytes, cursor: str) -> Scan:
        """List pages of one identity in the order of their names, after the name in ``cursor``. Linear in all."""
        with self._guard:
            pages = self._tenants.get(tenant, _NOTHING)
            mine = [label for label in pages.labels() if label.identity == identity]
            sizes = {label: page.object_bytes for label in mine if (page := pages.get(label)) is not None}
        names = ((label.page_name, label) for label in sizes)
        first = heapq.nsmallest(SCAN_OBJECTS_MAX, (pair for pair in names if pair[0] > cursor))
        objects = [StoredObject(label, sizes[label]) for _, label in first]
        return Scan(objects, first[-1][0] if len(first) == SCAN_OBJECTS_MAX else "")

    @property
    def epoch(self) -> int:
        """Changes with every clear that begins or ends; see ``admit``."""
        return self._epoch

    @contextmanager
    def clearing(self, tenant: str, identity: bytes) -> Iterator[list[Label]]:
        """Let all pages of one identity go and yield their names; during the ``with`` block admit none."""
        with self._guard:
            self._clears_count[identity] += 1
            self._epoch += 1
            dropped = [label for label in self._tenants.get(tenant, _NOTHING).labels() if label.identity == identity]
            for label in dropped:
                self._forget(tenant, label)
        try:
            yield dropped
        finally:
            with self._guard:
                self._epoch += 1
                self._clears_count[identity] -= 1
                if not self._clears_count[identity]:
                    del self._clears_count[identity]

    def admit(self, tenant: str, label: Label, page: HeldPage, epoch: int) -> bool:
        """Take a page in, unless one of that name is here already; False where there is no room for it.

        Nor is a page taken in whose way here began at an ``epoch`` that is over: it may be one that was cleared.
        """
        with self._guard:
            if epoch != self._epoch or label.identity in self._clears_count:
                return False
            if label in self._tenants.get(tenant, _NOTHING):
                return True
            page_bytes = charged_bytes(page.object_bytes)
            if not self._make_room(page_bytes):
                return False
            pages = self._tenants.setdefault(tenant, _TenantPages())
            pages.in_order[label] = page
            pages.used_bytes += page_bytes
            self._used_bytes += page_bytes
            return True

    def drop(self, tenant: str, labels: Iterable[Label]) -> None:
        """Remove pages, pinned or not."""
        with self._guard:
            for label in labels:
                if label in self._tenants.get(tenant, _NOTHING):
                    self._forget(tenant, label)

    def pin(self, labels: Iterable[Label]) -> None:
        """Add one reference to each label: its page is not evicted while it has any."""
        with self._guard:
            self._pins_count.update(labels)

    def unpin(self, tenant: str, labels: Sequence[Label]) -> None:
        """Drop one reference of each label; a page that eviction passed over meanwhile is then most recently used."""
        pins_count = self._pins_count
        with self._guard:
            for label in labels:
                left_count = pins_count.pop(label) - 1
                if left_count:
                    pins_count[label] = left_count
            pages = self._tenants.get(tenant, _NOTHING)
            if pages.passed_over:
                for label in labels:
                    if label in pages.passed_over and label not in pins_count:
                        pages.in_order[label] = pages.passed_over.pop(label)

    def _make_room(self, needed_bytes: int) -> bool:
        """Evict what is short.

        The cost is one step for each tenant, each victim and each page pinned since, however many are pinned.
        """
        short_bytes = self._used_bytes + needed_bytes - self.bytes_max
        if short_bytes <= 0 or needed_bytes > self.bytes_max:
            return short_bytes <= 0
        largest_first = [(-pages.used_bytes, tenant) for tenant, pages in self._tenants.items() if pages.in_order]
        heapq.heapify(largest_first)
        while largest_first and short_bytes > 0:
            tenant = largest_first[0][1]
            pages = self._tenants[tenant]
            label = next(iter(pages.in_order))
            if label in self._pins_count:
                pages.passed_over[label] = pages.in_order.pop(label)
            else:
                short_bytes -= self._forget(tenant, label)
                self._evicted_count += 1
            if pages.in_order:
                heapq.heapreplace(largest_first, (-pages.used_bytes, tenant))
            else:
                heapq.heappop(largest_first)
        return short_bytes <= 0

    def _forget(self, tenant: str, label: Label) -> int:
        """Take a page out; return the memory that this gives back."""
        pages = self._tenants[tenant]
        freed_bytes = charged_bytes(pages.pop(label).object_bytes)
        pages.used_bytes -= freed_bytes
        self._used_bytes -= freed_bytes
        if not pages:
            del self._tenants[tenant]
        return freed_bytes

"""Pages in this server's memory, in front of a slower store."""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

from unified_cache.seal import Label
from unified_cache.service.store.pages import HeldPage
from unified_cache.storage_backends.common.lru import SCAN_OBJECTS_MAX
from unified_cache.storage_backends.protocol import Scan, StoredObject

__all__ = ["HostTier"]


class HostTier:
    """LRU pages under a cap in bytes; the tenant that holds most bytes evicts, its least recently used page first.

    So a tenant that holds less than an equal share loses no page to the flood of another. A pin is a reference count
    on a label that forbids eviction; it holds also for a page that is admitted later. Thread-safe.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._pages: dict[str, OrderedDict[Label, HeldPage]] = {}
        """By tenant, the least recently used first. Labels are those of the store, so no two tenants share one."""
        self._bytes_used: Counter[str] = Counter()
        self._bytes_total = 0
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

    def used(self, tenant: str) -> tuple[int, int]:
        """Return pages and bytes that a tenant holds."""
        with self._guard:
            return len(self._pages.get(tenant, ())), self._bytes_used[tenant]

    def contains(self, tenant: str, labels: Sequence[Label]) -> list[bool]:
        """Tell for each label whether its page is in memory; changes no recency."""
        with self._guard:
            pages = self._pages.get(tenant, OrderedDict[Label, HeldPage]())
            return list(map(pages.__contains__, labels))

    def find(self, tenant: str, labels: Sequence[Label]) -> list[HeldPage | None]:
        """Return the pages that are in memory; the first become the most recent, so a prefix is evicted tail first."""
        with self._guard:
            pages = self._pages.get(tenant)
            if pages is None:
                return [None] * len(labels)
            found = [pages.get(label) for label in labels]
            for label, page in zip(reversed(labels), reversed(found), strict=True):
                if page is not None:
                    pages.move_to_end(label)
            return found

    def scan(self, tenant: str, identity: bytes, cursor: str) -> Scan:
        """List pages of one identity in the order of their names, after the name in ``cursor``. Linear in all."""
        with self._guard:
            pages = self._pages.get(tenant, OrderedDict[Label, HeldPage]())
            sizes = {label: page.object_bytes for label, page in pages.items() if label.identity == identity}
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
            pages = self._pages.get(tenant, OrderedDict[Label, HeldPage]())
            dropped = [label for label in pages if label.identity == identity]
            for label in dropped:
                self._forget(tenant, pages, label)
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
        object_bytes = page.object_bytes
        with self._guard:
            if epoch != self._epoch or label.identity in self._clears_count:
                return False
            pages = self._pages.setdefault(tenant, OrderedDict[Label, HeldPage]())
            if label in pages:
                return True
            if not self._make_room(object_bytes):
                return False
            pages[label] = page
            self._bytes_used[tenant] += object_bytes
            self._bytes_total += object_bytes
            return True

    def drop(self, tenant: str, labels: Iterable[Label]) -> None:
        """Remove pages, pinned or not."""
        with self._guard:
            pages = self._pages.get(tenant, OrderedDict[Label, HeldPage]())
            for label in labels:
                if label in pages:
                    self._forget(tenant, pages, label)

    def pin(self, labels: Iterable[Label]) -> None:
        """Add one reference to each label: its page is not evicted while it has any."""
        with self._guard:
            self._pins_count.update(labels)

    def unpin(self, labels: Iterable[Label]) -> None:
        """Drop one reference of each label."""
        with self._guard:
            for label in labels:
                left_count = self._pins_count.pop(label) - 1
                if left_count:
                    self._pins_count[label] = left_count

    def _make_room(self, needed_bytes: int) -> bool:
        short_bytes = self._bytes_total + needed_bytes - self.bytes_max
        if short_bytes <= 0 or needed_bytes > self.bytes_max:
            return short_bytes <= 0
        waiting = dict(self._bytes_used)
        while waiting and short_bytes > 0:
            tenant = max(waiting, key=waiting.__getitem__)
            pages = self._pages[tenant]
            victim = next((label for label in pages if label not in self._pins_count), None)
            if victim is None:
                del waiting[tenant]
                continue
            freed_bytes = self._forget(tenant, pages, victim)
            self._evicted_count += 1
            waiting[tenant] -= freed_bytes
            short_bytes -= freed_bytes
        return short_bytes <= 0

    def _forget(self, tenant: str, pages: OrderedDict[Label, HeldPage], label: Label) -> int:
        object_bytes = pages.pop(label).object_bytes
        self._bytes_used[tenant] -= object_bytes
        self._bytes_total -= object_bytes
        return object_bytes

"""What each tenant has put through this server, page by page, so that its bytes can be given back when they go."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import islice
from threading import Lock

from unified_cache.seal import Label
from unified_cache.service.access.callers import ByteQuota

__all__ = ["TenantUsage"]


class TenantUsage:
    """Reserve and give back bytes of a tenant's usage by name. Thread-safe.

    A store evicts without saying so. Who finds no room asks for the ``oldest`` names and drops those that are gone;
    what proved present is asked about last the next time.
    """

    def __init__(self, usage: ByteQuota, names_max: int) -> None:
        self._usage = usage
        self._names_max = names_max
        self._held: dict[str, OrderedDict[Label, int]] = {}
        self._guard = Lock()

    def held_bytes(self, tenant: str) -> int:
        """Return the bytes counted for a tenant. Linear in its pages."""
        with self._guard:
            return sum(self._held.get(tenant, {}).values())

    def take(self, tenant: str, pages: Mapping[Label, int]) -> bool:
        """Count pages of these lengths; False, and nothing counted, where the tenant's cap would be passed."""
        with self._guard:
            held = self._held.setdefault(tenant, OrderedDict[Label, int]())
            fresh = {label: count_bytes for label, count_bytes in pages.items() if label not in held}
            if not self._usage.reserve(tenant, sum(fresh.values())):
                return False
            held.update(fresh)
            while len(held) > self._names_max:
                self._usage.release(tenant, held.popitem(last=False)[1])
            return True

    def drop(self, tenant: str, labels: Iterable[Label]) -> None:
        """Count pages as gone; those never counted are ignored."""
        with self._guard:
            held: dict[Label, int] = self._held.get(tenant, OrderedDict())
            gone_bytes = sum(held.pop(label, 0) for label in labels)
        if gone_bytes:
            self._usage.release(tenant, gone_bytes)

    def oldest(self, tenant: str, count: int) -> list[Label]:
        """Return the names that nobody asked about for longest; they become the last ones."""
        with self._guard:
            held = self._held.get(tenant, OrderedDict[Label, int]())
            labels = list(islice(held, count))
            for label in labels:
                held.move_to_end(label)
            return labels

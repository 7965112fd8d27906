"""Stored pages of each tenant and their bytes, so that the quota is released when a page is gone."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import islice
from threading import Lock

from unified_cache.seal import Label
from unified_cache.service.access.callers import ByteQuota

__all__ = ["TenantUsage"]


class TenantUsage:
    """Labels of the pages that each tenant has stored through this server, counted in its byte quota. Thread-safe.

    A store evicts without a notice. A caller that finds the quota full asks for the ``oldest`` labels and drops those
    that are gone; labels that proved present come last the next time.
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
        """Release the bytes of pages that are gone; a label that was never counted is ignored."""
        with self._guard:
            held: dict[Label, int] = self._held.get(tenant, OrderedDict())
            gone_bytes = sum(held.pop(label, 0) for label in labels)
        if gone_bytes:
            self._usage.release(tenant, gone_bytes)

    def drop_identity(self, tenant: str, identity: bytes) -> None:
        """Count every page of one identity as gone. Linear in the tenant's pages."""
        with self._guard:
            labels = [label for label in self._held.get(tenant, ()) if label.identity == identity]
        self.drop(tenant, labels)

    def oldest(self, tenant: str, count: int) -> list[Label]:
        """Return the labels that were not asked about for longest; they become the last ones."""
        with self._guard:
            held = self._held.get(tenant, OrderedDict[Label, int]())
            labels = list(islice(held, count))
            for label in labels:
                held.move_to_end(label)
            return labels

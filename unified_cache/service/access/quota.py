"""Bytes that each tenant has stored, counted under its cap."""

from threading import Lock

from unified_cache.settings.limits import QuotaSettings

__all__ = ["StoredBytes", "promised_bytes"]


class StoredBytes:
    """Bytes stored by each tenant, counted under its cap; a ``ByteQuota``. Thread-safe.

    Counting starts at zero with the process: bytes that were stored before are not counted.
    """

    def __init__(self, quota: QuotaSettings) -> None:
        self._quota = quota
        self._stored: dict[str, int] = {}
        self._guard = Lock()

    def bytes_max(self, tenant: str) -> int:
        """Return the cap of a tenant."""
        return self._quota.of(tenant).stored_bytes_max

    def reserve(self, tenant: str, count_bytes: int) -> bool:
        """Count bytes that are about to be stored; False, and nothing counted, where the cap would be passed."""
        with self._guard:
            stored = self._stored.get(tenant, 0) + count_bytes
            full = tenant not in self._stored and len(self._stored) >= self._quota.tenants_max
            if full or stored > self.bytes_max(tenant):
                return False
            self._stored[tenant] = stored
            return True

    def release(self, tenant: str, count_bytes: int) -> None:
        """Count bytes as gone; never below zero, since a restart forgets what was stored before it."""
        with self._guard:
            stored = self._stored.get(tenant, 0) - count_bytes
            if stored > 0:
                self._stored[tenant] = stored
            else:
                self._stored.pop(tenant, None)

    def by_tenant(self) -> dict[str, int]:
        """Return the bytes counted now; a copy."""
        with self._guard:
            return dict(self._stored)


def promised_bytes(quota: QuotaSettings) -> int:
    """Return the bytes that tenants may store together at least: those with quotas of their own, and one more."""
    return quota.stored_bytes_max + sum(each.stored_bytes_max for each in quota.tenants.values())

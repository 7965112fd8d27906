"""Leases: pages that a lookup found stay in this server's memory for a bounded time."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock

from unified_cache.seal import Label
from unified_cache.service.store.host_tier import HostTier
from unified_cache.settings.limits import LimitSettings

__all__ = ["Leases"]

LEASE_ID_BYTES = 16
"""Length of a lease's random name, so that nobody guesses another's."""


@dataclass(frozen=True, slots=True)
class _Lease:
    tenant: str
    labels: tuple[Label, ...]
    leased_bytes: int
    ends_s: float


class Leases:
    """Pins of pages in the host tier, each until its lease is released or has expired by a monotonic clock.

    Bounded in number and bytes, by tenant and in all: what goes beyond is not granted. Thread-safe.
    """

    def __init__(
        self,
        host: HostTier,
        limits: LimitSettings,
        clock: Callable[[], float],
        new_id: Callable[[], str] = partial(secrets.token_hex, LEASE_ID_BYTES),
    ) -> None:
        self._host = host
        self._limits = limits
        self._clock = clock
        self._new_id = new_id
        self._leases: dict[str, _Lease] = {}
        self._guard = Lock()

    def count(self, tenant: str) -> int:
        """Return how many leases a tenant has."""
        self.sweep()
        with self._guard:
            return sum(lease.tenant == tenant for lease in self._leases.values())

    def leased_bytes(self) -> int:
        """Return the bytes that leases of all tenants keep from eviction, pages that are not here yet included."""
        with self._guard:
            return sum(lease.leased_bytes for lease in self._leases.values())

    def grant(self, tenant: str, labels: Sequence[Label], leased_bytes: int, lease_s: float) -> str:
        """Keep pages, here now or to come, for ``lease_s``; return the lease's name, empty where there is no room."""
        self.sweep()
        bytes_max = self._host.bytes_max * self._limits.leased_share
        with self._guard:
            own = [lease.leased_bytes for lease in self._leases.values() if lease.tenant == tenant]
            total_bytes = sum(lease.leased_bytes for lease in self._leases.values())
            if len(own) >= self._limits.leases_max or total_bytes + leased_bytes > bytes_max:
                return ""
            if sum(own) + leased_bytes > bytes_max / 2:
                return ""
            name = self._new_id()
            self._leases[name] = _Lease(tenant, tuple(labels), leased_bytes, self._clock() + lease_s)
            self._host.pin(labels)
            return name

    def release(self, tenant: str, name: str) -> bool:
        """End a lease; False, and nothing changed, where it is unknown, another tenant's, or over."""
        self.sweep()
        with self._guard:
            lease = self._leases.get(name)
            if lease is None or lease.tenant != tenant:
                return False
            self._end(name, lease)
            return True

    def sweep(self) -> None:
        """End the leases that have expired. Linear in leases."""
        now_s = self._clock()
        with self._guard:
            for name, lease in [each for each in self._leases.items() if each[1].ends_s <= now_s]:
                self._end(name, lease)

    def _end(self, name: str, lease: _Lease) -> None:
        del self._leases[name]
        self._host.unpin(lease.tenant, lease.labels)

"""What a cache holds and what it has moved: a value, for tables and metrics."""

from dataclasses import dataclass

from unified_cache.controller import Controller, TransferKind
from unified_cache.ledger import Ledger
from unified_cache.pool import Tier
from unified_cache.transfers import Traffic, Transfers

__all__ = ["Occupancy", "Stats"]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Pages of one component on one tier."""

    tier: Tier
    component: str
    capacity: int
    """Pages it can hold: free, evictable, protected or out, each in one of these only."""
    free: int
    evictable: int
    """In the tree, and eviction can give them back now; SGLang's ``evictable_size``, in pages."""
    protected: int
    """In the tree, and locks keep them from eviction; SGLang's ``protected_size``, in pages."""
    out: int
    """Handed out to requests and transfers."""

    @property
    def available(self) -> int:
        """Pages that can be allocated now."""
        return self.free + self.evictable

    @classmethod
    def of(cls, ledger: Ledger) -> "tuple[Occupancy, ...]":
        """Count every component on every tier."""
        return tuple(
            cls(
                tier,
                component.name,
                ledger.capacity(tier, number),
                ledger.free_count(tier, number),
                ledger.evictable_pages(tier, number),
                ledger.protected_pages(tier, number),
                ledger.out_pages(tier, number),
            )
            for tier in Tier
            for number, component in enumerate(ledger.layout.components)
        )


@dataclass(frozen=True, slots=True)
class Stats:
    """What the cache holds and what it has moved since it was opened."""

    occupancy: tuple[Occupancy, ...]
    traffic: dict[TransferKind, Traffic]
    operations_live: int
    operations_failed: int
    operations_declined: int
    calls_quarantined: int
    """Calls that a store has not returned from in time; the pages of each are nobody's until it has."""
    flawed_pages: int
    """Pages that storage returned and that were not what they should be: misses, every one."""

    @classmethod
    def of(cls, ledger: Ledger, controller: Controller, transfers: Transfers) -> "Stats":
        """Count it now."""
        storage = transfers.storage
        return cls(
            occupancy=Occupancy.of(ledger),
            traffic=transfers.moved(),
            operations_live=controller.live_count,
            operations_failed=controller.failed_count,
            operations_declined=controller.declined_count,
            calls_quarantined=len(controller.quarantined),
            flawed_pages=0 if storage is None else sum(storage.backend.flaws_count.values()),
        )

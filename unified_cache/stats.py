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
    free: int
    out: int
    """With requests and transfers; the rest is in the tree."""

    @classmethod
    def of(cls, ledger: Ledger) -> "tuple[Occupancy, ...]":
        """Count every component on every tier."""
        return tuple(
            cls(
                tier,
                component.name,
                ledger.capacity(tier, number),
                ledger.free_count(tier, number),
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

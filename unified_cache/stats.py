"""What a cache holds and what it has moved: a value, for tables and metrics."""

from dataclasses import dataclass

from unified_cache.controller import Leg
from unified_cache.pool import Tier
from unified_cache.transfers import Traffic

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


@dataclass(frozen=True, slots=True)
class Stats:
    """What the cache holds and what it has moved since it was opened."""

    occupancy: tuple[Occupancy, ...]
    traffic: dict[Leg, Traffic]
    operations_live: int
    operations_failed: int
    operations_declined: int
    calls_quarantined: int
    """Calls that a store has not returned from in time; the pages of each are nobody's until it has."""
    flawed_pages: int
    """Pages that storage returned and that were not what they should be: misses, every one."""

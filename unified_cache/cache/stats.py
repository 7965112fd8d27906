"""Statistics of a cache: occupancy of its tiers, look-ups, transfers; values for tables and metrics."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from unified_cache.controller import HintCounts, OperationCounts, StorageTier, TransferKind
from unified_cache.controller.backup_scheduler import BackupCounts
from unified_cache.controller.duplicates import DuplicateCounts
from unified_cache.controller.ledger import Ledger
from unified_cache.controller.operation import Traffic
from unified_cache.core.config import CacheConfig, WritePolicy
from unified_cache.core.pool import Hits, Tier
from unified_cache.storage_backends.common.breaker import BreakerState
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers.layer import Method

STATS_EVERY_S = 1.0
"""Between two publications of figures while the owner polls; making them takes some tens of microseconds."""

logger = logging.getLogger(__name__)


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
    evicted: int
    """Evicted since the cache was opened."""

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
                ledger.evicted_pages(tier, number),
            )
            for tier in Tier
            for number, component in enumerate(ledger.layout.components)
        )


@dataclass(slots=True)
class LookupCounts:
    """Requests, each counted once, when it locks what was found for it, and where their pages came from."""

    count: int = 0
    hits: Hits = field(default_factory=Hits)
    missed_pages: int = 0
    """The rest: computed."""

    def record(self, pages_count: int, hits: Hits) -> None:
        """Count a request of so many pages."""
        self.count += 1
        self.hits += hits
        self.missed_pages += pages_count - hits.total


@dataclass(frozen=True, slots=True)
class AttachedStore:
    """State of the guard around the store that is attached."""

    breaker: BreakerState | None
    """None where the store has no guard: ``config.guard`` is None."""
    refused_count: int = 0
    """Calls that the breaker answered without the store."""
    retries_count: int = 0
    """Calls made again."""

    @classmethod
    def of(cls, storage: StorageTier) -> "AttachedStore":
        """Read it now; the store is not asked."""
        guard = storage.guard
        if guard is None:
            return cls(None)
        return cls(guard.breaker.state, guard.breaker.refused_count, guard.retries_count)


@dataclass(frozen=True, slots=True)
class Stats:
    """Occupancy now, and counts since the cache was opened."""

    counted_at_s: float = field(compare=False)
    """Time of these figures, in seconds since the epoch; figures that differ in nothing else are equal."""
    occupancy: tuple[Occupancy, ...]
    traffic: dict[TransferKind, Traffic]
    lookups: LookupCounts
    operations: dict[TransferKind, OperationCounts]
    """By kind, counted when ``poll`` returns what has ended. None are of STORE, which is part of a backup."""
    backups: BackupCounts
    """Pages that the write policy meant to back up: arrived, waiting, and given up by reason."""
    operations_live: int
    calls_quarantined: int
    """Calls that a store has not returned from in time; the pages of each are nobody's until it has."""
    storage_answers: dict[tuple[Method, Answer], int]
    """Answers of the store that is attached, one for each object: why a page was not read, or not stored."""
    recency_hints: HintCounts
    """Pages in use in memory that were hinted to the attached store, because it evicts, or were not."""
    store: AttachedStore | None
    """None where no store is attached."""
    duplicates: DuplicateCounts
    """Pages that were computed again and compared with the held ones: equal, within the noise, diverged."""

    @property
    def flawed_pages(self) -> int:
        """Pages of storage that were not what they should be, as the store or the cache found: misses, every one."""
        return self.storage_answers.get((Method.GET, Answer.FLAWED), 0)

    @property
    def operations_failed(self) -> int:
        """Operations that failed or were cancelled."""
        return sum(counts.failed + counts.cancelled for counts in self.operations.values())

    @property
    def operations_declined(self) -> int:
        """Operations that were not started."""
        return sum(counts.declined for counts in self.operations.values())

    def warn_of_nothing_kept(self, config: CacheConfig) -> None:
        """Log a warning where prompts were served and no page was ever backed up, though there is a host tier."""
        backed_up_pages = self.traffic[TransferKind.BACKUP].pages
        if config.write is WritePolicy.ON_CALL and config.host_pages[0] and self.lookups.count and not backed_up_pages:
            logger.warning(
                "nothing was kept in host memory or storage: the write policy is on_call, and no call of backup has "
                "copied a page; call it for prompts that are to be kept, or leave the policy at through"
            )


class PublishedStats:
    """Figures that a cache's owner publishes while it polls, and that any thread may read: a value, one moment's."""

    __slots__ = ("_count", "_published_at_s", "latest")

    def __init__(self, count: Callable[[], Stats]) -> None:
        """Publish what ``count`` finds; making it takes some tens of microseconds."""
        self._count = count
        self.publish()

    def publish(self) -> None:
        """Publish the figures of this moment."""
        self.latest = self._count()
        """The figures published last."""
        self._published_at_s = time.monotonic()

    def publish_if_due(self) -> None:
        """Publish the figures of this moment where those published last are older than ``STATS_EVERY_S``."""
        if time.monotonic() >= self._published_at_s + STATS_EVERY_S:
            self.publish()


class StatsSource(Protocol):
    """A cache, or anything else that publishes its figures for other threads."""

    def published_stats(self) -> Stats:
        """Return the figures published last, no longer than a moment old, from any thread."""
        ...

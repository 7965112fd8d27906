"""Figures of a cache that an engine embeds: those that its owner has published last."""

from unified_cache.cache.stats import AttachedStore, Stats, StatsSource
from unified_cache.controller import TransferKind
from unified_cache.observe.live.figures import (
    ComponentFigures,
    FoundPages,
    LinkFigures,
    LiveFigures,
    OperationFigures,
    SlowFigures,
    SourceKind,
    StoreFigures,
)

__all__ = ["CacheFigures", "figures_of"]


class CacheFigures:
    """Source of the figures of one cache; a ``LiveSource``."""

    __slots__ = ("_latest", "_name", "_publisher")

    def __init__(self, name: str, publisher: StatsSource) -> None:
        self._name = name
        self._publisher = publisher
        self._latest: tuple[Stats, LiveFigures] | None = None

    def figures(self) -> LiveFigures:
        """Return the figures that the owner has published last; the same object until it publishes again."""
        stats, latest = self._publisher.published_stats(), self._latest
        if latest is not None and latest[0] is stats:
            return latest[1]
        figures = figures_of(self._name, stats)
        self._latest = (stats, figures)
        return figures


def figures_of(name: str, stats: Stats) -> LiveFigures:
    """Return what the page shows of the statistics of a cache."""
    prefetched = stats.traffic[TransferKind.PREFETCH].component_pages[0]
    lookups = stats.lookups
    return LiveFigures(
        kind=SourceKind.CACHE,
        name=name,
        counted_at_s=stats.counted_at_s,
        components=tuple(
            ComponentFigures(
                held.tier.name.lower(),
                held.component,
                capacity=held.capacity,
                pinned=held.protected,
                evictable=held.evictable,
                in_flight=held.out,
                free=held.free,
                evicted=held.evicted,
            )
            for held in stats.occupancy
            if held.capacity
        ),
        found=FoundPages(
            lookups.count, lookups.device_pages, lookups.host_pages, prefetched, storage=0, missed=lookups.missed_pages
        ),
        links=tuple(LinkFigures(kind.value, moved.pages, moved.payload_bytes) for kind, moved in stats.traffic.items()),
        operations_live=stats.operations_live,
        operations=tuple(
            OperationFigures(kind.value, counts.done, counts.failed, counts.cancelled, counts.declined, counts.partial)
            for kind, counts in stats.operations.items()
            if kind is not TransferKind.STORE
        ),
        slowest=tuple(
            SlowFigures(slow.kind.value, slow.state.value, slow.pages_count, slow.seconds, slow.ended_at_s)
            for slow in stats.slowest
        ),
        store=None if stats.store is None else _store_of(stats, stats.store),
        tenants=None,
    )


def _store_of(stats: Stats, store: AttachedStore) -> StoreFigures:
    return StoreFigures(
        breaker=None if store.breaker is None else store.breaker.value,
        refused_calls=store.refused_count,
        retried_calls=store.retries_count,
        stuck_calls=stats.calls_quarantined,
        flawed_pages=stats.flawed_pages,
        answers=tuple((method.value, answer.value, count) for (method, answer), count in stats.storage_answers.items()),
    )

"""Prometheus metrics of a cache that an engine embeds; needs the extra ``metrics``.

from prometheus_client import REGISTRY
REGISTRY.register(CacheCollector(cache))
"""

from collections.abc import Iterator
from typing import Protocol

from unified_cache.extras import needs_extra
from unified_cache.stats import Stats

with needs_extra("metrics", "unified_cache.metrics"):
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

__all__ = ["CacheCollector", "StatsSource"]

PREFIX = "unified_cache"


class StatsSource(Protocol):
    """A cache, or whoever else has its figures."""

    def published_stats(self) -> Stats:
        """Return figures that are no longer than a moment old, from any thread."""
        ...


class CacheCollector:
    """Collector of one cache's figures, for ``CollectorRegistry.register``.

    Scrapes come on threads of their own, while a cache belongs to its owner's: so they read the figures that the cache
    has published last, in ``poll``, ``wait_all`` or ``close``, at most about a second old while an engine polls.
    ``cache_name`` labels every sample, so that several caches of a process stay apart; give each its own.
    """

    def __init__(self, source: StatsSource, cache_name: str = "cache") -> None:
        self._source = source
        self._cache_name = cache_name

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without samples: registering reads no figures."""
        return iter(_empty())

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with the figures published last."""
        stats, name = self._source.published_stats(), self._cache_name
        (
            pages,
            evicted,
            lookups,
            matched,
            operations,
            live,
            quarantined,
            moved,
            answers,
            touched,
            flawed,
            left,
            timed,
            regret,
        ) = families = _empty()
        for held in stats.occupancy:
            where = [name, held.tier.name.lower(), held.component]
            for state, count in (
                ("free", held.free),
                ("evictable", held.evictable),
                ("protected", held.protected),
                ("out", held.out),
            ):
                pages.add_metric([*where, state], count)
            evicted.add_metric(where, held.evicted)
        lookups.add_metric([name], stats.lookups.count)
        for found, count in (
            ("device", stats.lookups.device_pages),
            ("host", stats.lookups.host_pages),
            ("missed", stats.lookups.missed_pages),
        ):
            matched.add_metric([name, found], count)
        for kind, counts in stats.operations.items():
            for outcome, count in (
                ("done", counts.done),
                ("failed", counts.failed),
                ("cancelled", counts.cancelled),
                ("declined", counts.declined),
            ):
                operations.add_metric([name, kind.value, outcome], count)
        live.add_metric([name], stats.operations_live)
        quarantined.add_metric([name], stats.calls_quarantined)
        for kind, traffic in stats.traffic.items():
            moved.add_metric([name, kind.value], traffic.payload_bytes)
        for (method, answer), count in stats.storage_answers.items():
            answers.add_metric([name, method.value, answer.value], count)
        touched.add_metric([name, "told"], stats.touches.told_pages)
        touched.add_metric([name, "dropped"], stats.touches.dropped_pages)
        flawed.add_metric([name], stats.flawed_pages)
        _add_loading(stats, name, left, timed)
        if stats.lru is not None:
            regret.add_metric([name], stats.lru.regret_pages)
        yield from families


def _add_loading(stats: Stats, name: str, left: CounterMetricFamily, timed: CounterMetricFamily) -> None:
    """Add what was computed in the place of being loaded, and what loads took."""
    for why, tokens in (
        ("computing_is_faster", stats.loading.left_alone_tokens),
        ("past_deadline", stats.loading.past_deadline_tokens),
    ):
        for kind, count in tokens.items():
            left.add_metric([name, kind.value, why], count)
    for kind, leg in stats.loading.legs.items():
        for which, seconds in (("expected", leg.expected_s), ("taken", leg.taken_s), ("off", leg.off_s)):
            timed.add_metric([name, kind.value, which], seconds)


def _empty() -> tuple[
    GaugeMetricFamily,
    CounterMetricFamily,
    CounterMetricFamily,
    CounterMetricFamily,
    CounterMetricFamily,
    GaugeMetricFamily,
    GaugeMetricFamily,
    CounterMetricFamily,
    CounterMetricFamily,
    CounterMetricFamily,
    CounterMetricFamily,
    CounterMetricFamily,
    CounterMetricFamily,
    GaugeMetricFamily,
]:
    """Return the metrics in the order in which ``collect`` fills them."""
    return (
        GaugeMetricFamily(
            f"{PREFIX}_pages", "Pages by tier, component and state.", labels=["cache", "tier", "component", "state"]
        ),
        CounterMetricFamily(
            f"{PREFIX}_evicted_pages", "Pages evicted from a tier.", labels=["cache", "tier", "component"]
        ),
        CounterMetricFamily(f"{PREFIX}_lookups", "Prompts matched.", labels=["cache"]),
        CounterMetricFamily(
            f"{PREFIX}_looked_up_pages", "Pages of prompts matched, by where they were.", labels=["cache", "found"]
        ),
        CounterMetricFamily(
            f"{PREFIX}_operations", "Transfers by kind and outcome.", labels=["cache", "kind", "outcome"]
        ),
        GaugeMetricFamily(f"{PREFIX}_operations_live", "Transfers that hold something.", labels=["cache"]),
        GaugeMetricFamily(
            f"{PREFIX}_calls_quarantined", "Calls that a store has not returned from in time.", labels=["cache"]
        ),
        CounterMetricFamily(f"{PREFIX}_moved_bytes", "Bytes moved between tiers.", labels=["cache", "kind"]),
        CounterMetricFamily(
            f"{PREFIX}_storage_answers",
            "Answers of the store that is attached, one for each object.",
            labels=["cache", "method", "answer"],
        ),
        CounterMetricFamily(
            f"{PREFIX}_touched_pages",
            "Pages in use in memory that the store was to be told of, since it evicts.",
            labels=["cache", "outcome"],
        ),
        CounterMetricFamily(
            f"{PREFIX}_flawed_pages", "Objects read from storage that did not verify.", labels=["cache"]
        ),
        CounterMetricFamily(
            f"{PREFIX}_left_alone_tokens",
            "Tokens that a lower tier had and that were computed, by the transfer that would have brought them.",
            labels=["cache", "kind", "why"],
        ),
        CounterMetricFamily(
            f"{PREFIX}_timed_transfer_seconds",
            "Time of transfers that something was expected of: expected, taken, and by how much that was off.",
            labels=["cache", "kind", "which"],
        ),
        GaugeMetricFamily(
            f"{PREFIX}_regret_pages",
            "Hits that lru would have had more than adaptive eviction, as its shadow tells; negative where fewer.",
            labels=["cache"],
        ),
    )

"""Prometheus metrics of a cache that an engine embeds; needs the extra ``metrics``.

from prometheus_client import REGISTRY
REGISTRY.register(CacheCollector(cache))
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from unified_cache.cache.stats import Stats, StatsSource
from unified_cache.core.extras import needs_extra

with needs_extra("metrics", "unified_cache.observe.metrics"):
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

__all__ = ["CacheCollector", "StatsSource"]

PREFIX = "unified_cache"

Samples: TypeAlias = Iterator[tuple[tuple[str, ...], float]]
"""Values, each with those of its labels that come after the name of the cache."""


class CacheCollector:
    """Collector of the figures of a process's caches, for ``CollectorRegistry.register``: one in a registry.

    Scrapes come on threads of their own, while a cache belongs to its owner's: so they read the figures that the cache
    has published last, in ``poll``, ``wait_all`` or ``close``, at most about a second old while an engine polls.
    ``cache_name`` labels every sample of a cache; ``add`` takes further caches.
    """

    def __init__(self, source: StatsSource, cache_name: str = "cache") -> None:
        self._sources = {cache_name: source}

    def add(self, source: StatsSource, cache_name: str) -> None:
        """Collect the figures of another cache too, or of one in the place of the former one of that name."""
        self._sources = {**self._sources, cache_name: source}  # a scrape on another thread goes on with the former

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics without samples: registering reads no figures."""
        return (described.empty() for described in METRICS)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with the figures published last."""
        stats = {name: source.published_stats() for name, source in self._sources.items()}
        for described in METRICS:
            metric = described.empty()
            for name, figures in stats.items():
                for values, value in described.samples(figures):
                    metric.add_metric([name, *values], value)
            yield metric


@dataclass(frozen=True, slots=True)
class DescribedMetric:
    """One metric: its name, what it says, where its samples come from, and its labels after that of the cache."""

    family: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    text: str
    samples: Callable[[Stats], Samples]
    labels: tuple[str, ...] = ()

    def empty(self) -> CounterMetricFamily | GaugeMetricFamily:
        """Return the metric without samples."""
        return self.family(f"{PREFIX}_{self.name}", self.text, labels=["cache", *self.labels])


def _pages(stats: Stats) -> Samples:
    for held in stats.occupancy:
        for state, count in (
            ("free", held.free),
            ("evictable", held.evictable),
            ("protected", held.protected),
            ("out", held.out),
        ):
            yield (held.tier.name.lower(), held.component, state), count


def _evicted_pages(stats: Stats) -> Samples:
    for held in stats.occupancy:
        yield (held.tier.name.lower(), held.component), held.evicted


def _looked_up_pages(stats: Stats) -> Samples:
    for tier, pages in stats.lookups.hits.by_tier().items():
        yield (tier,), pages
    yield ("missed",), stats.lookups.missed_pages


def _operations(stats: Stats) -> Samples:
    for kind, counts in stats.operations.items():
        for outcome, count in (
            ("done", counts.done),
            ("failed", counts.failed),
            ("cancelled", counts.cancelled),
            ("partial", counts.partial),
            ("declined", counts.declined),
        ):
            yield (kind.value, outcome), count


def _backup_pages(stats: Stats) -> Samples:
    yield ("arrived",), stats.backups.arrived_pages
    yield ("already",), stats.backups.already_pages
    for reason, pages in stats.backups.lost_pages.items():
        yield (f"lost_{reason.value}",), pages


def _waiting_backups(stats: Stats) -> Samples:
    yield ("prompts",), stats.backups.waiting_prompts
    yield ("pages",), stats.backups.waiting_pages


def _moved_bytes(stats: Stats) -> Samples:
    for kind, traffic in stats.traffic.items():
        yield (kind.value,), traffic.payload_bytes


def _storage_answers(stats: Stats) -> Samples:
    for (method, answer), count in stats.storage_answers.items():
        yield (method.value, answer.value), count


def _duplicate_pages(stats: Stats) -> Samples:
    yield ("equal",), stats.duplicates.equal
    yield ("within_noise",), stats.duplicates.within_noise
    yield ("diverged",), stats.duplicates.diverged


def _single(value: Callable[[Stats], float]) -> Callable[[Stats], Samples]:
    """Return the samples of a metric that has one, without further labels."""
    return lambda stats: iter([((), value(stats))])


_gauge = partial(DescribedMetric, GaugeMetricFamily)
_counter = partial(DescribedMetric, CounterMetricFamily)

METRICS = (
    _gauge("pages", "Pages by tier, component and state.", _pages, ("tier", "component", "state")),
    _counter("evicted_pages", "Pages evicted from a tier.", _evicted_pages, ("tier", "component")),
    _counter(
        "lookups", "Requests, each once, when it locks what was found.", _single(lambda stats: stats.lookups.count)
    ),
    _counter(
        "looked_up_pages",
        "Pages of requests, by the tier that they came from; missed ones were computed.",
        _looked_up_pages,
        ("found",),
    ),
    _counter("operations", "Transfers by kind and outcome.", _operations, ("kind", "outcome")),
    _counter(
        "backup_pages",
        "Pages that the write policy meant to back up: arrived, there already, or lost by reason.",
        _backup_pages,
        ("outcome",),
    ),
    _gauge(
        "backups_waiting",
        "Prompts, and pages of them, that wait for a backup or to be tried again.",
        _waiting_backups,
        ("unit",),
    ),
    _gauge("operations_live", "Transfers that hold something.", _single(lambda stats: stats.operations_live)),
    _gauge(
        "calls_quarantined",
        "Calls that a store has not returned from in time.",
        _single(lambda stats: stats.calls_quarantined),
    ),
    _counter("moved_bytes", "Bytes moved between tiers.", _moved_bytes, ("kind",)),
    _counter(
        "storage_answers",
        "Answers of the store that is attached, one for each object.",
        _storage_answers,
        ("method", "answer"),
    ),
    _counter(
        "flawed_pages", "Objects read from storage that did not verify.", _single(lambda stats: stats.flawed_pages)
    ),
    _counter(
        "duplicate_pages",
        "Pages computed again and compared with the held ones, by outcome; diverged is a wrong page.",
        _duplicate_pages,
        ("outcome",),
    ),
)

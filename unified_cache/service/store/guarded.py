"""The store behind the service, opened and guarded, and counts of what the guard did, for Prometheus."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from unified_cache.settings.service import ServiceSettings
from unified_cache.storage_backends.common.breaker import BreakerState
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import StorageBackend
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers import StorageGuard, declared_capability
from unified_cache.storage_backends.wrappers.metered import MeteredStorage, StorageMetrics

__all__ = ["GuardedStore"]

_PREFIX = "unified_cache_service_store"


@dataclass(frozen=True, slots=True)
class GuardedStore:
    """A store and the guard around it; closing ``guard.breaker`` closes both. A collector of what they count."""

    backend: StorageBackend
    guard: StorageGuard

    @classmethod
    def open(cls, settings: ServiceSettings, registry: CollectorRegistry) -> "GuardedStore":
        """Open the store that the settings name, and count it in ``registry``.

        Raises:
            ConfigError: no such store.
            StorageError: it cannot be opened.
        """
        backend = open_storage(settings.storage, bytes_max=settings.storage_bytes)
        capability = declared_capability(backend)
        metered = MeteredStorage(backend, StorageMetrics(registry), capability.name)
        guarded = cls(backend, StorageGuard.around(metered, capability, settings.guard))
        registry.register(guarded)
        return guarded

    def collect(self) -> Iterator[Metric]:
        """Yield what the wrappers count, and what a file store or a packed one does."""
        state = GaugeMetricFamily(f"{_PREFIX}_breaker", "1 for the state the breaker is in.", None, ["state"])
        for each in BreakerState:
            state.add_metric([each.value], float(self.guard.breaker.state is each))
        yield state
        yield _count("breaker_refused", "Calls answered without the store.", self.guard.breaker.refused_count)
        yield _count("retries", "Calls made again.", self.guard.retry.retries_count)
        yield _count("abandoned_pages", "Pages without an answer in the end.", self.guard.retry.abandoned_pages_count)
        stuck = GaugeMetricFamily(f"{_PREFIX}_stuck_calls", "Calls that the store has not returned from in time.")
        stuck.add_metric([], len(self.guard.deadline.stuck_calls()))
        yield stuck
        evictions = CounterMetricFamily(f"{_PREFIX}_evictions", "Pages that went without being asked.", None, ["cause"])
        declined = CounterMetricFamily(f"{_PREFIX}_declined", "Pages that had no room.")
        if isinstance(self.backend, FileStorage | PackedStorage):
            counts = self.backend.counts
            evictions.add_metric(["room"], counts.evicted_count)
            evictions.add_metric(["intruder"], counts.foreign_count)
            declined.add_metric([], counts.declined_count)
        yield evictions
        yield declined


def _count(name: str, text: str, count: int) -> CounterMetricFamily:
    family = CounterMetricFamily(f"{_PREFIX}_{name}", text)
    family.add_metric([], count)
    return family

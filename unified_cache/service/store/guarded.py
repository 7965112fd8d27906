"""The store behind the service, opened and guarded, and counts of what the guard did, for Prometheus."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from unified_cache.seal import Flaw
from unified_cache.settings.service import ServiceSettings
from unified_cache.storage_backends.common.breaker import BreakerState
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import StorageBackend
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.verified import VerifiedStorage
from unified_cache.storage_backends.wrappers import CheckedStorage, StorageGuard, declared_capability
from unified_cache.storage_backends.wrappers.metered import MeteredStorage, StorageMetrics

__all__ = ["GuardedStore"]

_PREFIX = "unified_cache_service_store"


@dataclass(frozen=True, slots=True)
class GuardedStore:
    """A store, verified and guarded; closing ``guard.breaker`` closes it. A collector of what all of them count.

    Innermost first: the store, the check of its answers, its counts, verification, the guard. A store may ask for gets
    of a MiB, so that pages are verified while they are in the caches; the guard hands all of them over to another
    thread by one call.
    """

    backend: StorageBackend
    verified: VerifiedStorage
    guard: StorageGuard

    @classmethod
    def open(cls, settings: ServiceSettings, registry: CollectorRegistry) -> "GuardedStore":
        """Open the store that the settings name, and count it in ``registry``.

        Raises:
            ConfigError: no such store.
            StorageError: it cannot be opened.
        """
        backend = open_storage(settings.storage, bytes_max=settings.storage_bytes)
        checked = CheckedStorage(backend)
        capability = declared_capability(checked)
        metered = MeteredStorage(checked, StorageMetrics(registry), capability.name)
        verified = VerifiedStorage(metered)
        guard = StorageGuard.around(verified, capability, settings.guard)
        guarded = cls(backend, verified, guard)
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
        flawed = CounterMetricFamily("unified_cache_service_flawed_pages", "Pages that did not verify.", None, ["flaw"])
        counts_by_flaw = self.verified.flaws_count
        for flaw in Flaw:
            flawed.add_metric([flaw.name.lower()], counts_by_flaw.get(flaw, 0))
        yield flawed


def _count(name: str, text: str, count: int) -> CounterMetricFamily:
    family = CounterMetricFamily(f"{_PREFIX}_{name}", text)
    family.add_metric([], count)
    return family

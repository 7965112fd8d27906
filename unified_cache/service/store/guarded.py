"""The store behind the service, opened and guarded, and counts of what the guard did, for Prometheus."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from unified_cache.core.seal import Flaw
from unified_cache.core.settings.service import ServiceSettings
from unified_cache.storage_backends.common.breaker import BreakerState
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import model_of_tenant, owner_of
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.url import open_storage
from unified_cache.storage_backends.wrappers import StorageGuard, declared_capability
from unified_cache.storage_backends.wrappers.coded import CodedStorage
from unified_cache.storage_backends.wrappers.layer import VerifiedStorage
from unified_cache.storage_backends.wrappers.metered import MeteredStorage, StorageMetrics
from unified_cache.storage_backends.wrappers.page_coding import Undecoded


@dataclass(frozen=True, slots=True)
class GuardedStore:
    """A store, verified and guarded; closing ``guard`` closes it. A collector of what all of them count.

    Innermost first: the store, its counts, verification, the guard. A store may ask for gets
    of a MiB, so that pages are verified while they are in the caches; the guard hands all of them over to another
    thread by one call.
    """

    backend: Store
    verified: VerifiedStorage
    guard: StorageGuard

    @classmethod
    def open(cls, settings: ServiceSettings, registry: CollectorRegistry) -> "GuardedStore":
        """Open the store that the settings name, and count it in ``registry``."""
        backend = open_storage(settings.storage, bytes_max=settings.storage_bytes, must_write=True)
        capability = declared_capability(backend)
        metered = MeteredStorage(backend, StorageMetrics(registry), capability.name)
        verified = VerifiedStorage(metered)
        guard = StorageGuard(verified, capability, settings.guard.config)
        guarded = cls(backend, verified, guard)
        registry.register(guarded)
        return guarded

    @property
    def disk_bytes(self) -> int | None:
        """Size of the file system that a store in a directory lies in; None for any other store."""
        bare = self._bare
        return bare.disk_bytes if isinstance(bare, FileStorage | PackedStorage) else None

    @property
    def _bare(self) -> Store:
        """The store, without what codes its pages."""
        return self.backend.backend if isinstance(self.backend, CodedStorage) else self.backend

    @property
    def own(self) -> Callable[[Iterable[bytes], str], None] | None:
        """What takes some identities and their tenant to the layer that encrypts; None where there is none."""
        coded = self.backend if isinstance(self.backend, CodedStorage) else None
        return None if coded is None else lambda ids, tenant: coded.own(ids, owner_of(model_of_tenant(tenant, "")))

    def collect(self) -> Iterator[Metric]:
        """Yield what the wrappers count, and what a file store or a packed one does."""
        guard, counter, gauge = self.guard, CounterMetricFamily, GaugeMetricFamily
        states = [((each.value,), float(guard.breaker.state is each)) for each in BreakerState]
        yield metric(gauge, "store_breaker", "1 for the state the breaker is in.", states, "state")
        stuck = [((), guard.stuck_count)]
        yield metric(gauge, "store_stuck_calls", "Calls that the store has not returned from in time.", stuck)
        coded, bare = self.backend if isinstance(self.backend, CodedStorage) else None, self._bare
        counts = bare.counts if isinstance(bare, FileStorage | PackedStorage) else None
        evicted = [] if counts is None else [(("room",), counts.evicted_count), (("intruder",), counts.foreign_count)]
        yield metric(counter, "store_evictions", "Pages that went without being asked.", evicted, "cause")
        flaws = {flaw.name.lower(): self.verified.flaws_count.get(flaw, 0) for flaw in Flaw}
        if coded is not None:
            flaws |= {reason.value: coded.undecoded_counts.get(reason, 0) for reason in Undecoded}
        text = "Pages that did not verify, and objects refused before they were pages."
        yield metric(counter, "flawed_pages", text, [((flaw,), count) for flaw, count in flaws.items()], "flaw")


def metric(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    values: Iterable[tuple[Sequence[str], float]],
    *labels: str,
) -> Metric:
    """Return a metric of the service with values by their labels."""
    made = family(f"unified_cache_service_{name}", text, labels=labels)
    for each, value in values:
        made.add_metric(each, value)
    return made

"""Metrics of the service for Prometheus."""

import collections
from collections.abc import Iterator
from functools import cache
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from unified_cache.service.access.callers import AuditEntry
from unified_cache.service.access.fairness import ADMINISTRATION, FairScheduler
from unified_cache.service.operations.logs import Log
from unified_cache.service.store.guarded import metric
from unified_cache.service.store.tenants import TenantStore
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers.metered import LATENCY_BUCKETS_S

OTHER = "other"
"""Label of tenants and of pools beyond those with series of their own."""

_PREFIX = "unified_cache_service"

Counts = collections.Counter[tuple[str, ...]]
"""Sums by labels."""


class BoundedLabels:
    """Values of a label, bounded in number: the first have their names, all others are ``other``. Thread-safe.

    Callers choose their names, so a name has its own series only once it was ``claimed`` by what is worth counting.
    """

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self._names: set[str] = set()
        self._guard = Lock()

    def claimed(self, name: str) -> str:
        """Return the label of a name, which has a series of its own from now on if there is one left."""
        if name in self._names:
            return name
        with self._guard:
            if len(self._names) < self._names_max:
                self._names.add(name)
            return self.label(name)

    def label(self, name: str) -> str:
        """Return the label of a name; ``other`` if it has not been claimed."""
        return name if name in self._names else OTHER


class ServiceMetrics:
    """Counters of calls, pages and anomalies in ``registry``, which must not have them yet; an ``Observer``."""

    def __init__(
        self, registry: CollectorRegistry, tenants: BoundedLabels, pools: BoundedLabels, log: Log, audit: Log
    ) -> None:
        self.registry = registry
        self.tenants = tenants
        self._pools = pools
        self._log = log
        self._audit = audit

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{_PREFIX}_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{_PREFIX}_{name}", text, labels, registry=registry)

        self.calls = counter("calls", "Calls that ended, by status.", "method", "tenant", "code")
        self.seconds = Histogram(
            f"{_PREFIX}_call_seconds",
            "Time from a call to its end.",
            ["method"],
            registry=registry,
            buckets=LATENCY_BUCKETS_S,
        )
        self.bytes = counter("bytes", "Bytes received and sent.", "tenant", "direction")
        self.pages = counter("pages", "Pages that the store was asked for.", "pool", "result")
        self.put_pages = counter("put_pages", "Pages that the store was to keep.", "pool", "result")
        self.tenant_pages = counter("tenant_pages", "Pages that tenants asked for.", "tenant", "result")
        self.anomalies = counter("anomalies", "What should not happen.", "kind")
        text = "When the server's certificate ends, and the first list of revocations."
        self.expiry = gauge("expiry_timestamp_seconds", text, "files")
        self.stale = gauge("stale_seconds", "Time for which files could not be read again, 0 if they could.", "files")
        for collector in (ProcessCollector, PlatformCollector):
            collector(registry=registry)
        # Labels are few, and a series by its labels takes longer than to count.
        self._of_call = cache(
            lambda method, name, code: (
                self.calls.labels(method, name, code),
                self.seconds.labels(method),
                self.bytes.labels(name, "in"),
                self.bytes.labels(name, "out"),
            )
        )
        self._of_pages = cache(
            lambda pool, name, result: (self.pages.labels(pool, result), self.tenant_pages.labels(name, result))
        )

    def call_ended(self, method: str, tenant: str, code: str, seconds: float, bytes_in: int, bytes_out: int) -> None:
        """Count a call that has ended; ``code`` is the name of its status."""
        calls, took, received, sent = self._of_call(method, self.tenants.claimed(tenant), code)
        calls.inc()
        took.observe(seconds)
        received.inc(bytes_in)
        sent.inc(bytes_out)

    def pages_looked_up(self, tenant: str, pool: str, answer: Answer, count: int) -> None:
        """Count pages of one pool that the store was asked for, by its answer."""
        for series in self._of_pages(self._pool(pool, answer), self.tenants.claimed(tenant), answer.value):
            series.inc(count)

    def pages_put(self, tenant: str, pool: str, answer: Answer, count: int) -> None:
        """Count pages of one pool that the store was to keep, by its answer."""
        self.put_pages.labels(self._pool(pool, answer), answer.value).inc(count)

    def audited(self, entry: AuditEntry) -> None:
        """Write an entry of the audit log; that one cannot be written is an anomaly."""
        if not self._audit.audited(entry):
            self.anomaly("audit_failed", f"a line about {entry.kind} could not be written")

    def anomaly(self, kind: str, text: str) -> None:
        """Count and log what should not happen."""
        self.anomalies.labels(kind).inc()
        self._log.anomaly(kind, text)

    def _pool(self, pool: str, answer: Answer) -> str:
        """Return the label of a pool: a reader may ask about any name, and a page that is there proves one."""
        return self._pools.claimed(pool) if answer else self._pools.label(pool)


class UsageCollector:
    """Gauges of stored bytes and calls in flight by tenant, and pages that tenants lost, read on demand."""

    def __init__(self, scheduler: FairScheduler, store: TenantStore, tenants: BoundedLabels) -> None:
        self._scheduler = scheduler
        self._store = store
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        """Yield gauges of bytes stored and calls in flight by tenant, and the pages that tenants lost."""
        stored_bytes, held_bytes, calls, evicted = Counts(), Counts(), Counts(), Counts()
        for tenant, count_bytes in self._store.usage.by_tenant().items():
            stored_bytes[self._tenants.claimed(tenant),] += count_bytes
        for tenant, each in self._scheduler.by_tenant().items():
            name = self._tenants.claimed(tenant.removesuffix(ADMINISTRATION))
            held_bytes[name,] += each.bytes_in_flight
            calls[name, "half_open"] += each.half_open_count
            calls[name, "running"] += each.running_count
            calls[name, "waiting"] += each.waiting_count
        for (tenant, bound), count in self._store.usage.evicted_count().items():
            evicted[self._tenants.claimed(tenant), bound.value] += count
        gauge, uncounted = GaugeMetricFamily, [((), float(not self._store.is_counted))]
        yield metric(gauge, "stored_bytes", "Bytes stored, not known to be gone.", stored_bytes.items(), "tenant")
        yield metric(gauge, "calls_in_flight", "Calls now, by state.", calls.items(), "tenant", "state")
        yield metric(gauge, "request_bytes_in_flight", "Bytes of requests now.", held_bytes.items(), "tenant")
        text = "Pages that tenants lost, by bound."
        yield metric(CounterMetricFamily, "outgrown_pages", text, evicted.items(), "tenant", "bound")
        yield metric(gauge, "uncounted", "1 while stored bytes lack what the store held before.", uncounted)

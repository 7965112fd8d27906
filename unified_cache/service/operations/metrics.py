"""Metrics of the service for Prometheus, and the listener that serves them."""

import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Lock, Thread
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from unified_cache.errors import ConfigError
from unified_cache.seal import Flaw
from unified_cache.service.access.fairness import FairScheduler
from unified_cache.service.access.quota import StoredBytes
from unified_cache.service.operations.logs import Log
from unified_cache.service.settings import ListenAddress
from unified_cache.service.store.tiered import TieredStore
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers.metered import LATENCY_BUCKETS_S

if TYPE_CHECKING:
    from wsgiref.types import StartResponse

__all__ = ["OTHER", "LossCollector", "MetricsListener", "ServiceMetrics", "TenantLabels", "UsageCollector"]

OTHER = "other"
"""Label of tenants beyond those with series of their own."""

_BYTES_BUCKETS = tuple(float(1 << shift) for shift in range(8, 31, 2))
"""256 B to 1 GiB, four times as much each."""

_PREFIX = "unified_cache_service"
_REQUEST_S = 5.0
"""Time that a reader of metrics has for each request; one is served at a time."""

_LOOK_S = 0.1
"""Time between two checks of the listener for its end."""


class TenantLabels:
    """Labels of tenants, bounded in number: the first have their names, all others are ``other``. Thread-safe."""

    def __init__(self, tenants_max: int) -> None:
        self._tenants_max = tenants_max
        self._names: set[str] = set()
        self._guard = Lock()

    def label(self, tenant: str) -> str:
        """Return the label of a tenant."""
        with self._guard:
            if tenant not in self._names:
                if len(self._names) >= self._tenants_max:
                    return OTHER
                self._names.add(tenant)
            return tenant


class ServiceMetrics:
    """Counters of calls, pages and anomalies in ``registry``, which must not have them yet; an ``Observer``."""

    def __init__(self, registry: CollectorRegistry, names: TenantLabels, log: Log) -> None:
        self._names = names
        self._log = log

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{_PREFIX}_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{_PREFIX}_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(f"{_PREFIX}_{name}", text, labels, registry=registry, buckets=tuple(buckets))

        self.calls = counter("calls", "Calls that ended, by status.", "method", "tenant", "code")
        self.seconds = histogram("call_seconds", "Time from a call to its end.", LATENCY_BUCKETS_S, "method")
        self.sizes = histogram("call_bytes", "Bytes of a call.", _BYTES_BUCKETS, "method", "direction")
        self.bytes = counter("bytes", "Bytes received and sent.", "tenant", "direction")
        self.pages = counter("pages", "Pages that a tier was asked for.", "pool", "tier", "result")
        self.put_pages = counter("put_pages", "Pages that a tier was to store.", "pool", "tier", "result")
        self.tenant_pages = counter("tenant_pages", "Pages that tenants asked for.", "tenant", "result")
        self.anomalies = counter("anomalies", "What should not happen.", "kind")
        self.insecure = gauge("insecure", "1 where other machines may call without client certificates.")
        self.draining = gauge("draining", "1 from when no further call is admitted.")
        self.certificate_expiry = gauge("certificate_expiry_timestamp_seconds", "When the server's certificate ends.")
        self.stale = gauge("stale_seconds", "Time for which files could not be read anew, 0 if they could.", "files")
        for collector in (ProcessCollector, PlatformCollector):
            collector(registry=registry)

    def call_ended(self, method: str, tenant: str, code: str, seconds: float, bytes_in: int, bytes_out: int) -> None:
        """Count a call that has ended; ``code`` is the name of its status."""
        name = self._names.label(tenant)
        self.calls.labels(method, name, code).inc()
        self.seconds.labels(method).observe(seconds)
        for direction, count_bytes in (("in", bytes_in), ("out", bytes_out)):
            self.sizes.labels(method, direction).observe(count_bytes)
            self.bytes.labels(name, direction).inc(count_bytes)

    def pages_looked_up(self, tenant: str, pool: str, tier: str, answer: Answer, count: int) -> None:
        """Count pages of one pool that a tier was asked for, by its answer."""
        self.pages.labels(pool, tier, answer.value).inc(count)
        self.tenant_pages.labels(self._names.label(tenant), answer.value).inc(count)

    def pages_put(self, tenant: str, pool: str, tier: str, answer: Answer, count: int) -> None:
        """Count pages of one pool that a tier was to store, by its answer."""
        self.put_pages.labels(pool, tier, answer.value).inc(count)

    def anomaly(self, kind: str, text: str) -> None:
        """Count and log what should not happen."""
        self.anomalies.labels(kind).inc()
        self._log.anomaly(kind, text)


class UsageCollector:
    """Gauges of stored bytes and calls in flight by tenant, read on demand."""

    def __init__(self, scheduler: FairScheduler, stored: StoredBytes, names: TenantLabels) -> None:
        self._scheduler = scheduler
        self._stored = stored
        self._names = names

    def collect(self) -> Iterator[Metric]:
        """Yield gauges of bytes stored and calls in flight, by tenant."""
        stored = GaugeMetricFamily(f"{_PREFIX}_stored_bytes", "Bytes stored, not known to be gone.", None, ["tenant"])
        for tenant, count_bytes in self._summed(self._stored.by_tenant()).items():
            stored.add_metric([tenant], count_bytes)
        yield stored
        calls = self._scheduler.by_tenant()
        counts = {
            "running": {tenant: each.running_count for tenant, each in calls.items()},
            "waiting": {tenant: each.waiting_count for tenant, each in calls.items()},
        }
        flight = GaugeMetricFamily(f"{_PREFIX}_calls_in_flight", "Calls now, by state.", None, ["tenant", "state"])
        for state, by_tenant in counts.items():
            for tenant, count in self._summed(by_tenant).items():
                flight.add_metric([tenant, state], count)
        yield flight
        held = GaugeMetricFamily(f"{_PREFIX}_request_bytes_in_flight", "Bytes of requests now.", None, ["tenant"])
        for tenant, count in self._summed({tenant: each.bytes_in_flight for tenant, each in calls.items()}).items():
            held.add_metric([tenant], count)
        yield held

    def _summed(self, by_tenant: dict[str, int]) -> dict[str, int]:
        summed: dict[str, int] = {}
        for tenant, count in by_tenant.items():
            name = self._names.label(tenant)
            summed[name] = summed.get(name, 0) + count
        return summed


class LossCollector:
    """Counters, read from the store on demand, of pages that were lost: flawed in the store, evicted from memory."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Yield counters of pages that did not verify, by flaw, and of pages evicted from memory."""
        flawed = CounterMetricFamily(f"{_PREFIX}_flawed_pages", "Pages that did not verify.", None, ["flaw"])
        counts = self._store.flaws_count
        for flaw in Flaw:
            flawed.add_metric([flaw.name.lower()], counts.get(flaw, 0))
        yield flawed
        evictions = CounterMetricFamily(f"{_PREFIX}_host_evictions", "Pages that left memory for others.")
        evictions.add_metric([], self._store.host.evicted_count)
        yield evictions


class MetricsListener:
    """HTTP listener for ``/metrics``, one request at a time, each within a time limit; 404 for any other path."""

    def __init__(self, server: WSGIServer) -> None:
        self._server = server
        self._thread = Thread(target=server.serve_forever, args=(_LOOK_S,), name="unified-cache-metrics", daemon=True)

    @classmethod
    def open(
        cls, address: ListenAddress, registry: CollectorRegistry, tls: Callable[[], ssl.SSLContext] | None
    ) -> "MetricsListener":
        """Listen; nothing is served before ``start``. ``tls`` is asked for each connection.

        Raises:
            ConfigError: the address cannot be listened at.
        """

        def answer(request: Mapping[str, object], start: "StartResponse") -> list[bytes]:
            found = request["REQUEST_METHOD"] == "GET" and request["PATH_INFO"] == "/metrics"
            start("200 OK" if found else "404 Not Found", [("Content-Type", CONTENT_TYPE_LATEST)])
            return [generate_latest(registry)] if found else []

        try:
            listener = _Listener(address, tls)
            listener.set_app(answer)
            return cls(listener)
        except OSError as error:
            raise ConfigError(f"metrics cannot be served at {address.text}: {error.strerror}") from error

    @property
    def port(self) -> int:
        """Port that is listened at."""
        return self._server.server_port

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving and let the address go."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Request(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as in the base
        """Log nothing: a reader comes every few seconds."""


class _Listener(WSGIServer):
    """Server of one request at a time; a slow client, also in its TLS handshake, is cut off."""

    def __init__(self, address: ListenAddress, tls: Callable[[], ssl.SSLContext] | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._tls = tls
        super().__init__((address.host, address.port), _Request)

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept a connection; a TLS handshake is made in time or not at all."""
        accepted, peer = super().get_request()
        accepted.settimeout(_REQUEST_S)
        if self._tls is None:
            return accepted, peer
        try:
            return self._tls().wrap_socket(accepted, server_side=True), peer
        except OSError:
            accepted.close()
            raise

    def handle_error(self, request: object, client_address: object) -> None:
        """Log nothing: the reader has gone."""

"""A wrapper that counts bytes, errors and latencies, for Prometheus; it needs the ``metrics`` extra."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from unified_cache.core.extras import needs_extra
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, Store, page_bytes
from unified_cache.storage_backends.wrappers.layer import Method, StorageLayer

with needs_extra("metrics", "MeteredStorage"):
    from prometheus_client import CollectorRegistry, Counter, Histogram

LATENCY_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Upper bounds of the latency histogram: from a look in memory to a store that is as good as gone."""

Result = TypeVar("Result")


class StorageMetrics:
    """The metrics of all stores of a process, in the caller's registry; make one for each registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Make them in ``registry``, which must not have them yet."""

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"unified_cache_storage_{name}", text, ["store", "method", *more], registry=registry)

        self.bytes = counter("bytes", "Bytes of the pages read or stored.")
        self.errors = counter("errors", "Calls that raised, by class of exception.", "error")
        self.latency = Histogram(
            "unified_cache_storage_latency_seconds",
            "Time from a call to its answer or error.",
            ["store", "method"],
            registry=registry,
            buckets=LATENCY_BUCKETS_S,
        )


class MeteredStorage(StorageLayer):
    """Count what goes through under the label ``store``, and how long it takes; change nothing.

    It owns the wrapped backend. Thread-safe where the backend is. ``clock`` gives seconds.
    """

    def __init__(
        self,
        backend: Store,
        metrics: StorageMetrics,
        store: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(backend)
        self._metrics = metrics
        self._store = store
        self._clock = clock

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers."""
        hits = self._call(Method.GET, partial(self._backend.get, pages))
        self._count_bytes(Method.GET, pages, hits)
        return hits

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Store pages; those that exist count as stored, bytes included."""
        stored = self._call(Method.PUT, partial(self._backend.put, pages, level))
        self._count_bytes(Method.PUT, pages, stored)
        return stored

    def _call(self, method: Method, work: Callable[[], Result], asked_count: int | None = None) -> Result:
        """Measure how long a call takes, and count what it raises."""
        metrics, store = self._metrics, self._store
        started_s = self._clock()
        try:
            return work()
        except BaseException as error:
            metrics.errors.labels(store, method.value, type(error).__name__).inc()
            raise
        finally:
            metrics.latency.labels(store, method.value).observe(self._clock() - started_s)

    def _count_bytes(self, method: Method, pages: Sequence[PageIO], hits: Sequence[Answer]) -> None:
        moved_bytes = sum(page_bytes(page) for page, hit in zip(pages, hits, strict=False) if hit)
        self._metrics.bytes.labels(self._store, method.value).inc(moved_bytes)

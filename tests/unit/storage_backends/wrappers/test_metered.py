"""Metrics: what a store was asked, what it answered, and how long it took."""

import random
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.sources import ROOT
from tests.support.clock import ManualClock
from tests.support.store_calls import ScriptedStorage, SeededFaults, StorageFault
from tests.support.wrappers import blank, scripted, sealed
from unified_cache.core.errors import ClosedError, StorageError
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Level
from unified_cache.storage_backends.wrappers.metered import MeteredStorage, StorageMetrics
from unified_cache.testing.storage_contract import LAYOUT, MODEL, PAGE_BYTES, label


def value(registry: CollectorRegistry, name: str, method: str, **more: str) -> float | None:
    labels = {"store": "s", "method": method, **more}
    return registry.get_sample_value(f"unified_cache_storage_{name}", labels)


def test_every_method_is_counted_and_the_bytes_that_moved() -> None:
    registry = CollectorRegistry()
    storage = MeteredStorage(MemoryStorage(), StorageMetrics(registry), "s")
    storage.capability()
    storage.register(manifest_of(MODEL, LAYOUT), {})
    storage.put(sealed(range(3)), Level.CACHED)
    storage.exists([label(number) for number in range(5)])
    storage.get(blank(range(2, 6)))
    storage.get(blank(range(2)))
    storage.scan(label(0).identity)
    storage.touch([label(0), label(9)])
    storage.remove([label(0), label(9)])
    storage.close()
    calls = {
        method: value(registry, "latency_seconds_count", method)
        for method in ("capability", "register", "put", "exists", "get", "scan", "touch", "remove", "close")
    }
    assert calls == dict.fromkeys(calls, 1.0) | {"get": 2.0}
    moved_bytes = {method: value(registry, "bytes_total", method) for method in ("put", "exists", "get", "remove")}
    assert moved_bytes == {"put": 3 * PAGE_BYTES, "exists": None, "get": 3 * PAGE_BYTES, "remove": None}


def test_latency_is_the_time_to_the_answer_or_the_error() -> None:
    registry = CollectorRegistry()
    clock = ManualClock()
    plan = SeededFaults({StorageFault.DELAY: 1.0}, random.Random(1))
    slow = ScriptedStorage(MemoryStorage(), plan, random.Random(1), delay_s=0.3, sleep=clock.sleep)
    storage = MeteredStorage(slow, StorageMetrics(registry), "s", clock)
    storage.get(blank([1]))
    with pytest.raises(StorageError):
        storage.put(sealed([1]), Level.DURABLE)
    for method in ("get", "put"):
        assert value(registry, "latency_seconds_sum", method) == pytest.approx(0.3)
        assert value(registry, "latency_seconds_bucket", method, le="0.25") == 0
        assert value(registry, "latency_seconds_bucket", method, le="0.5") == 1


def test_errors_are_counted_by_class_and_raised_and_have_no_bytes() -> None:
    registry = CollectorRegistry()
    storage = MeteredStorage(scripted({0: StorageFault.FAIL}), StorageMetrics(registry), "s")
    with pytest.raises(StorageError, match="on purpose"):
        storage.get(blank([1]))
    storage.close()
    with pytest.raises(ClosedError):
        storage.get(blank([1]))
    assert value(registry, "errors_total", "get", error="StorageError") == 1
    assert value(registry, "errors_total", "get", error="ClosedError") == 1
    assert value(registry, "latency_seconds_count", "get") == 2
    assert value(registry, "bytes_total", "get") is None


def test_several_stores_share_one_registry_under_their_names() -> None:
    registry = CollectorRegistry()
    metrics = StorageMetrics(registry)
    near, far = (MeteredStorage(MemoryStorage(), metrics, name) for name in ("near", "far"))
    near.put(sealed([1]), Level.CACHED)
    far.get(blank([1]))
    text = generate_latest(registry).decode()
    assert 'unified_cache_storage_bytes_total{method="put",store="near"} ' in text
    assert 'unified_cache_storage_bytes_total{method="get",store="far"} 0.0' in text


def test_neither_the_package_nor_the_other_wrappers_import_prometheus() -> None:
    program = (
        "import sys, unified_cache, unified_cache.storage_backends.url, unified_cache.storage_backends.wrappers\n"
        "sys.exit('prometheus_client was imported' if 'prometheus_client' in sys.modules else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=False, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr

"""Metrics of the service, and their listener."""

import json
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from io import StringIO
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from tests.sources import ROOT
from tests.support.clock import ManualClock
from tests.support.running_service import CALL_S
from tests.support.service_settings import service_settings
from tests.support.store_kinds import StoreKind
from unified_cache.core.errors import StorageError
from unified_cache.core.settings.addresses import ListenAddress
from unified_cache.core.settings.service import QuotaSettings
from unified_cache.observe.live.listener import CONNECTIONS_MAX, REQUEST_S_MAX, MetricsListener
from unified_cache.service.access.fairness import FairScheduler
from unified_cache.service.access.usage import TenantUsage
from unified_cache.service.limits import Limits
from unified_cache.service.operations.logs import JsonLines, Log, LogRateLimit
from unified_cache.service.operations.metrics import OTHER, BoundedLabels, ServiceMetrics, UsageCollector
from unified_cache.service.store.guarded import GuardedStore
from unified_cache.service.store.tenants import TenantStore
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.storage_backends.wrappers import StorageGuard
from unified_cache.testing.storage_contract import label, sealed_page

PREFIX = "unified_cache_service"
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def listener(registry: CollectorRegistry) -> Iterator[MetricsListener]:
    opened = MetricsListener(ListenAddress.of("127.0.0.1:0"), registry)
    opened.start()
    yield opened
    opened.close()


def metrics_in(registry: CollectorRegistry, tenants_max: int = 10, pools_max: int = 10) -> ServiceMetrics:
    pace = LogRateLimit(10, 1.0, ManualClock())
    log = Log(JsonLines.on(StringIO(), lambda: 0.0), pace)
    return ServiceMetrics(registry, BoundedLabels(tenants_max), BoundedLabels(pools_max), log, log)


def asked(listener: MetricsListener, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", listener.port), timeout=CALL_S) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_calls_and_pages_count_by_their_labels(registry: CollectorRegistry) -> None:
    metrics = metrics_in(registry)
    metrics.call_ended("Get", "acme", "OK", 0.002, 100, 5_000)
    metrics.call_ended("Get", "acme", "UNAVAILABLE", 0.2, 100, 0)
    for answer, count in ((Answer.HIT, 4), (Answer.MISS, 1), (Answer.UNAVAILABLE, 2)):
        metrics.pages_looked_up("acme", "kv", answer, count)
    for answer, count in ((Answer.STORED, 4), (Answer.DECLINED, 5)):
        metrics.pages_put("acme", "kv", answer, count)
    expected = {
        ("calls_total", "method=Get", "tenant=acme", "code=OK"): 1,
        ("calls_total", "method=Get", "tenant=acme", "code=UNAVAILABLE"): 1,
        ("call_seconds_bucket", "method=Get", "le=0.0025"): 1,
        ("bytes_total", "tenant=acme", "direction=in"): 200,
        ("put_pages_total", "pool=kv", "result=stored"): 4,
        ("put_pages_total", "pool=kv", "result=declined"): 5,
        ("pages_total", "pool=kv", "result=hit"): 4,
        ("pages_total", "pool=kv", "result=miss"): 1,
        ("pages_total", "pool=kv", "result=unavailable"): 2,
        ("tenant_pages_total", "tenant=acme", "result=hit"): 4,
    }
    for (name, *labels), value in expected.items():
        found = registry.get_sample_value(f"{PREFIX}_{name}", dict(each.split("=") for each in labels))
        assert found == value, (name, labels)


@pytest.mark.threat("endless labels and log lines")
def test_tenants_beyond_a_bound_share_one_series(registry: CollectorRegistry) -> None:
    metrics = metrics_in(registry, tenants_max=2)
    for number in range(1_000):
        metrics.call_ended("Get", f"tenant{number}", "OK", 0.1, 0, 0)
    metrics.call_ended("Get", "tenant1", "OK", 0.1, 0, 0)
    labels = {"method": "Get", "code": "OK"}
    value = registry.get_sample_value
    assert value(f"{PREFIX}_calls_total", {**labels, "tenant": "tenant1"}) == 2
    assert value(f"{PREFIX}_calls_total", {**labels, "tenant": OTHER}) == 998


def test_what_tenants_use_is_told_at_the_moment_of_asking(registry: CollectorRegistry) -> None:
    scheduler = FairScheduler(QuotaSettings(), Limits(tenant_running_max=1))
    usage = TenantUsage(QuotaSettings(), 100, None)
    store = TenantStore(MemoryStorage(), usage, metrics_in(CollectorRegistry()))
    registry.register(UsageCollector(scheduler, store, BoundedLabels(1)))
    slots = [scheduler.enter(tenant) for tenant in ("acme", "acme", "b", "c", "acme")]
    for slot in slots[:4]:
        assert slot is not None
        assert scheduler.hold(slot, 10)
        scheduler.wait(slot, 0)
    for tenant in ("acme", "b", "c"):
        usage.take(tenant, [sealed_page(label(1))])

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"{PREFIX}_{name}", labels)

    assert value("calls_in_flight", tenant="acme", state="running") == 1
    assert value("calls_in_flight", tenant="acme", state="waiting") == 1
    assert value("calls_in_flight", tenant="acme", state="half_open") == 1
    assert value("calls_in_flight", tenant=OTHER, state="waiting") == 2
    assert value("request_bytes_in_flight", tenant=OTHER) == 20
    assert value("stored_bytes", tenant=OTHER) == 2 * usage.held_bytes("b")
    for slot in slots:
        assert slot is not None
        scheduler.leave(slot)
    assert value("calls_in_flight", tenant="acme", state="waiting") is None


def test_a_guarded_store_counts_its_calls_and_tells_its_breaker(registry: CollectorRegistry) -> None:
    settings = service_settings(None, {"storage": "memory:"})
    guarded = GuardedStore.open(settings, registry)
    assert guarded.guard.put([sealed_page(label(1))], Level.CACHED) == [Answer.STORED]
    value = registry.get_sample_value
    assert value("unified_cache_storage_latency_seconds_count", {"store": "memory", "method": "put"}) == 1
    assert value(f"{PREFIX}_store_breaker", {"state": "closed"}) == 1
    guarded.guard.close()


def test_a_read_of_many_pages_is_handed_over_once_and_verified_by_the_mib(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = GuardedStore.open(service_settings(None, {"storage": "memory:"}), registry)
    pages = [sealed_page(label(number), 1 << 20) for number in range(4)]
    assert guarded.guard.put(pages, Level.CACHED) == [Answer.STORED] * 4
    handed_over: list[int] = []
    get = StorageGuard.get

    def counted(storage: StorageGuard, asked: Sequence[PageIO]) -> list[Answer]:
        handed_over.append(len(asked))
        return get(storage, asked)

    monkeypatch.setattr(StorageGuard, "get", counted)
    usage = TenantUsage(QuotaSettings(), 100, None)
    store = TenantStore(guarded.guard, usage, metrics_in(CollectorRegistry()))
    read = store.read("acme", [page.label for page in pages], 1 << 20)
    assert [answer for answer, _ in read] == [Answer.HIT] * 4
    assert handed_over == [4]
    gets = registry.get_sample_value(
        "unified_cache_storage_latency_seconds_count", {"store": "memory", "method": "get"}
    )
    assert gets == 4
    store.close()


@pytest.mark.parametrize("kind", StoreKind)
def test_a_store_of_files_tells_what_made_room(kind: StoreKind, registry: CollectorRegistry, tmp_path: Path) -> None:
    object_bytes = 1 << 20
    one, two, three = (sealed_page(label(number), object_bytes) for number in range(3))
    url, page_bytes = f"{kind.value}:{tmp_path / 'store'}", kind.taken_bytes(object_bytes)
    settings = service_settings(None, {"storage": url, "storage_bytes": page_bytes})
    guarded = GuardedStore.open(settings, registry)
    assert guarded.guard.put([one], Level.CACHED) == [Answer.STORED]
    assert guarded.guard.put([two, three], Level.CACHED) == [Answer.STORED, Answer.DECLINED]
    value = registry.get_sample_value
    assert value(f"{PREFIX}_store_evictions_total", {"cause": "room"}) == 1
    assert value(f"{PREFIX}_store_evictions_total", {"cause": "intruder"}) == 0
    guarded.guard.close()


@pytest.mark.threat("changed bytes in the store")
def test_a_page_changed_in_the_store_is_cleared_away_and_counted(registry: CollectorRegistry, tmp_path: Path) -> None:
    guarded = GuardedStore.open(service_settings(None, {"storage": f"file:{tmp_path / 'store'}"}), registry)
    for at, flaw in ((0, "header"), (-1, "payload")):
        assert guarded.guard.put([sealed_page(label(1))], Level.CACHED) == [Answer.STORED]
        (path,) = tmp_path.rglob("*.kv")
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
        assert guarded.guard.get([sealed_page(label(1))]) == [Answer.FLAWED]
        assert not path.exists()
        assert registry.get_sample_value(f"{PREFIX}_flawed_pages_total", {"flaw": flaw}) == 1
    guarded.guard.close()


@pytest.mark.threat("slow readers of metrics")
def test_connections_that_trickle_or_say_nothing_hold_up_neither_a_scrape_nor_the_end(
    registry: CollectorRegistry,
) -> None:
    clock = ManualClock()
    listener = MetricsListener(ListenAddress.of("127.0.0.1:0"), registry, clock=clock)
    listener.start()
    metrics_in(registry)
    with ExitStack() as connected:
        slow = []
        for _ in range(CONNECTIONS_MAX - 1):
            slow.append(connected.enter_context(socket.create_connection(("127.0.0.1", listener.port), CALL_S)))
            slow[-1].sendall(b"G")
            clock.sleep(0.1)
        assert asked(listener, SCRAPE).startswith(b"HTTP/1.0 200")
        for connection in slow:
            connection.sendall(b"E")
        clock.sleep(REQUEST_S_MAX + 1.0)
        assert [connection.recv(1) for connection in slow] == [b""] * len(slow)
        late = connected.enter_context(socket.create_connection(("127.0.0.1", listener.port), CALL_S))
        late.sendall(b"G")
        assert asked(listener, SCRAPE).startswith(b"HTTP/1.0 200")
        listener.close()
        assert late.recv(1) == b""


@pytest.mark.threat("slow readers of metrics")
def test_one_connection_too_many_cuts_the_oldest_off(listener: MetricsListener, registry: CollectorRegistry) -> None:
    metrics_in(registry)
    with ExitStack() as connected:
        silent = [
            connected.enter_context(socket.create_connection(("127.0.0.1", listener.port), CALL_S))
            for _ in range(CONNECTIONS_MAX)
        ]
        assert asked(listener, SCRAPE).startswith(b"HTTP/1.0 200")
        assert silent[0].recv(1) == b""


@pytest.mark.threat("endless labels and log lines")
def test_pools_that_nobody_stored_have_no_series(registry: CollectorRegistry) -> None:
    metrics = metrics_in(registry, pools_max=2)
    for number in range(1_000):
        metrics.pages_looked_up("acme", f"asked{number}", Answer.MISS, 1)
    metrics.pages_put("acme", "kv", Answer.STORED, 1)
    metrics.pages_looked_up("acme", "kv", Answer.MISS, 1)
    for number in range(1_000):
        metrics.pages_put("acme", f"stored{number}", Answer.STORED, 1)
    value = registry.get_sample_value
    asked, stored = {"result": "miss"}, {"result": "stored"}
    assert value(f"{PREFIX}_pages_total", {**asked, "pool": OTHER}) == 1_000
    assert value(f"{PREFIX}_pages_total", {**asked, "pool": "kv"}) == 1
    assert value(f"{PREFIX}_put_pages_total", {**stored, "pool": "stored0"}) == 1
    assert value(f"{PREFIX}_put_pages_total", {**stored, "pool": OTHER}) == 999


# The dashboard asks for metrics that there are, by labels that they have


DASHBOARD = ROOT / "dashboards" / "unified-cache.json"
ALARMS = ROOT / "dashboards" / "unified-cache-alerts.yaml"
GUIDE = ROOT / "docs" / "operate.md"
WORD = re.compile(r"[a-z_][a-z0-9_]*")
FUNCTIONS = frozenset({"sum", "rate", "max", "min", "increase", "histogram_quantile", "time", "and"})
GIVEN_BY_PROMETHEUS = frozenset({"instance"})

Known = dict[str, set[str]]
"""Names of series, and the labels of each."""


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def alarms() -> dict[str, str]:
    """Return the queries of the alarms by name, without what every target of Prometheus has (``up``)."""
    (group,) = yaml.safe_load(ALARMS.read_text(encoding="utf-8"))["groups"]
    assert all(rule["annotations"]["summary"] for rule in group["rules"])
    return {rule["alert"]: rule["expr"] for rule in group["rules"] if not rule["expr"].startswith("up{")}


@pytest.fixture(scope="module")
def known() -> Known:
    """Let everything that counts count something, as a server does."""
    settings = service_settings(None, {"storage": "memory:"})
    registry, names = CollectorRegistry(), BoundedLabels(10)
    pace = LogRateLimit(1, 1.0, ManualClock())
    log = Log(JsonLines.on(StringIO(), lambda: 0.0), pace)
    metrics = ServiceMetrics(registry, names, names, log, log)
    scheduler = FairScheduler(settings.quota, Limits())
    store = GuardedStore.open(settings, registry)
    usage = TenantUsage(settings.quota, 100, None)
    shared = TenantStore(store.guard, usage, metrics)
    registry.register(UsageCollector(scheduler, shared, names))
    metrics.call_ended("Get", "acme", "OK", 0.1, 1, 1)
    metrics.pages_looked_up("acme", "kv", Answer.HIT, 1)
    metrics.pages_looked_up("acme", "kv", Answer.MISS, 1)
    metrics.pages_put("acme", "kv", Answer.STORED, 1)
    metrics.anomaly("odd", "x")
    metrics.stale.labels("tokens").set(0)
    metrics.expiry.labels("certificate").set(0)
    usage.take("acme", [sealed_page(label(1))])
    assert scheduler.enter("acme") is not None
    store.guard.put([sealed_page(label(1))], Level.CACHED)
    with pytest.raises(StorageError):
        store.guard.put([sealed_page(label(1))], Level.DURABLE)
    found: Known = {}
    for family in registry.collect():
        found.setdefault(family.name + "_total" * (family.type == "counter"), set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    shared.close()
    return found


def asked_for(query: str) -> tuple[set[str], set[str]]:
    """Return the series that a query names, and the labels it groups or selects by."""
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", query)
    labels = {
        word for group in re.findall(r"by \(([^)]*)\)|\{([^}]*)\}", bare) for word in WORD.findall(" ".join(group))
    }
    rest = re.sub(r"by \([^)]*\)|\{[^}]*\}", "", bare)
    return set(WORD.findall(rest)) - FUNCTIONS, labels


def test_a_query_is_read_for_its_series_and_labels() -> None:
    query = (
        'histogram_quantile(0.99, sum by (le, method) (rate(a_bucket{x="y", z=~"b|c"}[$__rate_interval]))) / b_total'
    )
    assert asked_for(query) == ({"a_bucket", "b_total"}, {"le", "method", "x", "z"})


@pytest.mark.parametrize("query", [*queries(), *alarms().values()])
def test_every_query_and_alarm_names_series_and_labels_that_there_are(query: str, known: Known) -> None:
    series, labels = asked_for(query)
    assert series
    for name in series:
        assert name in known, f"{query}: found no metric {name}"
        missing = labels - known[name] - GIVEN_BY_PROMETHEUS
        # A store in memory evicts nothing, and a family without samples tells no labels.
        assert not missing or not known[name], f"{query}: found no labels {sorted(missing)} of {name}"


def test_the_guide_says_what_to_do_about_every_alarm_and_about_no_other() -> None:
    named = set(re.findall(r"`(UnifiedCache[A-Za-z]+)`", GUIDE.read_text(encoding="utf-8")))
    assert named == {*alarms(), "UnifiedCacheDown"}


def test_every_metric_of_ours_is_on_the_dashboard(known: Known) -> None:
    shown = {name for query in queries() for name in asked_for(query)[0]}
    roots = {re.sub(r"_(bucket|sum|count|created|total)$", "", name) for name in shown}
    ours = {name for name in known if name.startswith("unified_cache_service_")}
    missing = {re.sub(r"_(bucket|sum|count|created|total)$", "", name) for name in ours} - roots
    assert missing == set()


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        ticket = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(ticket["x"], ticket["x"] + ticket["w"])
            for y in range(ticket["y"], ticket["y"] + ticket["h"])
        }
        assert not taken & cells
        taken |= cells

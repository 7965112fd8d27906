"""The dashboard asks for metrics that there are, by labels that they have."""

import json
import re
from io import StringIO

import pytest
import yaml
from prometheus_client import CollectorRegistry

from tests.sources import ROOT
from tests.support.clock import ManualClock
from tests.support.service_settings import service_settings
from unified_cache.core.errors import StorageError
from unified_cache.service.access.fairness import FairScheduler
from unified_cache.service.access.usage import TenantUsage
from unified_cache.service.operations.logs import JsonLines, Log, LogRateLimit
from unified_cache.service.operations.metrics import BoundedLabels, ServiceMetrics, UsageCollector
from unified_cache.service.store.guarded import GuardedStore
from unified_cache.service.store.tenants import TenantStore
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.testing.storage_contract import label, sealed_page

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
    log = Log(JsonLines(StringIO(), lambda: 0.0), pace)
    metrics = ServiceMetrics(registry, names, names, log, log)
    scheduler = FairScheduler(settings.quota, settings.limits.calls_max)
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


@pytest.mark.parametrize("query", queries())
def test_every_query_names_series_and_labels_that_there_are(query: str, known: Known) -> None:
    series, labels = asked_for(query)
    assert series
    for name in series:
        assert name in known, f"{query}: found no metric {name}"
        missing = labels - known[name] - GIVEN_BY_PROMETHEUS
        # A store in memory evicts nothing, and a family without samples tells no labels.
        assert not missing or not known[name], f"{query}: found no labels {sorted(missing)} of {name}"


@pytest.mark.parametrize("alarm", alarms())
def test_every_alarm_names_series_and_labels_that_there_are(alarm: str, known: Known) -> None:
    series, labels = asked_for(alarms()[alarm])
    assert series <= set(known)
    for name in series:
        assert not known[name] or labels - GIVEN_BY_PROMETHEUS <= known[name]


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

"""Figures and log lines of an embedded cache: what it found, moved, evicted and gave up."""

import logging
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.operations import Stepped, engine, filled, over, serve, started, tokens
from tests.support.store_calls import ScriptedStorage
from unified_cache.cache.stats import LookupCounts
from unified_cache.controller import NotStarted, TransferKind
from unified_cache.core.config import WritePolicy
from unified_cache.core.pool import Hits, Tier
from unified_cache.observe.metrics import CacheCollector
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers.layer import Method


def test_a_cache_publishes_once_in_a_while_however_often_it_polls_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.cache.stats.STATS_EVERY_S", math.inf)
    cache = engine().cache
    opened = cache.published_stats()
    cache.release(cache.lock(cache.match(cache.prompt(tokens(4)))))
    cache.poll()
    cache.wait_all(1)
    assert cache.published_stats() is opened
    monkeypatch.setattr("unified_cache.cache.stats.STATS_EVERY_S", 0.0)
    cache.wait_all(1)
    assert cache.published_stats().lookups.count == opened.lookups.count + 1


def test_a_request_counts_once_when_it_locks_and_its_pages_as_the_tier_that_they_came_from() -> None:
    store = MemoryStorage()
    for pages in (2, 6):
        filled(store, pages)
    cache = engine(store).cache
    prompt = cache.prompt(tokens(8))
    for _ in range(100):
        cache.match(prompt)
    assert cache.stats().lookups == LookupCounts()
    over(cache, cache.prefetch(prompt.head(2)))
    over(cache, cache.load(prompt.head(2)))
    cache.release(cache.lock(cache.match(prompt.head(2))))
    over(cache, cache.prefetch(prompt))
    over(cache, cache.load(prompt))
    for _ in range(100):
        cache.match(prompt)
    lock = cache.lock(cache.match(prompt))
    assert lock.hits == Hits(device=2, storage=4)
    cache.release(lock)
    cache.release(cache.lock(cache.match(prompt)))
    assert cache.stats().lookups == LookupCounts(3, Hits(device=2 + 6, storage=2 + 4), missed_pages=0 + 2 + 2)


def test_evictions_are_counted_by_component_and_tier() -> None:
    toy = engine()
    for number in range(4):
        serve(toy, 6, first=1000 * number)
    evicted = {(held.tier, held.component): held.evicted for held in toy.cache.stats().occupancy}
    assert evicted[Tier.DEVICE, toy.layout.components[0].name] == 4 * 6 - 12
    assert all(count == 0 for (tier, _), count in evicted.items() if tier is Tier.HOST)


def test_operations_are_counted_by_kind_and_outcome() -> None:
    workers = Stepped()
    toy = engine(workers=workers, operations_max=1)
    cache = toy.cache
    prompt = serve(toy, 4)
    operation = started(cache.backup(prompt))
    assert cache.load(prompt) is NotStarted.TOO_MANY
    cache.cancel(operation)
    workers.run()
    cache.poll()
    cache.backup(prompt)
    workers.run()
    cache.poll()
    stats = cache.stats()
    backups, loads = stats.operations[TransferKind.BACKUP], stats.operations[TransferKind.LOAD]
    assert (backups.done, backups.failed, backups.cancelled, backups.declined) == (1, 0, 1, 0)
    assert (loads.done, loads.declined) == (0, 1)
    assert (stats.operations_failed, stats.operations_declined) == (1, 1)


def test_answers_of_storage_are_counted() -> None:
    store = MemoryStorage()
    filled(store)
    toy = engine(store)
    over(toy.cache, toy.cache.prefetch(toy.cache.prompt(tokens(8))))
    answers = toy.cache.stats().storage_answers
    assert answers[Method.EXISTS, Answer.HIT] > 0
    assert answers[Method.EXISTS, Answer.MISS] > 0
    assert answers[Method.GET, Answer.HIT] > 0


def test_a_scrape_on_another_thread_finds_the_figures_of_the_last_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.cache.stats.STATS_EVERY_S", 0.0)
    store = MemoryStorage()
    filled(store)
    toy = engine(store)
    registry = CollectorRegistry()
    registry.register(CacheCollector(toy.cache, "first"))
    over(toy.cache, toy.cache.prefetch(toy.cache.prompt(tokens(6))))
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(generate_latest, registry).result().decode()
    full = toy.layout.components[0].name
    assert f'unified_cache_pages{{cache="first",component="{full}",state="evictable",tier="host"}} 6.0' in text
    assert 'unified_cache_operations_total{cache="first",kind="prefetch",outcome="done"} 1.0' in text
    fetched = toy.cache.traffic()[TransferKind.PREFETCH].payload_bytes
    assert f'unified_cache_moved_bytes_total{{cache="first",kind="prefetch"}} {float(fetched)}' in text
    assert 'unified_cache_storage_answers_total{answer="hit",cache="first",method="get"}' in text


def test_several_caches_of_a_process_are_in_one_registry_each_under_its_name() -> None:
    first, second = engine(), engine()
    registry = CollectorRegistry()
    collector = CacheCollector(first.cache, "first")
    registry.register(collector)
    collector.add(second.cache, "second")
    names = {sample.labels["cache"] for metric in registry.collect() for sample in metric.samples}
    assert names == {"first", "second"}
    assert len({metric.name for metric in registry.collect()}) == len(list(registry.collect()))


def test_a_closed_cache_can_still_be_scraped_with_what_it_lost() -> None:
    store = ScriptedStorage()
    store.failing = {Method.PUT}
    toy = engine(store, write=WritePolicy.THROUGH)
    serve(toy, 4)
    toy.cache.wait_all(1)
    collector = CacheCollector(toy.cache)
    toy.cache.close()
    assert {metric.name for metric in collector.collect()} >= {"unified_cache_pages", "unified_cache_lookups"}
    (backups,) = [metric for metric in collector.collect() if metric.name == "unified_cache_backup_pages"]
    counts = {each.labels["outcome"]: each.value for each in backups.samples}
    assert counts == {"arrived": 0, "already": 0, "lost_failed": 4 + 2}, "four pages, two of them within the window"


def test_without_the_extra_the_error_names_it() -> None:
    script = "import sys; sys.modules['prometheus_client'] = None; import unified_cache.observe.metrics"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "MissingExtraError: unified_cache.observe.metrics needs prometheus_client" in done.stderr
    assert "pip install 'unified-cache[metrics]'" in done.stderr


def test_what_an_operator_must_know_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="unified_cache")
    toy = engine()
    store = ScriptedStorage()
    store.failing = {Method.EXISTS}
    toy.cache.attach(store)
    over(toy.cache, toy.cache.prefetch(toy.cache.prompt(tokens(2))))
    toy.cache.detach()
    toy.cache.close()
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    said = "\n".join(f"{level} {text}" for level, text in lines)
    for words in (
        "INFO opened a cache",
        "INFO attached a store",
        "WARNING the prefetch failed: exists is out of order",
        "INFO detached the store",
        "INFO closed the cache",
    ):
        assert words in said, said


def test_a_program_that_does_not_ask_for_log_lines_sees_none() -> None:
    assert any(isinstance(each, logging.NullHandler) for each in logging.getLogger("unified_cache").handlers)

"""Caches whose store is away when they open: they open all the same, and attach it once it is there."""

import logging

import pytest

from tests.support.operations import engine, over, serve
from tests.support.ports import free_ports
from tests.support.ranks import ThreadRanks, in_threads
from tests.support.service import LoopbackServer
from tests.support.store_calls import ScriptedStorage, raising
from tests.support.waiting import wait_until
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import NotStarted, OperationState
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import ConfigError, RankError, StateError, StorageError
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.wrappers.layer import Method

GUARD = GuardConfig(deadline_s=5.0, retry_rounds_max=1, breaker_pause_s=0.001, breaker_pause_s_max=0.001)
OVER_S = 30.0
"""For a store to be attached; reached only by a bug."""


def away(*, passes: bool = True) -> ScriptedStorage:
    """Make a store that fails to take a layout until the test mends it, in a way that passes by itself or not."""
    store = ScriptedStorage()
    store.before[Method.REGISTER] = raising(StorageError("away", retryable=passes))
    return store


def is_closed(store: ScriptedStorage) -> bool:
    return wait_until(lambda: Method.CLOSE in store.calls, OVER_S)


def attaches(cache: UnifiedCache) -> bool:
    """Poll until the store is attached."""
    return wait_until(lambda: bool(cache.poll()) or cache.stats().store is not None, OVER_S)


def test_a_cache_opens_without_its_store_and_attaches_it_once_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    storage = away()
    with caplog.at_level(logging.WARNING, "unified_cache"):
        toy = engine(storage, guard=GUARD)
        prompt = serve(toy, 4)
        assert toy.cache.prefetch(prompt) is NotStarted.NO_STORAGE
        assert over(toy.cache, toy.cache.backup(prompt)).state is OperationState.DONE
        assert wait_until(lambda: toy.cache.poll() == [] and storage.calls.count(Method.REGISTER) > 3, OVER_S)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said once, however often it is tried"
    assert toy.cache.stats().store is None
    storage.before.clear()
    assert attaches(toy.cache)
    assert over(toy.cache, toy.cache.backup(prompt)).state is OperationState.DONE
    toy.cache.reset()
    assert over(toy.cache, toy.cache.prefetch(prompt)).pages_count
    assert toy.cache.close() == []
    assert is_closed(storage)


def test_a_cache_opens_before_its_service_does() -> None:
    (port,) = free_ports(1)
    toy = engine(f"grpc://127.0.0.1:{port}?timeout_s=1", guard=GUARD)
    assert toy.cache.stats().store is None
    server = LoopbackServer.start(MemoryStorage(), port=port)
    assert attaches(toy.cache)
    assert over(toy.cache, toy.cache.backup(serve(toy, 4))).state is OperationState.DONE
    assert toy.cache.close() == []
    server.stop()


def test_what_does_not_pass_by_itself_is_raised_at_once_and_leaves_the_store_to_its_owner() -> None:
    storage = away(passes=False)
    with pytest.raises(StorageError, match="away"):
        engine(storage, guard=GUARD)
    assert Method.CLOSE not in storage.calls
    for url in ("nothing:at-all", "grpc://nowhere", "file:", "s3://", "memory"):
        with pytest.raises(ConfigError):
            engine(url, guard=GUARD)


@pytest.mark.parametrize("ending", [UnifiedCache.close, UnifiedCache.detach])
def test_who_waits_for_a_store_no_longer_closes_it(ending: object) -> None:
    storage = away()
    toy = engine(storage, guard=GUARD)
    with pytest.raises(StateError):
        toy.cache.attach(MemoryStorage())
    assert (toy.cache.close() if ending is UnifiedCache.close else toy.cache.detach()) == []
    assert is_closed(storage)


def test_ranks_attach_a_store_together_once_each_has_its_own() -> None:
    stores = [away(), away()]
    stores[0].before.clear()

    def live(ranks: ThreadRanks) -> None:
        cache = engine(stores[ranks.rank], ranks=ranks, guard=GUARD).cache
        for _ in range(20):
            cache.poll()
            assert cache.stats().store is None
        if ranks.rank:
            stores[1].before.clear()
        while cache.stats().store is None:
            cache.poll()
        cache.close()

    in_threads(2, live)
    assert all(map(is_closed, stores))


def test_a_rank_whose_store_is_wrong_keeps_every_rank_from_opening() -> None:
    stores = [away(), away(passes=False)]

    def live(ranks: ThreadRanks) -> None:
        with pytest.raises(StorageError if ranks.rank else RankError):
            engine(stores[ranks.rank], ranks=ranks, guard=GUARD)

    in_threads(2, live)

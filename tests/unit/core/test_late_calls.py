"""Stores that do not return in time, behind the guard and workers on threads: who is told, what is in quarantine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from threading import Event, get_ident
from threading import enumerate as living_threads

import pytest

from tests.support.cache import ToyEngine, WholePromptCache, toy_layout
from tests.support.operations import PAGE, out_pages, over, serve, started, tokens
from tests.support.service import wait_for
from unified_cache.cache.cache import UnifiedCache
from unified_cache.controller import InlineWorkers, Operation, OperationState
from unified_cache.core.config import GuardConfig
from unified_cache.core.errors import StorageError, StorageTimeoutError
from unified_cache.core.window import SPAN_ALL
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, PageIO

PATIENCE_S = 30.0
"""Longest wait for what must happen; reached only by a bug."""
PAGES = 2
"""Of a prompt."""
GUARD = GuardConfig(deadline_s=0.15, calls_max=2, breaker_failures_max=9)


class HangingReads(MemoryStorage):
    """A store in memory whose gets hang while they are told to, and then return after all."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = False
        self.let_go = Event()
        self.hung_count = 0
        self.callers: list[int] = []
        """Threads of gets."""

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        self.callers.append(get_ident())
        if self.hangs:
            self.hung_count += 1
            self.let_go.wait(PATIENCE_S)
        return super().get(pages)


@pytest.fixture
def store() -> Iterator[HangingReads]:
    store = HangingReads()
    yield store
    store.let_go.set()


Open = Callable[[GuardConfig], UnifiedCache]


@pytest.fixture
def open_cache(store: HangingReads) -> Open:
    """Open a cache with workers on threads over a store that holds six prompts."""

    def open_cache(guard: GuardConfig) -> UnifiedCache:
        toy = ToyEngine(toy_layout((SPAN_ALL,), PAGE), (16,), (16,), store, InlineWorkers())
        for first in range(6):
            prompt = serve(toy, PAGES, first * 1000)
            over(toy.cache, toy.cache.backup(prompt))
        config = replace(toy.cache.config, guard=guard, close_timeout_s=2.0)
        pools = list(toy.pools.values())
        return WholePromptCache.open(toy.layout, config, pools, identity=toy.cache.identity, storage=store)

    return open_cache


def prefetched(cache: UnifiedCache, number: int) -> Operation:
    """Prefetch a prompt and wait until its outcome is known."""
    operation = started(cache.prefetch(cache.prompt(tokens(PAGES, number * 1000))))

    def is_known() -> bool:
        cache.poll()
        return operation.state is not OperationState.RUNNING

    wait_for(is_known, PATIENCE_S)
    return operation


def storage_threads() -> list[str]:
    return [thread.name for thread in living_threads() if thread.name.startswith("storage-")]


def test_calls_of_workers_run_on_the_workers_own_threads(store: HangingReads, open_cache: Open) -> None:
    cache = open_cache(GUARD)
    for number in range(4):
        assert prefetched(cache, number).pages_count == PAGES
    names = {thread.ident: thread.name for thread in living_threads()}
    assert {names[caller] for caller in store.callers} <= {"storage-0", "storage-1"}
    assert cache.close() == []


def test_a_late_call_fails_its_operation_and_keeps_its_pages_until_the_store_returns(
    store: HangingReads, open_cache: Open
) -> None:
    cache = open_cache(GUARD)
    store.hangs = True
    operation = prefetched(cache, 0)
    assert isinstance(operation.error, StorageTimeoutError)
    assert (operation.error.call.name, operation.error.call.returned) == ("get", False)
    assert (operation.is_released, out_pages(cache)) == (False, PAGES)
    store.hangs = False
    assert prefetched(cache, 1).pages_count == PAGES
    store.let_go.set()
    cache.wait_all(PATIENCE_S)
    assert operation.error.call.returned
    assert (operation.is_released, out_pages(cache)) == (True, 0)
    cache.check()
    assert cache.close() == []


def test_another_worker_takes_the_place_of_one_that_hangs_until_too_many_do(
    store: HangingReads, open_cache: Open
) -> None:
    cache = open_cache(GUARD)
    assert [prefetched(cache, number).pages_count for number in (4, 5)] == [PAGES] * 2
    before = len(storage_threads())
    store.hangs = True
    for number in range(2):
        assert isinstance(prefetched(cache, number).error, StorageTimeoutError)
    refused = prefetched(cache, 2)
    assert type(refused.error) is StorageError
    assert "no thread is free" in str(refused.error)
    assert (store.hung_count, refused.is_released) == (2, True)
    store.hangs = False
    store.let_go.set()
    cache.wait_all(PATIENCE_S)
    wait_for(lambda: len(storage_threads()) <= before + 1)
    assert prefetched(cache, 3).pages_count == PAGES
    cache.check()
    assert cache.close() == []


def test_the_breaker_opens_by_calls_that_never_return(store: HangingReads, open_cache: Open) -> None:
    cache = open_cache(
        replace(GUARD, calls_max=8, breaker_failures_max=2, breaker_pause_s=60.0, breaker_pause_s_max=60.0)
    )
    store.hangs = True
    for number in range(2):
        assert isinstance(prefetched(cache, number).error, StorageTimeoutError)
    absent = prefetched(cache, 2)
    assert (absent.error, absent.pages_count, store.hung_count) == (None, 0, 2)
    store.let_go.set()
    cache.wait_all(PATIENCE_S)
    assert prefetched(cache, 3).pages_count == 0
    assert cache.close() == []


def test_a_store_whose_look_ups_work_and_whose_reads_all_fail_is_soon_left_alone(
    store: HangingReads, open_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing_get(pages: Sequence[PageIO]) -> list[Answer]:
        store.callers.append(get_ident())
        raise StorageError("cannot read", retryable=True)

    monkeypatch.setattr(store, "get", failing_get)
    guard = replace(GUARD, retry_rounds_max=2, retry_pause_s=1e-6, breaker_failures_max=3)
    cache = open_cache(replace(guard, breaker_pause_s=60.0, breaker_pause_s_max=60.0))
    outcomes = [prefetched(cache, number % 6).state for number in range(30)]
    assert outcomes == [OperationState.FAILED] * 3 + [OperationState.DONE] * 27
    assert len(store.callers) == 3 * 3, "three failures; of each a get of both pages, then one of each"
    assert cache.close() == []


def test_a_cache_closes_in_time_over_a_call_that_hangs_and_names_it(store: HangingReads, open_cache: Open) -> None:
    cache = open_cache(GUARD)
    cache.config = replace(cache.config, close_timeout_s=0.3)
    store.hangs = True
    prefetched(cache, 0)
    stuck = cache.close()
    assert any("get" in name for name in stuck)
    store.let_go.set()
    wait_for(lambda: not [name for name in storage_threads() if not name.startswith("storage-call")])

"""A call that is split into lanes has the engine's rows in none of them once it is over, however it ends."""

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.unit.integrations.engine_store.test_pools import CountedStore, Pools, chain
from unified_cache.integrations.engine_store import EnginePage, EngineStore
from unified_cache.integrations.engine_store.pools import PARALLEL_PARTS, PART_BYTES_MIN, BundlePages
from unified_cache.storage_backends.protocol import Answer

PATIENCE_S = 10.0
PAGES = 2 * PARALLEL_PARTS


class PausedLanes(CountedStore):
    """A store that returns to a lane's own thread when the test lets it, and interrupts whoever calls, if told to."""

    def __init__(self, store: EngineStore) -> None:
        super().__init__(store)
        self.interrupts = False
        self.begun = threading.Semaphore(0)
        self.goes_on = threading.Event()
        self.ended_count = 0

    def get_by_deadline(self, pages: Sequence[EnginePage], due_s: float = math.inf) -> list[Answer]:
        if threading.current_thread().name.startswith("unified-cache-part"):
            self.begun.release()
            assert self.goes_on.wait(PATIENCE_S)
            answers = super().get_by_deadline(pages)
            self.ended_count += 1
            return answers
        if self.interrupts:
            assert self.begun.acquire(timeout=PATIENCE_S)
            threading.Timer(0.05, self.goes_on.set).start()
            raise KeyboardInterrupt
        return super().get_by_deadline(pages)


@pytest.fixture
def store() -> Iterator[PausedLanes]:
    with EngineStore.open("memory:") as opened:
        yield PausedLanes(opened)


def whole_chain() -> list[BundlePages]:
    return [BundlePages(("kv",), chain(PAGES), range(PAGES))]


def test_who_is_interrupted_learns_it_when_no_part_has_rows_any_more(store: PausedLanes) -> None:
    pools = Pools(store, kv=PART_BYTES_MIN)
    store.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        pools.tier.get(whole_chain())
    assert store.ended_count == PARALLEL_PARTS - 1
    pools.tier.close()


def test_what_waits_for_a_part_when_the_tier_is_closed_was_not_read(store: PausedLanes) -> None:
    pools = Pools(store, kv=PART_BYTES_MIN)
    store.goes_on.set()
    assert pools.store(chain(PAGES), "kv") == [True] * PAGES
    store.goes_on.clear()
    parts_count = 2 * (PARALLEL_PARTS - 1)
    with ThreadPoolExecutor(parts_count + 1) as callers:
        gets: list[Future[list[list[bool]]]] = []
        for _ in range(parts_count):
            gets.append(callers.submit(pools.tier.get, whole_chain()))
            assert store.begun.acquire(timeout=PATIENCE_S)
        late = callers.submit(pools.tier.get, whole_chain())
        while len(store.gets) < parts_count + 1:  # each does the first part itself
            threading.Event().wait(0.001)
        pools.tier.close()
        store.goes_on.set()
        assert late.result(PATIENCE_S) == [
            [True] * (PAGES // PARALLEL_PARTS) + [False] * (PAGES - PAGES // PARALLEL_PARTS)
        ]
        assert [get.result(PATIENCE_S) for get in gets] == [[[True] * PAGES]] * parts_count

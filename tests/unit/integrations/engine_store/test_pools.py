"""Pools of an engine over one store: look-ups by chain, bundles, pools without bytes, and stores that are away."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tests.support.store_calls import ScriptedStorage
from unified_cache.core.page import PageKey
from unified_cache.core.pool import Component, Identity, ModelLayout, PoolSpec
from unified_cache.core.window import SPAN_ALL
from unified_cache.integrations.engine_store import EngineStore
from unified_cache.integrations.engine_store.pools import AffineRows, BundleName, BundlePages, EnginePools, PoolNeed
from unified_cache.storage_backends.protocol import Answer
from unified_cache.storage_backends.wrappers import Method

SLOTS = 64


@pytest.fixture
def backend() -> ScriptedStorage:
    return ScriptedStorage()


@pytest.fixture
def store(backend: ScriptedStorage) -> Iterator[EngineStore]:
    with EngineStore.opened_by(lambda: backend) as opened:
        yield opened


def name_of(pools: tuple[str, ...], pages_bytes: Sequence[int]) -> BundleName:
    name = "_".join(pools)
    layout = ModelLayout(16, (Component(name, SPAN_ALL, (PoolSpec(name, sum(pages_bytes)),)),))
    return BundleName(Identity("model"), layout)


class Pools:
    """A tier and the memory of its pools."""

    def __init__(self, store: EngineStore, **pages_bytes: int) -> None:
        self.tier = EnginePools(store, name_of)
        self.memory: dict[str, np.ndarray[tuple[int, int], np.dtype[np.uint8]]] = {}
        for pool, page_bytes in pages_bytes.items():
            self.add(pool, page_bytes)

    def add(self, pool: str, page_bytes: int) -> None:
        if not page_bytes:
            self.tier.add(pool, None)
            return
        memory = self.memory[pool] = np.zeros((SLOTS, page_bytes), np.uint8)
        base = memory.ctypes.data
        rows = AffineRows.learn(
            lambda slots: ([base + slot * page_bytes for slot in slots], [page_bytes] * len(slots)), SLOTS
        )
        self.tier.add(pool, rows)

    def store(self, keys: Sequence[PageKey], *pools: str) -> list[bool]:
        """Store pages that hold their own number, in slots of that number."""
        for pool in pools:
            for slot in range(len(keys)):
                self.memory[pool][slot] = slot + 1
        (stored,) = self.tier.put([BundlePages(pools, keys, range(len(keys)))])
        return stored


def chain(count: int, name: str = "") -> list[PageKey]:
    return [hashlib.sha256(f"{name}{number}".encode()).digest() for number in range(count)]


def test_a_bundle_is_one_object_a_page(store: EngineStore, backend: ScriptedStorage) -> None:
    pools, keys = Pools(store, a=100, b=7), chain(4)
    pools.store(keys, "a", "b")
    assert len(backend.offered) == 4
    (filled,) = pools.tier.get([BundlePages(("b", "a"), keys, range(10, 14))])
    assert filled == [True] * 4
    assert (pools.memory["a"][10:14, -1] == [1, 2, 3, 4]).all()
    assert (pools.memory["b"][10:14, -1] == [1, 2, 3, 4]).all()


def looks(backend: ScriptedStorage) -> list[int]:
    """Return the labels of each look-up."""
    return [len(call.labels) for call in backend.noted if call.method is Method.EXISTS and call.labels]


@pytest.mark.parametrize("stored", [0, 1, 63, 64, 65, 700])
def test_a_prefix_ends_at_the_first_page_that_is_missing(store: EngineStore, stored: int) -> None:
    pools, keys = Pools(store, kv=8), chain(1000)
    for start in range(0, stored, SLOTS):
        pools.store(keys[start : min(start + SLOTS, stored)], "kv")
    found = pools.tier.restorable(keys, [PoolNeed(("kv",), SPAN_ALL)])
    assert found.ends == list(range(1, stored + 1))
    assert found.reach == {"kv": stored}


def test_a_chain_that_is_not_there_costs_a_short_look(store: EngineStore, backend: ScriptedStorage) -> None:
    pools = Pools(store, kv=8)
    assert pools.tier.restorable(chain(50_000), [PoolNeed(("kv",), SPAN_ALL)]).ends == []
    assert looks(backend) == [64]


def test_all_pools_of_a_short_chain_are_looked_up_by_one_call(store: EngineStore, backend: ScriptedStorage) -> None:
    pools, keys = Pools(store, kv=8, swa=8, state=8), chain(40)
    for pool in ("kv", "swa", "state"):
        pools.store(keys[:30], pool)
    backend.take()
    needs = [PoolNeed(("kv",), SPAN_ALL), PoolNeed(("swa",), 4), PoolNeed(("state",), 1)]
    assert pools.tier.restorable(keys, needs).ends == list(range(1, 31))
    assert looks(backend) == [3 * 40]


@pytest.mark.parametrize("stored", [64, 65, 320, 321, 400])
def test_a_window_is_looked_for_as_far_as_a_long_prefix_goes(store: EngineStore, stored: int) -> None:
    pools, keys = Pools(store, kv=8, state=8), chain(400)
    for start in range(0, stored, SLOTS):
        pools.store(keys[start : min(start + SLOTS, stored)], "kv")
    for page in (2, 63, 64, 319, 320, 399):
        pools.store(keys[page : page + 1], "state")
    found = pools.tier.restorable(keys, [PoolNeed(("kv",), SPAN_ALL), PoolNeed(("state",), 1)])
    assert found.ends == [end for end in (3, 64, 65, 320, 321, 400) if end <= stored]
    assert found.reach == {"kv": stored, "state": found.ends[-1]}


def test_a_window_is_restorable_where_its_last_pages_are(store: EngineStore) -> None:
    pools, keys = Pools(store, kv=8, swa=8), chain(10)
    pools.store(keys, "kv")
    pools.store(keys[:1], "swa")
    pools.store(keys[3:6], "swa")
    found = pools.tier.restorable(keys, [PoolNeed(("kv",), SPAN_ALL), PoolNeed(("swa",), 2)])
    # The first page is a whole window of its own; 4 would need pages 2 and 3.
    assert found.ends == [1, 5, 6]
    assert found.reach == {"kv": 10, "swa": 6}


def test_a_pool_without_bytes_decides_nothing(store: EngineStore, backend: ScriptedStorage) -> None:
    pools, keys = Pools(store, kv=0, c4=8, swa=8), chain(6)
    needs = [PoolNeed(("kv",), SPAN_ALL), PoolNeed(("c4",), SPAN_ALL), PoolNeed(("swa",), 1)]
    assert pools.tier.put([BundlePages(("kv",), keys, range(6))]) == [[True] * 6]
    assert pools.tier.restorable(keys, needs).ends == []
    assert pools.tier.restorable(keys, needs[:1]).ends == []
    pools.store(keys[:4], "c4")
    pools.store(keys, "swa")
    assert pools.tier.restorable(keys, needs).ends == [1, 2, 3, 4]
    assert not [label for call in backend.noted for label in call.labels if label.pool == "kv"]
    assert pools.tier.get([BundlePages(("kv",), keys, range(6))]) == [[True] * 6]


def test_nothing_is_found_of_a_pool_that_nobody_added(store: EngineStore) -> None:
    pools, keys = Pools(store, kv=8), chain(3)
    pools.store(keys, "kv")
    needs = [PoolNeed(("kv",), SPAN_ALL), PoolNeed(("draft",), SPAN_ALL)]
    assert pools.tier.restorable(keys, needs).ends == []
    assert pools.tier.get([BundlePages(("draft",), keys, range(3))]) == [[False] * 3]
    pools.add("draft", 8)
    pools.store(keys, "draft")
    assert pools.tier.restorable(keys, needs).ends == [1, 2, 3]


def test_a_pool_added_later_leaves_what_is_stored_of_the_others(store: EngineStore) -> None:
    pools, keys = Pools(store, kv=8), chain(3)
    pools.store(keys, "kv")
    pools.add("draft", 8)
    assert pools.tier.restorable(keys, [PoolNeed(("kv",), SPAN_ALL)]).ends == [1, 2, 3]


def test_a_store_that_is_away_is_asked_once_and_answers_nothing(store: EngineStore, backend: ScriptedStorage) -> None:
    pools, keys = Pools(store, kv=8), chain(300)
    backend.answers = dict.fromkeys((Method.EXISTS, Method.GET, Method.PUT), Answer.UNAVAILABLE)
    assert pools.tier.get([BundlePages(("kv",), keys, [0] * 300)]) == [[False] * 300]
    assert pools.tier.put([BundlePages(("kv",), keys, [0] * 300)]) == [[False] * 300]
    assert pools.tier.restorable(keys, [PoolNeed(("kv",), SPAN_ALL)]).ends == []
    assert [len(call.labels) for call in backend.noted if call.method is Method.GET] == [300]


def test_cleared_pages_are_gone(store: EngineStore) -> None:
    pools, keys = Pools(store, kv=8, swa=8), chain(3)
    pools.store(keys, "kv")
    pools.store(keys, "swa")
    assert pools.tier.clear()
    assert pools.tier.restorable(keys, [PoolNeed(("kv",), SPAN_ALL)]).ends == []
    assert pools.tier.restorable(keys, [PoolNeed(("swa",), 1)]).ends == []

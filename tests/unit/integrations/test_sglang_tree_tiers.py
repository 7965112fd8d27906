"""The slots of an engine in all tiers: what is evicted from the device comes back from the host, bytes and all."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from unified_cache import UnifiedCache
from unified_cache.components import Full
from unified_cache.config import CacheConfig, WritePolicy
from unified_cache.errors import InputError, SlotError, StaleMatchError, StateError
from unified_cache.integrations.sglang.tree_slots import TreePrefix
from unified_cache.integrations.sglang.tree_tiers import TieredSlotTree
from unified_cache.memory import DevicePool
from unified_cache.page import Prompt
from unified_cache.pool import Identity, ModelLayout, PoolSpec

PAGE = 4
DEVICE_PAGES = 8
TIMEOUT_S = 20.0


def prompt(*pages: int) -> Prompt:
    """Make a prompt of one page for each number."""
    return Prompt.of(np.repeat(np.array(pages, np.int64), PAGE), PAGE, whole=True)


class EngineMemory:
    """An engine: two layers of KV, and the slots that the tree does not have."""

    def __init__(self) -> None:
        self.layers = [torch.zeros((DEVICE_PAGES + 1, 16), dtype=torch.uint8) for _ in range(2)]
        pool = PoolSpec("kv", 32)
        config = CacheConfig(device_pages=(DEVICE_PAGES,), host_pages=(32,), write=WritePolicy.THROUGH)
        layout = ModelLayout(PAGE, (Full((pool,)),))
        cache = UnifiedCache.open(layout, config, [DevicePool(pool, self.layers)], identity=Identity("model"))
        self.tree = TieredSlotTree(cache)
        self.cache = cache
        self.free = list(range(1, DEVICE_PAGES + 1))

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        return taken

    def compute(self, tokens: Prompt, start: int = 0) -> list[int]:
        """Fill slots for the pages from ``start`` on and insert them; return them."""
        slots = self.take(tokens.pages_count - start)
        for page, slot in enumerate(slots, start):
            for number, layer in enumerate(self.layers):
                layer[slot] = content(tokens, page, number)
        taken = self.tree.insert(tokens, start, np.array(slots, np.int32))
        self.free += taken.duplicates.tolist()
        return slots

    def evict(self, pages: int) -> None:
        for slots in self.tree.evict(pages):
            self.free += slots.tolist()
            for layer in self.layers:
                layer[slots] = 0xEE

    def settle(self) -> None:
        self.cache.wait_all(TIMEOUT_S)

    def check_bytes(self, prefix: TreePrefix) -> None:
        for page, slot in enumerate(self.tree.slots(prefix).tolist()):
            for number, layer in enumerate(self.layers):
                assert set(layer[slot].tolist()) == {content(prefix.prompt, page, number)}

    def check(self) -> None:
        self.tree.check()
        assert len(set(self.free)) == len(self.free) == DEVICE_PAGES - self.tree.held_pages


def content(tokens: Prompt, page: int, layer: int) -> int:
    """Return the byte that a page of a prompt is filled with."""
    return tokens.keys[page][layer]


@pytest.fixture
def engine() -> Iterator[EngineMemory]:
    memory = EngineMemory()
    yield memory
    assert memory.tree.close() == []


def test_every_slot_is_the_engines_to_begin_with(engine: EngineMemory) -> None:
    engine.check()
    assert (engine.tree.held_pages, engine.tree.evictable_pages, engine.tree.protected_pages) == (0, 0, 0)


def test_a_cache_that_is_in_use_is_refused(engine: EngineMemory) -> None:
    engine.compute(prompt(1))
    with pytest.raises(StateError):
        TieredSlotTree(engine.cache)


def test_what_was_evicted_comes_back_from_the_host(engine: EngineMemory) -> None:
    asked = prompt(1, 2, 3)
    engine.compute(asked)
    engine.settle()
    engine.evict(3)
    found = engine.tree.match(asked)
    assert (found.end, found.host_end) == (0, 3)
    loaded, unused = engine.tree.load(found, np.array(engine.take(3), np.int32), TIMEOUT_S)
    assert (loaded.end, len(unused)) == (3, 0)
    engine.check_bytes(loaded)
    engine.check()


def test_slots_that_a_load_does_not_need_go_back_to_the_engine(engine: EngineMemory) -> None:
    asked = prompt(1, 2, 3)
    engine.compute(asked)
    engine.settle()
    engine.evict(1)
    found = engine.tree.match(asked)
    assert (found.end, found.host_end) == (2, 3)
    given = engine.take(4)
    loaded, unused = engine.tree.load(found, np.array(given, np.int32), TIMEOUT_S)
    engine.free += unused.tolist()
    assert (loaded.end, len(unused)) == (3, 3)
    assert set(unused.tolist()) < set(given)
    engine.check_bytes(loaded)
    engine.check()


def test_a_prefix_is_evicted_from_its_end_and_as_far_as_asked(engine: EngineMemory) -> None:
    engine.compute(prompt(1, 2, 3))
    engine.settle()
    engine.evict(2)
    assert engine.tree.match(prompt(1, 2, 3)).end == 1
    engine.check()


def test_duplicates_go_back_to_the_engine(engine: EngineMemory) -> None:
    engine.compute(prompt(1, 2))
    engine.compute(prompt(1, 2, 3))
    engine.check()
    assert len(engine.free) == DEVICE_PAGES - 3
    engine.check_bytes(engine.tree.match(prompt(1, 2, 3)))


def test_a_locked_prefix_stays(engine: EngineMemory) -> None:
    engine.compute(prompt(1, 2, 3))
    engine.settle()
    lock = engine.tree.lock(engine.tree.match(prompt(1, 2)))
    assert (engine.tree.evictable_pages, engine.tree.protected_pages) == (1, 2)
    engine.evict(9)
    assert engine.tree.match(prompt(1, 2, 3)).end == 2
    engine.tree.unlock(lock)
    assert engine.tree.evictable_pages == 2
    engine.check()


def test_an_evicted_prefix_is_told(engine: EngineMemory) -> None:
    engine.compute(prompt(1, 2))
    engine.settle()
    found = engine.tree.match(prompt(1, 2))
    engine.evict(1)
    with pytest.raises(StaleMatchError):
        engine.tree.lock(found)
    with pytest.raises(StaleMatchError):
        engine.tree.slots(found)
    engine.check()


def test_what_cannot_be_inserted_leaves_everything_as_it_was(engine: EngineMemory) -> None:
    slots = engine.compute(prompt(1))
    with pytest.raises(InputError):
        engine.tree.insert(prompt(2, 3), 1, np.array([7], np.int32))
    with pytest.raises(SlotError):
        engine.tree.insert(prompt(2), 0, np.array(slots, np.int32))
    assert engine.tree.match(prompt(2)).end == 0
    engine.check()


def test_clearing_gives_every_slot_to_the_engine(engine: EngineMemory) -> None:
    engine.compute(prompt(1, 2))
    engine.tree.lock(engine.tree.match(prompt(1)))
    engine.tree.clear()
    engine.free = list(range(1, DEVICE_PAGES + 1))
    engine.check()
    found = engine.tree.match(prompt(1, 2))
    assert (found.end, found.host_end) == (0, 0)
    engine.compute(prompt(1, 2))
    engine.check()

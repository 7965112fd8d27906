"""Calls that cannot be served: a typed error that says why, and a cache that is what it was before."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.cache import ToyEngine
from unified_cache.cache import UnifiedCache
from unified_cache.components import Full, RecurrentState, SlidingWindow
from unified_cache.components.deepseek_v4 import DeepSeekV4
from unified_cache.config import CacheConfig
from unified_cache.controller import InlineWorkers
from unified_cache.errors import ConfigError, InputError, LayoutError, LockError, SlotError, StaleMatchError, TokenError
from unified_cache.memory import NoBytes
from unified_cache.page import Prompt
from unified_cache.pool import Identity, ModelLayout, PoolSpec, Slots
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.tree import Lock

PAGE = 16
FULL = Full((PoolSpec("kv", 64),))
WINDOW = SlidingWindow(2 * PAGE, PAGE, (PoolSpec("swa", 32),))
STATE = RecurrentState((PoolSpec("mamba", 48),))
LAYOUT = ModelLayout(PAGE, (FULL, WINDOW, STATE))


def tokens(*contents: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.concatenate([np.arange(PAGE, dtype=np.int32) + 1000 * content for content in contents])


class Used:
    """A cache in use: a request that holds a lock and slots, a prefix, and a lock that was given back."""

    def __init__(self) -> None:
        self.toy = ToyEngine(LAYOUT, (12, 8, 4), (12, 8, 4), None, InlineWorkers())
        self.cache = self.toy.cache
        lock = self.toy.serve(self.cache.prompt(tokens(1, 2, 3)))
        assert lock is not None
        self.lock: Lock = lock
        self.released = self.cache.lock(self.cache.match(self.cache.prompt(tokens(1, 2, 3))))
        self.cache.release(self.released)
        mine = self.cache.allocate(self.cache.pages_to_allocate(3, 5, [5]))
        assert mine is not None
        self.mine = mine
        self.longer = self.cache.prompt(tokens(1, 2, 3, 4, 5))

    def snapshot(self) -> object:
        ledger = self.cache._ledger
        self.cache.check()
        assert ledger.paired is not None
        return (
            [slots.tolist() for slots in ledger.tree.check(list(self.cache._locks))],
            ledger.paired.map.table.tolist(),
            self.cache.stats(),
            [slots.tolist() for slots in self.mine],
            self.toy.verify(self.longer, self.lock),
        )

    def with_slot(self, component: int, page: int, slot: int) -> list[Slots]:
        """Return the request's slots with one replaced."""
        slots = [given.copy() for given in self.mine]
        slots[component][page] = slot
        return slots


def foreign_lock(used: Used) -> None:
    other = Used()
    used.cache.release(other.lock)


def insert_over_a_foreign_lock(used: Used) -> None:
    other = Used()
    used.cache.insert(used.longer, used.mine, other.lock)


TREES = "is the tree's, not out"
CALLS: dict[str, tuple[Callable[[Used], object], type[Exception], str]] = {
    "a lock given back twice": (lambda u: u.cache.release(u.released), LockError, "released already"),
    "another cache's lock": (foreign_lock, LockError, "another tree"),
    "pages after a lock given back": (
        lambda u: u.cache.insert(u.longer, u.mine, u.released),
        LockError,
        "released already",
    ),
    "pages after another cache's lock": (insert_over_a_foreign_lock, LockError, "another tree"),
    "slots of the tree": (
        lambda u: u.cache.insert(u.longer, u.with_slot(0, 0, int(u.cache.slots(u.lock)[0])), u.lock),
        SlotError,
        f"full: slot 1 {TREES}",
    ),
    "slots that are free": (
        lambda u: u.cache.insert(u.longer, u.with_slot(2, 1, 4), u.lock),
        SlotError,
        "mamba: slot 4 is free, not out",
    ),
    "a slot named twice": (
        lambda u: u.cache.insert(u.longer, u.with_slot(0, 0, int(u.mine[0][1])), u.lock),
        SlotError,
        "full: a slot is named twice",
    ),
    "slots that no pool has": (
        lambda u: u.cache.insert(u.longer, u.with_slot(2, 1, 99), u.lock),
        SlotError,
        r"mamba: slots must be in \[1, 4\]",
    ),
    "a page without a Full slot": (
        lambda u: u.cache.insert(u.longer, u.with_slot(0, 0, -1), u.lock),
        SlotError,
        "needs a slot for every page|not reached through",
    ),
    "windows of other Full pages": (
        lambda u: u.cache.insert(u.longer, [u.mine[0], u.mine[1][::-1].copy(), u.mine[2]], u.lock),
        SlotError,
        "not reached through the Full slots of the same pages",
    ),
    "too few slots": (
        lambda u: u.cache.insert(u.longer, [given[:1] for given in u.mine], u.lock),
        InputError,
        "expected 2 slots",
    ),
    "a floor that is not where pages are": (
        lambda u: u.cache.trim(u.mine, [mask[:-1] for mask in u.cache.pages_to_allocate(3, 5, [5])]),
        InputError,
        "expected slots for 1 pages",
    ),
    "a floor that would take Full pages": (
        lambda u: u.cache.trim(u.mine, [np.zeros(2, np.bool_) for _ in range(3)]),
        InputError,
        "the first all True",
    ),
    "giving back what the tree has": (
        lambda u: u.cache.free(u.with_slot(0, 0, int(u.cache.slots(u.lock)[0]))),
        SlotError,
        TREES,
    ),
    "giving back nothing of no component": (lambda u: u.cache.free([]), InputError, "slots for 3 components, found 0"),
    "slots of too few components": (
        lambda u: u.cache.insert(u.longer, u.mine[:2], u.lock),
        InputError,
        "slots for 3 components, found 2",
    ),
    "pages in the wrong order": (lambda u: u.cache.pages_to_allocate(5, 3, [5]), InputError, "0 <= start <= end"),
    "masks for other components": (
        lambda u: u.cache.allocate(u.cache.pages_to_allocate(3, 5, [5])[:2]),
        InputError,
        "one array for each of full, swa, mamba",
    ),
    "a prompt of other pages": (
        lambda u: u.cache.match(Prompt.of(tokens(1), 8)),
        InputError,
        "expected a prompt of 16-token pages, found 8",
    ),
    "tokens that are none": (lambda u: u.cache.prompt([1.5] * PAGE), TokenError, "integers"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_is_a_typed_error_and_changes_nothing(name: str) -> None:
    call, error, message = CALLS[name]
    used = Used()
    before = used.snapshot()
    with pytest.raises(error, match=message):
        call(used)
    assert used.snapshot() == before
    lock = used.cache.insert(used.longer, used.mine, used.lock)
    used.cache.release(lock)
    used.cache.check()


def test_a_match_that_the_tree_has_outlived_locks_nothing() -> None:
    used = Used()
    found = used.cache.match(used.longer)
    other = used.toy.serve(used.cache.prompt(tokens(7)))
    assert other is not None
    before = used.snapshot()
    with pytest.raises(StaleMatchError, match="match again"):
        used.cache.lock(found)
    assert used.snapshot() == before


@pytest.mark.parametrize("window_tokens", [0, -1, True])
def test_a_window_without_tokens_is_refused(window_tokens: int) -> None:
    with pytest.raises(LayoutError, match="window_tokens of a sliding window must be a positive integer"):
        SlidingWindow(window_tokens, PAGE, (PoolSpec("swa", 8),))


def test_a_window_counted_in_other_pages_is_refused() -> None:
    with pytest.raises(LayoutError, match="swa: a window counted in pages of 16 tokens, found 64"):
        ModelLayout(64, (FULL, WINDOW))


def test_a_window_that_does_not_divide_deepseeks_page_is_refused() -> None:
    with pytest.raises(LayoutError, match="window 100"):
        DeepSeekV4((4, 128), window_tokens=100).layout()


def test_host_pages_for_some_components_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match="zero for all components or for none"):
        CacheConfig((4, 4), (4, 0))


@pytest.mark.parametrize("leg", ["backup", "load"])
def test_moving_to_a_host_that_has_no_pages_is_refused(leg: str) -> None:
    toy = ToyEngine(LAYOUT, (4, 4, 4), (0, 0, 0), None, InlineWorkers())
    prompt = toy.cache.prompt(tokens(1, 2))
    lock = toy.serve(prompt)
    assert lock is not None
    before = toy.cache.stats()
    moving = {"backup": toy.cache.backup, "load": toy.cache.load}[leg]
    with pytest.raises(ConfigError, match="host pages are needed"):
        moving(prompt)
    assert toy.cache.stats() == before
    toy.cache.release(lock)


def assemble(layout: ModelLayout, host_pages: int) -> UnifiedCache:
    sizes = tuple(8 for _ in layout.components)
    config = CacheConfig(sizes, tuple(host_pages for _ in sizes))
    return UnifiedCache.assemble(layout, config, NoBytes(), InlineWorkers(), Identity("m"), MemoryStorage())


def test_storage_without_host_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="host pages are needed"):
        assemble(LAYOUT, 0)


def test_storage_of_a_model_whose_every_layer_slides_is_refused() -> None:
    with pytest.raises(ConfigError, match="storage needs a pool with bytes in full"):
        assemble(ModelLayout(PAGE, (Full((PoolSpec("kv", 0),)), WINDOW)), 8)

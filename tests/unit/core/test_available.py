"""Pages that an engine can allocate, asked before it does: free, evictable, and protected by locks."""

import numpy as np
import pytest

from tests.support.cache import ToyEngine, toy_layout
from tests.support.operations import over, present
from unified_cache.controller import InlineWorkers
from unified_cache.core.errors import InputError, LockError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Pages, Tier
from unified_cache.core.window import SPAN_ALL
from unified_cache.tree import Lock

PAGE = 4
FULL, SWA, STATE = range(3)


def engine() -> ToyEngine:
    """Make 20 pages of Full, 8 of a window of two pages, and 6 of one that needs the last page alone."""
    return ToyEngine(toy_layout((SPAN_ALL, 2, 1), PAGE), (20, 8, 6), (20, 8, 6), None, InlineWorkers())


def prompt(toy: ToyEngine, *pages: int) -> Prompt:
    return toy.cache.prompt(np.concatenate([np.arange(PAGE, dtype=np.int32) + PAGE * page for page in pages]))


def served(toy: ToyEngine, *pages: int) -> Lock:
    return present(toy.serve(prompt(toy, *pages)))


def available(toy: ToyEngine) -> list[int]:
    return [toy.cache.available(component) for component in (FULL, SWA, STATE)]


def counts(toy: ToyEngine) -> list[tuple[int, int, int, int]]:
    """Return (free, evictable, protected, out) of each component on the device; together they are its capacity."""
    found = [each for each in toy.cache.stats().occupancy if each.tier is Tier.DEVICE]
    for each in found:
        assert each.free + each.evictable + each.protected + each.out == each.capacity
        assert each.available == each.free + each.evictable
    return [(each.free, each.evictable, each.protected, each.out) for each in found]


def masks(full: int, swa: int, state: int) -> list[Pages]:
    """Ask for so many pages of each component, the windows at the end of Full's."""
    return [np.arange(full) >= full - count for count in (full, swa, state)]


def test_what_a_lock_pins_is_protected_and_what_it_gives_back_is_evictable() -> None:
    toy = engine()
    lock = served(toy, 1, 2, 3, 4)
    assert counts(toy) == [(16, 0, 4, 0), (6, 0, 2, 0), (5, 0, 1, 0)]
    assert available(toy) == [16, 6, 5]
    toy.cache.release(lock)
    assert counts(toy) == [(16, 4, 0, 0), (6, 2, 0, 0), (5, 1, 0, 0)]
    assert available(toy) == [20, 8, 6]


def test_a_lock_protects_every_full_page_above_it_and_of_windows_its_own() -> None:
    toy = engine()
    toy.cache.release(served(toy, 1, 2, 3, 4))
    toy.cache.release(served(toy, 1, 2, 3, 4, 5, 6, 7, 8))
    lock = toy.cache.lock(toy.cache.match(prompt(toy, 1, 2, 3, 4, 5, 6, 7, 8)))
    assert counts(toy) == [(12, 0, 8, 0), (4, 2, 2, 0), (4, 1, 1, 0)]
    toy.cache.release(lock)


def test_a_branch_below_a_locked_prefix_stays_evictable() -> None:
    toy = engine()
    lock = served(toy, 1, 2, 3, 4)
    toy.cache.release(served(toy, 1, 2, 3, 4, 5, 6))
    assert counts(toy) == [(14, 2, 4, 0), (4, 2, 2, 0), (4, 1, 1, 0)]
    toy.cache.release(lock)
    assert available(toy) == [20, 8, 6]


def test_windows_released_by_a_running_request_are_evictable_while_full_stays_pinned() -> None:
    toy = engine()
    lock = served(toy, 1, 2, 3, 4)
    assert available(toy) == [16, 6, 5]
    for _ in range(2):  # once more changes nothing
        toy.cache.release_windows(lock)
        assert counts(toy) == [(16, 0, 4, 0), (6, 2, 0, 0), (5, 1, 0, 0)]
        toy.cache.check()
    pages = present(toy.cache.allocate(masks(16, 8, 6)))
    assert toy.cache.slots(lock, FULL).tolist() == [1, 2, 3, 4]
    assert toy.cache.slots(lock, SWA).tolist() == [-1, -1]
    toy.cache.free(pages)
    toy.cache.release(lock)
    assert available(toy) == [20, 8, 6]
    with pytest.raises(LockError, match="released already"):
        toy.cache.release_windows(lock)


def test_a_request_that_released_its_windows_inserts_what_it_computed_and_forks_nothing() -> None:
    toy = engine()
    lock = served(toy, 1, 2, 3)
    toy.cache.release_windows(lock)
    with pytest.raises(InputError, match="released its windows"):
        toy.cache.fork(lock)
    longer = prompt(toy, 1, 2, 3, 4, 5)
    pages = present(toy.cache.allocate(toy.cache.pages_to_allocate(3, 5, [5])))
    for component, slots in enumerate(pages):
        toy.write_pages(component, slots, longer, 3)
    renewed = toy.cache.insert(longer, pages, lock)
    assert toy.verify(longer, renewed) == 5 + 2 + 1
    toy.cache.release(renewed)
    toy.cache.check()


def test_pages_handed_out_are_neither_free_nor_evictable() -> None:
    toy = engine()
    toy.cache.release(served(toy, 1, 2, 3, 4))
    pages = present(toy.cache.allocate(masks(5, 2, 1)))
    assert available(toy) == [15, 6, 5]
    toy.cache.free(pages)
    assert available(toy) == [20, 8, 6]


@pytest.mark.parametrize("short", [None, FULL, SWA, STATE])
def test_all_that_is_available_can_be_allocated_at_once_and_not_a_page_more(short: int | None) -> None:
    """Evicting Full takes windows with it and evicting a window takes states: no page is counted twice or lost."""
    toy = engine()
    lock = served(toy, 1, 2, 3)
    for first in (10, 20, 30):
        toy.cache.release(served(toy, 1, 2, 3, *range(first, first + 4)))
    toy.cache.release(served(toy, 40, 41))
    asked = available(toy)
    assert asked == [17, 6, 5]
    if short is not None:
        asked[short] += 1
    pages = toy.cache.allocate(masks(*asked))
    toy.cache.check()
    if short is not None:
        assert pages is None
        assert available(toy) == [17, 6, 5], "an allocation that fails may evict, and makes nothing less available"
        return
    assert pages is not None
    assert available(toy) == [0, 0, 0]
    toy.cache.free(pages)
    toy.cache.release(lock)


def test_a_prefix_that_is_loaded_is_protected_until_it_is_there() -> None:
    toy = engine()
    over(toy.cache, toy.cache.backup(toy.run(prompt(toy, 1, 2, 3, 4))))
    toy.forget()
    assert available(toy) == [20, 8, 6]
    toy.cache.load(prompt(toy, 1, 2, 3, 4))
    assert counts(toy) == [(16, 0, 0, 4), (6, 0, 0, 2), (5, 0, 0, 1)]
    toy.cache.wait_all(1)
    assert counts(toy) == [(16, 4, 0, 0), (6, 2, 0, 0), (5, 1, 0, 0)]


def test_nothing_is_counted_after_reset() -> None:
    toy = engine()
    served(toy, 1, 2, 3, 4)
    toy.cache.reset()
    assert counts(toy) == [(20, 0, 0, 0), (8, 0, 0, 0), (6, 0, 0, 0)]

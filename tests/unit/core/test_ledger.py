"""The ledger: room for all before slots for any, and a check that sees wrong counts whatever is under way."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.cache import ToyEngine, toy_layout
from tests.support.operations import PAGE, SPANS, Stepped, engine, numbered_pages, over, present, serve, started, tokens
from unified_cache.controller import InlineWorkers
from unified_cache.core.errors import InputError, LockError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Pages, Slots, Tier
from unified_cache.core.slots import SlotAllocator
from unified_cache.core.window import SPAN_ALL
from unified_cache.tree import Lock, Match, RadixTree
from unified_cache.tree.check import check
from unified_cache.tree.node import Node
from unified_cache.tree.transfer import Transfer


class DecliningAllocator(SlotAllocator):
    """Hands out nothing, as an allocator may on one rank of several, however much is free."""

    def allocate(self, count: int) -> Slots | None:
        return None


@pytest.mark.parametrize("component", [0, 1])
def test_room_is_made_for_all_before_a_slot_is_handed_out_whoever_declines(component: int) -> None:
    """Equal trees stay equal: what is evicted does not depend on which allocator declines."""
    held: list[list[int]] = []
    for declines in (False, True):
        toy = engine()
        serve(toy, 6)
        serve(toy, 6, first=1000)
        ledger = toy.cache._ledger
        if declines:
            allocator = ledger._allocators[Tier.DEVICE][component]
            declining = DecliningAllocator(allocator.capacity)
            for name in SlotAllocator.__slots__:
                setattr(declining, name, object.__getattribute__(allocator, name))
            ledger._allocators[Tier.DEVICE][component] = declining
        free = [ledger.free_count(Tier.DEVICE, number) for number in range(2)]
        given = ledger.allocate_all(Tier.DEVICE, [(0, free[0] + 1), (1, free[1] + 3)])
        assert (given is None) == declines
        held.append([len(slots) for slots in check(ledger.tree)[:2]])
        if declines:
            assert [ledger.out_pages(Tier.DEVICE, number) for number in range(2)] == [0, 0]
            ledger.check()
    assert held[0] == held[1]
    assert held[0] != [12, 4], "something had to go"


@pytest.mark.parametrize("counts", [[(0, 3), (1, 8)], [(1, 8), (0, 3)]])
def test_where_pins_leave_too_little_for_one_nothing_is_evicted_or_handed_out_of_any(
    counts: list[tuple[int, int]],
) -> None:
    toy = engine()
    lock = toy.cache.lock(toy.cache.match(serve(toy, 6)))
    serve(toy, 6, first=1000)
    ledger = toy.cache._ledger
    held = [len(slots) for slots in check(ledger.tree)]
    assert held[:2] == [12, 4], "some of each would have to go"
    assert ledger.allocate_all(Tier.DEVICE, counts) is None
    assert [len(slots) for slots in check(ledger.tree)] == held
    assert [ledger.out_pages(Tier.DEVICE, number) for number in range(2)] == [0, 0]
    toy.cache.release(lock)


# ---- the check ---------------------------------------------------------------------------------------------------


def nodes(toy: ToyEngine) -> list[Node]:
    return list(toy.cache._ledger.tree.nodes())


def a_mark_lost(toy: ToyEngine) -> None:
    for node in nodes(toy):
        node.in_flight = None


def a_mark_too_many(toy: ToyEngine) -> None:
    for node in nodes(toy):
        for marks in (node.in_flight or {}).values():
            marks[:] = True


@pytest.mark.parametrize("mistake", [a_mark_lost, a_mark_too_many])
def test_wrong_marks_are_seen_while_a_transfer_is_under_way(mistake: Callable[[ToyEngine], None]) -> None:
    toy = engine(workers=Stepped())
    started(toy.cache.backup(serve(toy, 6)))
    toy.cache.check()
    mistake(toy)
    with pytest.raises(AssertionError):
        toy.cache.check()


# ---- transfers without room for all of a prompt --------------------------------------------------------------------


PAGES = 60


def conversation(*, device_windows: int, host_windows: int, backed_up: bool) -> ToyEngine:
    """Serve a conversation of sixty pages, a page a turn, each of which left a window to resume at."""
    sizes = (2 * PAGES, device_windows), (2 * PAGES, host_windows)
    toy = ToyEngine(toy_layout(SPANS, PAGE), *sizes, None, InlineWorkers())
    for end in range(1, PAGES + 1):
        prompt = toy.cache.prompt(tokens(end))
        lock = present(toy.serve(prompt))
        if backed_up:
            over(toy.cache, toy.cache.backup(prompt))
        toy.cache.release(lock)
    return toy


def take_windows(toy: ToyEngine, tier: Tier, *, all_but: int) -> None:
    """Have others hold all windows that a tier has room for but so many, which are free."""
    ledger = toy.cache._ledger
    taken = present(ledger.allocate(tier, 1, ledger.capacity(tier, 1)))
    ledger.free(tier, 1, taken[:all_but])


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the ends of all transfers that the tree has been asked to begin."""
    ends: list[int] = []
    begin = Transfer.begin

    def noted(tree: RadixTree, found: Match, end: int, source: Tier, target: Tier, *, at_once: bool) -> Transfer:
        ends.append(end)
        return begin(tree, found, end, source, target, at_once=at_once)

    monkeypatch.setattr(Transfer, "begin", noted)
    return ends


REACHED = {0: [], 1: [1], 2: [PAGES]}
"""By windows left: the ends begun. A window of one page is enough after one page alone."""


@pytest.mark.parametrize("windows_left", REACHED)
@pytest.mark.parametrize("loads", [True, False], ids=["load", "backup"])
def test_a_transfer_without_room_for_windows_begins_once_and_cuts_nothing(
    loads: bool, windows_left: int, begun: list[int]
) -> None:
    device_windows, host_windows = (8, 2 * PAGES) if loads else (2 * PAGES, 8)
    toy = conversation(device_windows=device_windows, host_windows=host_windows, backed_up=loads)
    take_windows(toy, Tier.DEVICE if loads else Tier.HOST, all_but=windows_left)
    cache, tree, prompt = toy.cache, toy.cache._ledger.tree, toy.cache.prompt(tokens(PAGES))
    begun.clear()
    nodes_count = len(list(tree.nodes()))
    operation = over(cache, cache.load(prompt) if loads else cache.backup(prompt))
    first = begun if loads else begun[:1]  # after that a backup begins at the other ends whose windows were kept
    assert first == REACHED[windows_left]
    assert (operation.error, len(list(tree.nodes()))) == (None, nodes_count)
    found = tree.match(prompt)
    assert (found.device_end if loads else found.full_end(Tier.HOST)) == sum(first)
    assert operation.pages_count == windows_left or not loads


def test_pages_that_are_there_already_are_no_room_for_those_to_come(begun: list[int]) -> None:
    """Of a prompt of six pages the device holds two, which could be evicted, and has room for two more."""
    toy = ToyEngine(toy_layout((SPAN_ALL,), PAGE), (6,), (6,), None, InlineWorkers())
    cache, prompt = toy.cache, serve(toy, 6)
    over(cache, cache.backup(prompt))
    ledger = cache._ledger
    taken = present(ledger.allocate(Tier.DEVICE, 0, 4))
    ledger.free(Tier.DEVICE, 0, taken[:2])
    assert (ledger.available_pages(Tier.DEVICE, 0), cache.match(prompt).device_end) == (4, 2)
    begun.clear()
    operation = over(cache, cache.load(prompt))
    assert (begun, operation.pages_count, cache.match(prompt).device_end) == ([4], 2, 4)
    cache.check()


# ---- pages that an engine can allocate, asked before it does -------------------------------------------------------


FULL, SWA, STATE = range(3)


def three_components() -> ToyEngine:
    """Make 20 pages of Full, 8 of a window of two pages, and 6 of one that needs the last page alone."""
    return ToyEngine(toy_layout((SPAN_ALL, 2, 1), PAGE), (20, 8, 6), (20, 8, 6), None, InlineWorkers())


def prompt_of(toy: ToyEngine, *pages: int) -> Prompt:
    return toy.cache.prompt(numbered_pages(*pages))


def served(toy: ToyEngine, *pages: int) -> Lock:
    return present(toy.serve(prompt_of(toy, *pages)))


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


def test_pages_are_free_or_evictable_or_protected_or_out() -> None:
    toy = three_components()
    lock = served(toy, 1, 2, 3, 4)
    assert counts(toy) == [(16, 0, 4, 0), (6, 0, 2, 0), (5, 0, 1, 0)]
    toy.cache.release(served(toy, 1, 2, 3, 4, 5, 6))
    assert counts(toy) == [(14, 2, 4, 0), (4, 2, 2, 0), (4, 1, 1, 0)], "a branch below a locked prefix can go"
    toy.cache.release(lock)
    assert counts(toy) == [(14, 6, 0, 0), (4, 4, 0, 0), (4, 2, 0, 0)]
    toy.cache.free(present(toy.cache.allocate(masks(20, 8, 6))))
    over(toy.cache, toy.cache.backup(toy.run(prompt_of(toy, 1, 2, 3, 4))))
    toy.forget()
    toy.cache.load(prompt_of(toy, 1, 2, 3, 4))
    assert counts(toy) == [(16, 0, 0, 4), (6, 0, 0, 2), (5, 0, 0, 1)], "on its way"
    toy.cache.wait_all(1)
    assert counts(toy) == [(16, 4, 0, 0), (6, 2, 0, 0), (5, 1, 0, 0)]
    toy.cache.reset()
    assert counts(toy) == [(20, 0, 0, 0), (8, 0, 0, 0), (6, 0, 0, 0)]


def test_windows_released_by_a_running_request_are_evictable_while_full_stays_pinned() -> None:
    toy = three_components()
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
    toy = three_components()
    lock = served(toy, 1, 2, 3)
    toy.cache.release_windows(lock)
    with pytest.raises(InputError, match="released its windows"):
        toy.cache.fork(lock)
    longer = prompt_of(toy, 1, 2, 3, 4, 5)
    pages = present(toy.cache.allocate(toy.cache.pages_to_allocate(3, 5, [5])))
    for component, slots in enumerate(pages):
        toy.write_pages(component, slots, longer, 3)
    renewed = toy.cache.insert(longer, pages, lock)
    assert toy.verify(longer, renewed) == 5 + 2 + 1
    toy.cache.release(renewed)
    toy.cache.check()

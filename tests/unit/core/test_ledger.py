"""The ledger: room for all before slots for any, and a check that sees wrong counts whatever is under way."""

from collections.abc import Callable

import pytest

from tests.support.cache import ToyEngine
from tests.support.operations import Stepped, engine, serve, started
from unified_cache.core.pool import Slots, Tier
from unified_cache.core.slots import SlotAllocator
from unified_cache.tree.node import Node


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
        held.append([len(slots) for slots in ledger.tree.check()[:2]])
        if declines:
            assert [ledger.out_pages(Tier.DEVICE, number) for number in range(2)] == [0, 0]
            ledger.check()
    assert held[0] == held[1]
    assert held[0] != [12, 4], "something had to go"


def test_where_pins_leave_too_little_for_one_nothing_is_handed_out_of_any() -> None:
    toy = engine()
    prompt = serve(toy, 6)
    lock = toy.cache.lock(toy.cache.match(prompt))
    ledger = toy.cache._ledger
    assert ledger.allocate_all(Tier.DEVICE, [(0, 3), (1, 8)]) is None
    assert [ledger.out_pages(Tier.DEVICE, number) for number in range(2)] == [0, 0]
    toy.cache.release(lock)
    toy.cache.check()


@pytest.mark.parametrize("counts", [[(0, 3), (1, 8)], [(1, 8), (0, 3)]])
def test_where_pins_leave_too_little_for_one_nothing_is_evicted_for_any(counts: list[tuple[int, int]]) -> None:
    toy = engine()
    lock = toy.cache.lock(toy.cache.match(serve(toy, 6)))
    serve(toy, 6, first=1000)
    ledger = toy.cache._ledger
    held = [len(slots) for slots in ledger.tree.check()]
    assert held[:2] == [12, 4], "some of each would have to go"
    assert ledger.allocate_all(Tier.DEVICE, counts) is None
    assert [len(slots) for slots in ledger.tree.check()] == held
    toy.cache.release(lock)


# ---- the check ---------------------------------------------------------------------------------------------------


def nodes(toy: ToyEngine) -> list[Node]:
    return list(toy.cache._ledger.tree._state.nodes())


def a_lock_too_many(toy: ToyEngine) -> None:
    nodes(toy)[-1].locks[1] += 1


def a_lock_lost(toy: ToyEngine) -> None:
    held = next(node for node in nodes(toy) if node.locks[0])
    held.locks[0] -= 1


def a_mark_lost(toy: ToyEngine) -> None:
    for node in nodes(toy):
        node.in_flight = None


def a_mark_too_many(toy: ToyEngine) -> None:
    for node in nodes(toy):
        for marks in (node.in_flight or {}).values():
            marks[:] = True


@pytest.mark.parametrize("mistake", [a_lock_too_many, a_lock_lost, a_mark_lost, a_mark_too_many])
def test_wrong_locks_and_marks_are_seen_while_a_transfer_is_under_way(mistake: Callable[[ToyEngine], None]) -> None:
    toy = engine(workers=Stepped())
    prompt = serve(toy, 6)
    lock = toy.cache.lock(toy.cache.match(prompt))
    started(toy.cache.backup(prompt))
    toy.cache.check()
    mistake(toy)
    with pytest.raises(AssertionError):
        toy.cache.check()
    assert lock.end == 6

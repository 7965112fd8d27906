"""Slot allocators."""

import numpy as np
import pytest

from tests.support.operations import present
from unified_cache.core.errors import ConfigError, SlotError
from unified_cache.core.slots import SlotAllocator


def test_a_pool_of_n_pages_hands_out_n_slots_and_never_the_padding_slot() -> None:
    slots = present(SlotAllocator(5).allocate(5))
    assert slots.tolist() == [1, 2, 3, 4, 5]


def test_asking_for_more_than_is_free_hands_out_nothing() -> None:
    allocator = SlotAllocator(5)
    assert allocator.allocate(6) is None
    assert allocator.free_count == 5


def test_freed_slots_are_handed_out_again() -> None:
    allocator = SlotAllocator(4)
    first = present(allocator.allocate(4))
    allocator.free(first[1:3])
    again = present(allocator.allocate(2))
    assert sorted(again.tolist()) == [2, 3]
    assert allocator.free_count == 0


@pytest.mark.parametrize("bad", [[0], [5], [-1], [3], [1, 1], [2, 1, 2]])
def test_freeing_what_is_not_handed_out_or_twice_is_an_error_and_frees_nothing(bad: list[int]) -> None:
    allocator = SlotAllocator(4)
    allocator.allocate(2)
    with pytest.raises(SlotError):
        allocator.free(np.array(bad, np.int32))
    assert allocator.out_count == 2
    rest = present(allocator.allocate(2))
    assert sorted(rest.tolist()) == [3, 4]


@pytest.mark.parametrize("count", [64, 65, 300])
def test_a_slot_named_twice_among_many_is_an_error_in_any_order(count: int) -> None:
    allocator = SlotAllocator(count)
    taken = present(allocator.allocate(count))
    shuffled = np.random.default_rng(count).permutation(taken)
    shuffled[-1] = shuffled[0]
    for twice in (shuffled, np.sort(shuffled)):
        with pytest.raises(SlotError, match="a slot is named twice in one call"):
            allocator.free(twice)
    assert allocator.out_count == count
    allocator.free(np.random.default_rng(count).permutation(taken))
    assert allocator.free_count == count


def test_what_is_out_among_slots_is_neither_free_nor_kept() -> None:
    allocator = SlotAllocator(6)
    taken = present(allocator.allocate(5))
    allocator.keep(taken[:2])
    allocator.free(taken[3:4])
    assert allocator.out_among(np.array([5, 4, 3, 2, 1], np.int32)).tolist() == [5, 3]


def test_a_negative_pool_is_an_error() -> None:
    with pytest.raises(ConfigError, match="-1"):
        SlotAllocator(-1)


def test_a_slot_is_out_until_it_is_kept_and_comes_back_only_from_who_has_it() -> None:
    allocator = SlotAllocator(3)
    taken = present(allocator.allocate(2))
    assert allocator.is_out(taken)
    for stranger in (0, 3, 4):
        assert not allocator.is_out(np.array([stranger], np.int32))
    allocator.keep(taken[:1])
    assert (allocator.is_kept(taken[:1]), allocator.is_out(taken[:1])) == (True, False)
    assert (allocator.out_count, allocator.free_count) == (1, 1)
    with pytest.raises(SlotError, match="slot 1 is the tree's, not out"):
        allocator.free(taken)
    with pytest.raises(SlotError, match="slot 2 is out, not the tree's"):
        allocator.drop(taken)
    allocator.drop(taken[:1])
    allocator.free(taken[1:])
    assert (allocator.out_count, allocator.free_count) == (0, 3)
    assert allocator.is_out(np.empty(0, np.int32))

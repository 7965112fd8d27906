"""Full slots, their SWA slots and the map between them: rules R1 to R17 that SGLang 0.5.23 keeps, in pages.

Where a rule's numbers are tokens, the comment says which; a page of 4 tokens with slot n has the locs [4n, 4n + 4).
"""

import numpy as np
import pytest

from tests.support.components import toy_components
from tests.support.operations import present
from unified_cache.controller.ledger import Ledger
from unified_cache.core.errors import ConfigError, SlotError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout, Pages, Slots, Tier
from unified_cache.core.slots import PairedAllocator, SlotAllocator
from unified_cache.core.window import SPAN_ALL

PAGE = 4
FULL, SWA = range(2)


def slots(*values: int) -> Slots:
    return np.array(values, np.int32)


class Pool:
    """A ledger of Full and a window of two pages, and what a request does with its slots."""

    def __init__(self, full: int, swa: int) -> None:
        layout = ModelLayout(PAGE, toy_components((SPAN_ALL, 2)))
        self.ledger = Ledger(layout, ((full, swa), (full, swa)))
        assert self.ledger.paired is not None
        self.paired: PairedAllocator = self.ledger.paired
        self.map = self.paired.map

    def masks(self, count: int, tail_count: int) -> list[Pages]:
        """Ask for Full of so many pages, and for SWA of the last of them."""
        return [np.ones(count, np.bool_), np.arange(count) >= count - tail_count]

    def allocate(self, count: int, tail_count: int | None = None) -> list[Slots]:
        return present(self.ledger.allocate_pages(self.masks(count, count if tail_count is None else tail_count)))

    def trim(self, pages: list[Slots], tail_count: int) -> None:
        """Give back the SWA slots of all but the last pages."""
        self.ledger.trim_pages(pages, self.masks(len(pages[FULL]), tail_count))

    def free_counts(self) -> tuple[int, int]:
        return self.ledger.free_count(Tier.DEVICE, FULL), self.ledger.free_count(Tier.DEVICE, SWA)

    def peers(self, *full: int) -> list[int]:
        return [int(peer) for peer in self.map.peers(slots(*full))]

    def unchanged(self) -> object:
        return self.free_counts(), self.map.version, self.map.table.tolist()


def prompt(pages: int, first: int = 0) -> Prompt:
    return Prompt.of(np.arange(first, first + pages * PAGE), PAGE)


def test_a_map_is_changed_in_place_and_counts_its_changes_r1() -> None:
    # Full 8, page 1: [0] * 9 + [-1]. Full 32 tokens in pages of 4, length 37 per token, is the same map.
    pool = Pool(8, 8)
    table, versions = pool.map.table, [pool.map.version]
    assert (table.tolist(), str(table.dtype), pool.peers(-1)) == ([0] * 9 + [-1], "int32", [-1])
    pages = pool.allocate(4)
    versions.append(pool.map.version)
    pool.trim(pages, 2)
    versions.append(pool.map.version)
    assert table.tolist() == [0, 0, 0, 3, 4, 0, 0, 0, 0, -1]
    pool.map.clear()
    versions.append(pool.map.version)
    assert table.tolist() == [0] * 9 + [-1]
    assert pool.map.table is table
    assert len(set(versions)) == 4


def test_allocation_is_both_or_nothing_r3() -> None:
    # Full 8, SWA 4, page 1.
    pool = Pool(8, 4)
    assert [found.tolist() for found in pool.allocate(3)] == [[1, 2, 3], [1, 2, 3]]
    assert pool.map.table.tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 0, -1]
    before = pool.unchanged()
    assert pool.ledger.allocate_pages(pool.masks(2, 2)) is None
    assert pool.ledger.allocate_pages(pool.masks(6, 0)) is None
    assert pool.unchanged() == before


def test_full_alone_is_freed_only_without_a_peer_r9() -> None:
    pool = Pool(8, 4)
    pool.trim(pool.allocate(4), 2)
    with pytest.raises(SlotError, match="slot 3 still has a peer"):
        pool.ledger.free(Tier.DEVICE, FULL, slots(1, 2, 3))
    assert pool.free_counts() == (4, 2)
    pool.ledger.free(Tier.DEVICE, FULL, slots(1, 2))
    assert pool.free_counts() == (6, 2)


# ---- one allocator -------------------------------------------------------------------------------------------------


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

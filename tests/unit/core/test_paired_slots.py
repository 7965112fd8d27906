"""Full slots, their SWA slots and the map between them: rules R1 to R13 that SGLang 0.5.23 keeps, in pages.

Where a rule's numbers are tokens, the comment says which; a page of 4 tokens with slot n has the locs [4n, 4n + 4).
"""

import numpy as np
import pytest

from unified_cache.errors import SlotError
from unified_cache.pool import Slots
from unified_cache.slots import PageMap, PairedAllocator, ReleaseGroup, SlotAllocator


def slots(*values: int) -> Slots:
    return np.array(values, np.int32)


def paired(full: int, peer: int) -> PairedAllocator:
    return PairedAllocator(SlotAllocator(full), SlotAllocator(peer))


def allocate(allocator: PairedAllocator, count: int, tail_count: int | None = None) -> tuple[list[int], list[int]]:
    taken = allocator.allocate(count, count if tail_count is None else tail_count)
    assert taken is not None
    return taken[0].tolist(), taken[1].tolist()


def free_counts(allocator: PairedAllocator) -> tuple[int, int]:
    return allocator.full.free_count, allocator.peer.free_count


def peers(allocator: PairedAllocator, *full: int) -> list[int]:
    return [int(peer) for peer in allocator.map.peers(slots(*full))]


def locs(row: list[int], start: int, end: int, page_size: int) -> list[int]:
    return [row[token // page_size] * page_size + token % page_size for token in range(start, end)]


def test_a_map_of_8_pages_has_9_zeros_and_a_minus_one_r1() -> None:
    # Full 8, page 1: [0] * 9 + [-1]. Full 32 tokens in pages of 4, length 37 per token, is the same map.
    page_map = PageMap(8)
    assert page_map.table.tolist() == [0] * 9 + [-1]
    assert page_map.table.dtype == np.int32
    assert page_map.peers(slots(-1)).tolist() == [-1]


def test_the_map_is_changed_in_place_and_never_replaced_r1() -> None:
    allocator = paired(8, 8)
    table = allocator.map.table
    allocate(allocator, 4)
    allocator.free_peers(slots(1))
    allocator.free(slots(2))
    allocator.map.bind(slots(1), allocator.take_peers(slots(3)))
    assert table.tolist() == [0, 3, 0, 0, 4, 0, 0, 0, 0, -1]
    allocator.map.clear()
    assert table.tolist() == [0] * 9 + [-1]
    assert allocator.map.table is table


def test_every_change_of_the_map_is_counted_r1() -> None:
    page_map = PageMap(4)
    versions = [page_map.version]
    page_map.bind(slots(1), slots(2))
    versions.append(page_map.version)
    page_map.unbind(slots(1))
    versions.append(page_map.version)
    page_map.clear()
    versions.append(page_map.version)
    assert len(set(versions)) == 4
    page_map.peers(slots(1))
    assert page_map.version == versions[-1]


def test_the_sink_is_handed_out_on_neither_side_r2() -> None:
    full, swa = allocate(paired(6, 6), 6)
    assert 0 not in full
    assert 0 not in swa


def test_a_page_without_a_peer_has_none_to_free_r2() -> None:
    allocator = paired(8, 4)
    full, _ = allocate(allocator, 3, 1)
    assert allocator.take_peers(slots(*full[:2])).tolist() == []
    assert allocator.free_peers(slots(*full)) == 1
    assert free_counts(allocator) == (5, 4)


def test_allocation_is_both_or_nothing_r3() -> None:
    # Full 8, SWA 4, page 1.
    allocator = paired(8, 4)
    assert allocate(allocator, 3) == ([1, 2, 3], [1, 2, 3])
    assert allocator.map.table.tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 0, -1]
    version = allocator.map.version
    assert allocator.allocate(2, 2) is None
    assert allocator.allocate(6, 0) is None
    assert free_counts(allocator) == (5, 1)
    assert allocator.map.version == version


def test_ids_diverge_as_soon_as_one_side_frees_r4() -> None:
    # R4 names SWA slots [4, 1], from a queue; a stack gives the freed ones first. Either way they are not [4, 5].
    allocator = paired(8, 4)
    allocate(allocator, 3)
    allocator.free_peers(slots(1, 2))
    assert allocator.map.table.tolist()[:4] == [0, 0, 0, 3]
    assert free_counts(allocator) == (5, 3)
    assert allocate(allocator, 2) == ([4, 5], [1, 2])
    assert peers(allocator, 1, 2, 3, 4, 5) == [0, 0, 3, 1, 2]


def test_peers_need_not_ascend_r4() -> None:
    allocator = paired(8, 4)
    allocate(allocator, 3)
    allocator.free_peers(slots(1))
    allocator.free_peers(slots(2))
    assert allocate(allocator, 2) == ([4, 5], [2, 1])


def test_a_full_page_has_one_peer_at_equal_offsets_however_it_is_filled_r5() -> None:
    # Pages of 4: 0 -> 10 takes 3 + 3 pages, 10 -> 13 goes on at 14, 15 and then 16, and 13 -> 14 is 17.
    allocator = paired(8, 8)
    full, swa = allocate(allocator, 3)
    assert free_counts(allocator) == (5, 5)
    more_full, more_swa = allocate(allocator, 1)
    full, swa = full + more_full, swa + more_swa
    assert locs(full, 10, 13, 4) == [14, 15, 16]
    assert locs(full, 13, 14, 4) == [17]
    assert locs(peers(allocator, *full), 0, 14, 4) == locs(swa, 0, 14, 4)


def test_a_tail_allocation_maps_the_last_pages_and_unmaps_the_others_r6() -> None:
    # 0 -> 12, tail 4, full 32, SWA 16, pages of 4: Full 4 .. 15, map [0] * 8 + [4 .. 7], free (20, 12).
    allocator = paired(8, 4)
    assert allocate(allocator, 3, 1) == ([1, 2, 3], [1])
    assert peers(allocator, 1, 2, 3) == [0, 0, 1]
    assert free_counts(allocator) == (5, 3)


@pytest.mark.parametrize("tail_count", [-1, 4])
def test_a_tail_longer_than_the_pages_or_negative_is_an_error_r6(tail_count: int) -> None:
    allocator = paired(8, 8)
    with pytest.raises(SlotError, match="tail_count"):
        allocator.allocate(3, tail_count)
    assert free_counts(allocator) == (8, 8)


@pytest.mark.parametrize("tail_count", [0, 1, 2, 4])
def test_pages_that_come_again_do_not_bring_their_old_peers_r6(tail_count: int) -> None:
    # sglang #25805: recycled Full pages kept a former request's peers, and freeing them freed another's.
    allocator = paired(4, 4)
    full, _ = allocate(allocator, 4)
    allocator.free(slots(*full))
    full, _ = allocate(allocator, 4, tail_count)
    assert [peer > 0 for peer in peers(allocator, *full)] == [False] * (4 - tail_count) + [True] * tail_count
    allocator.free(slots(*full))
    assert free_counts(allocator) == (4, 4)
    assert sorted(allocate(allocator, 4)[1]) == [1, 2, 3, 4]


def test_freeing_peers_keeps_full_and_can_be_repeated_without_freeing_twice_r8() -> None:
    allocator = paired(8, 4)
    allocate(allocator, 4)
    assert allocator.free_peers(slots(1, 2)) == 2
    assert allocator.free_peers(slots(1, 2)) == 0
    assert peers(allocator, 1, 2, 3, 4) == [0, 0, 3, 4]
    assert free_counts(allocator) == (4, 2)
    assert allocator.full.is_out(slots(1, 2))
    assert sorted(allocate(allocator, 2)[1]) == [1, 2]


def test_full_alone_is_freed_only_without_a_peer_r9() -> None:
    allocator = paired(8, 4)
    allocate(allocator, 4)
    allocator.free_peers(slots(1, 2))
    with pytest.raises(SlotError, match="slot 3 still has a peer"):
        allocator.free_full(slots(1, 2, 3))
    assert free_counts(allocator) == (4, 2)
    allocator.free_full(slots(1, 2))
    assert free_counts(allocator) == (6, 2)


def test_a_finished_request_frees_what_left_the_window_full_only_and_the_rest_both_sides_r9() -> None:
    allocator = paired(8, 8)
    full, _ = allocate(allocator, 5)
    evicted_end = 2
    allocator.free_peers(slots(*full[:evicted_end]))
    allocator.free_full(slots(*full[:evicted_end]))
    allocator.free(slots(*full[evicted_end:]))
    assert free_counts(allocator) == (8, 8)
    assert allocator.map.table.tolist() == [0] * 9 + [-1]


def test_freeing_both_sides_skips_pages_without_a_peer_r9() -> None:
    allocator = paired(8, 4)
    full, _ = allocate(allocator, 5, 2)
    allocator.free(slots(*full))
    assert free_counts(allocator) == (8, 4)


def test_freeing_what_is_not_handed_out_changes_nothing_r9() -> None:
    allocator = paired(8, 4)
    allocate(allocator, 2)
    before = allocator.map.table.copy()
    with pytest.raises(SlotError):
        allocator.free(slots(1, 3))
    assert free_counts(allocator) == (6, 2)
    assert np.array_equal(allocator.map.table, before)


def test_a_group_frees_the_peers_of_when_it_was_asked_r10() -> None:
    # Pages A, B and two more of 4 tokens: free_swa(A), then B's peers move to A; at the end A -> [8 .. 11], which is
    # page 2, and SWA pages [1, 3, 4] are free (resolving at the end would free 2, which is A's now).
    allocator = paired(8, 4)
    allocate(allocator, 2)
    group = ReleaseGroup(allocator)
    assert group.free_peers(slots(1)) == 1
    allocator.map.bind(slots(1), allocator.take_peers(slots(2)))
    assert free_counts(allocator) == (6, 2)
    group.flush()
    assert peers(allocator, 1, 2) == [2, 0]
    assert free_counts(allocator) == (6, 3)
    assert sorted(allocate(allocator, 3)[1]) == [1, 3, 4]


def test_what_a_group_holds_is_nobody_elses_until_it_is_flushed_r10() -> None:
    allocator = paired(2, 2)
    allocate(allocator, 2)
    group = ReleaseGroup(allocator)
    group.free(slots(1))
    group.free_peers(slots(2))
    group.free_full(slots(2))
    assert free_counts(allocator) == (0, 0)
    assert allocator.allocate(1, 1) is None
    assert peers(allocator, 1, 2) == [0, 0]
    group.flush()
    assert free_counts(allocator) == (2, 2)
    group.flush()
    assert free_counts(allocator) == (2, 2)


@pytest.mark.parametrize("bad", [(1, 1), (5,), (0,), (-1,), (3,)])
def test_a_group_refuses_what_is_not_ours_or_released_already_and_changes_nothing_r10(bad: tuple[int, ...]) -> None:
    allocator = paired(4, 4)
    allocate(allocator, 3)
    group = ReleaseGroup(allocator)
    group.free(slots(3))
    before = allocator.map.table.copy()
    for release in (group.free_peers, group.free, group.free_full):
        with pytest.raises(SlotError):
            release(slots(*bad))
    assert np.array_equal(allocator.map.table, before)
    group.flush()
    assert free_counts(allocator) == (2, 2)


def test_a_group_refuses_full_alone_that_has_a_peer_r10() -> None:
    allocator = paired(4, 4)
    allocate(allocator, 1)
    with pytest.raises(SlotError, match="still has a peer"):
        ReleaseGroup(allocator).free_full(slots(1))


def test_a_full_slot_bound_again_after_its_release_is_an_error_and_frees_nothing_r10() -> None:
    allocator = paired(4, 4)
    allocate(allocator, 2)
    group = ReleaseGroup(allocator)
    group.free(slots(1))
    allocator.map.bind(slots(1), allocator.take_peers(slots(2)))
    with pytest.raises(SlotError, match="slot 1 still has a peer"):
        group.flush()
    assert free_counts(allocator) == (2, 2)


def test_a_tombstone_frees_by_its_full_slots_and_skips_those_without_a_peer_r11() -> None:
    allocator = paired(8, 8)
    node, _ = allocate(allocator, 4, 2)
    assert allocator.free_peers(slots(*node)) == 2
    assert free_counts(allocator) == (4, 8)
    assert peers(allocator, *node) == [0, 0, 0, 0]
    assert allocator.full.is_out(slots(*node))


def test_a_locked_hole_takes_the_incoming_peers_and_keeps_its_full_slots_r13() -> None:
    # Kept [4 .. 7] -> 0, incoming [8 .. 11] -> [4 .. 7]; after: kept -> [4 .. 7], incoming -> 0, free (28, 12).
    allocator = paired(8, 4)
    kept, _ = allocate(allocator, 1, 0)
    incoming, _ = allocate(allocator, 1)
    assert (kept, incoming, peers(allocator, *incoming)) == ([1], [2], [1])
    allocator.map.bind(slots(*kept), allocator.take_peers(slots(*incoming)))
    allocator.free_full(slots(*incoming))
    assert peers(allocator, 1, 2) == [1, 0]
    assert free_counts(allocator) == (7, 3)


def test_a_recovered_hole_leaves_a_slot_that_went_to_somebody_else_alone_r13() -> None:
    # sglang #27586: recovery freed the old base through a stale entry that named another's live slot.
    allocator = paired(4, 1)
    kept, _ = allocate(allocator, 1)
    allocator.free_peers(slots(*kept))
    other, others_peer = allocate(allocator, 1)
    assert others_peer == [1]
    assert allocator.free_peers(slots(*kept)) == 0
    assert peers(allocator, *kept, *other) == [0, 1]
    assert free_counts(allocator) == (2, 0)


@pytest.mark.parametrize("tail_count", [0, 1, 3])
def test_a_load_gets_new_slots_on_both_sides_and_maps_them_r17(tail_count: int) -> None:
    # Full N [4 .. 15], SWA S [4 .. 7] -> map[N] = [0] * 8 + [4 .. 7]: three pages of which one is in the window.
    allocator = paired(8, 4)
    full, swa = allocate(allocator, 3, tail_count)
    assert peers(allocator, *full) == [0] * (3 - tail_count) + swa
    if tail_count == 1:
        assert (full, swa) == ([1, 2, 3], [1])


def test_a_load_of_swa_alone_keeps_full_and_binds_it_anew_r17() -> None:
    allocator = paired(8, 4)
    full, first = allocate(allocator, 2)
    allocator.free_peers(slots(*full))
    allocate(allocator, 1)
    loaded = allocator.peer.allocate(2)
    assert loaded is not None
    allocator.map.bind(slots(*full), loaded)
    assert peers(allocator, *full) == loaded.tolist()
    assert loaded.tolist() != first


def test_freeing_below_the_floor_of_a_load_never_frees_the_sink_r17() -> None:
    allocator = paired(8, 4)
    full, _ = allocate(allocator, 3, 1)
    assert allocator.free_peers(slots(*full[:2])) == 0
    assert free_counts(allocator) == (5, 3)
    assert 0 not in allocate(allocator, 3)[1]


@pytest.mark.parametrize("twice", [[1, 1], [2, 1, 2]])
def test_a_slot_named_twice_is_refused_before_anything_is_freed_a5(twice: list[int]) -> None:
    allocator = PairedAllocator(SlotAllocator(4), SlotAllocator(4))
    allocator.allocate(3, 3)
    before = allocator.map.table.copy()
    for release in (allocator.free_peers, allocator.free):
        with pytest.raises(SlotError, match="twice"):
            release(np.array(twice, np.int32))
        assert (allocator.map.table == before).all()
        assert (allocator.full.free_count, allocator.peer.free_count) == (1, 1)


def test_no_slot_stays_no_slot_whatever_is_freed_r2() -> None:
    allocator = PairedAllocator(SlotAllocator(4), SlotAllocator(4))
    assert allocator.free_peers(np.array([-1], np.int32)) == 0
    assert allocator.map.table[-1] == -1

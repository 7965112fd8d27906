"""Free slots of packed files, and the room that they keep."""

import errno
import gc
import os
import shutil
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.files import FaultyDisk, descriptors, held, put, refuses
from tests.unit.storage_backends.packed.conftest import SLOT_BYTES, TAKEN_BYTES, opened, packs, slots
from unified_cache.storage_backends.packed.segment import BLOCK_BYTES, SegmentKey
from unified_cache.storage_backends.packed.segments import EMPTY_FILES_MAX, IDLE_BYTES_MAX
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Level, PageIO
from unified_cache.testing.storage_contract import PAGE_BYTES, blank_page, label, sealed_page

IDENTITY = b"i" * 32
LARGE_BYTES = 4 << 20


@pytest.mark.parametrize("object_bytes", [0, 1, 127, 1128, 32_767, 32_768, 100_000, 1 << 22, 5 << 30])
def test_slots_have_room_for_their_page_and_waste_less_than_an_eighth_of_what_is_large(object_bytes: int) -> None:
    shape = SegmentKey(IDENTITY, "kv", object_bytes)
    assert object_bytes <= shape.slot_bytes <= max(object_bytes * 9 // 8, object_bytes + 128)
    assert shape.slot_bytes % (BLOCK_BYTES if object_bytes >= 8 * BLOCK_BYTES else 1) == 0
    assert shape.slots_count >= 1


# Room on the disk


def room_bytes(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in root.rglob("*"))


class MeasuredDisk(FaultyDisk):
    """A disk that has so much room."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__()
        self.free_bytes = free_bytes

    def fstatvfs(self, fd: int) -> os.statvfs_result:
        """Count in bytes."""
        return os.statvfs_result((1, 1, 1 << 40, 0, self.free_bytes, 0, 0, 0, 0, 255))


def test_the_free_space_floor_evicts_and_then_declines_the_last_pages_of_a_batch(root: Path) -> None:
    disk = MeasuredDisk(1 << 30)
    with closing(opened(root, disk=disk, free_bytes_min=1 << 20)) as storage:
        put(storage, [0])
        disk.free_bytes = (1 << 20) + 2 * SLOT_BYTES
        assert put(storage, range(1, 5)) == [True, True, True, False]
        assert (held(storage, 5), storage.bytes_used) == ([1, 2, 3], 3 * TAKEN_BYTES)
        disk.free_bytes = 0
        assert put(storage, [1, 5, 2]) == [True, False, True]
        assert storage.counts.declined_count == 2


def test_the_free_space_floor_counts_room_that_free_slots_keep(root: Path) -> None:
    disk = MeasuredDisk(1 << 30)
    with closing(opened(root, disk=disk, free_bytes_min=1 << 20)) as storage:
        put(storage, range(3))
        storage.remove([label(0), label(1)])
        disk.free_bytes = 1 << 20
        assert put(storage, range(3, 6)) == [True] * 3
        assert storage.counts.evicted_count == 1


def test_the_free_space_floor_counts_no_room_of_slots_in_which_the_page_has_no_place(root: Path) -> None:
    disk = MeasuredDisk(1 << 30)
    with closing(opened(root, disk=disk, free_bytes_min=1 << 20)) as storage:
        storage.put([sealed_page(label(number), 3000) for number in range(3)], Level.CACHED)
        storage.remove([label(0), label(1)])
        disk.free_bytes = 1 << 20
        assert put(storage, [3]) == [False]


def test_the_free_space_floor_counts_no_room_that_was_given_back_before_a_restart(root: Path) -> None:
    disk = MeasuredDisk(1 << 30)
    with closing(opened(root, disk=disk)) as storage:
        put(storage, range(5))
        storage.remove([label(number) for number in range(4)])
    disk.free_bytes = 1 << 20
    with closing(opened(root, disk=disk, free_bytes_min=1 << 20)) as storage:
        assert put(storage, [5]) == [True]
        assert storage.counts.evicted_count == 1


def test_a_page_stored_while_another_put_of_it_is_declined_is_counted(root: Path) -> None:
    def fill(_fd: int) -> None:
        """Fill the disk as somebody else has stored the page."""
        if disk.free_bytes == 1 << 21:
            disk.free_bytes = 1 << 30
            assert put(storage, [1]) == [True]
            disk.free_bytes = 0

    disk = MeasuredDisk(1 << 30)
    disk.before["fstatvfs"] = fill
    with closing(opened(root, pages_max=1, disk=disk, free_bytes_min=1 << 20)) as storage:
        disk.free_bytes = 1 << 21
        put(storage, [1])
        assert storage.bytes_used == TAKEN_BYTES * len(held(storage, 2))


def test_room_beyond_what_free_slots_may_keep_goes_back_to_the_file_system(root: Path) -> None:
    page = memoryview(bytearray(LARGE_BYTES))
    pages = [PageIO(label(number), (page,)) for number in range(IDLE_BYTES_MAX // LARGE_BYTES + 4)]
    with closing(opened(root)) as storage:
        storage.put(pages, Level.CACHED)
        full_bytes = room_bytes(root)
        storage.remove([page.label for page in pages[:-4]])
        assert room_bytes(root) == full_bytes > IDLE_BYTES_MAX
        storage.remove([pages[-4].label])
        assert room_bytes(root) < 4 * LARGE_BYTES
        assert all(storage.get(pages[-3:]))
        storage.remove([pages[-3].label])
    assert room_bytes(root) < 3 * LARGE_BYTES
    with closing(opened(root)) as storage:
        assert all(storage.get(pages[-2:]))
        storage.remove([page.label for page in pages])
    assert packs(root) == []


def test_room_of_slots_that_a_killed_process_had_freed_goes_back_when_the_store_is_opened(root: Path) -> None:
    pages = [PageIO(label(number), (memoryview(b"x" * LARGE_BYTES),)) for number in range(4)]
    killed = root.parent / "killed"
    with closing(opened(root)) as storage:
        storage.put(pages, Level.CACHED)
        storage.remove([page.label for page in pages[:3]])
        shutil.copytree(root, killed)
    opened(killed).close()
    assert room_bytes(killed) < 2 * LARGE_BYTES


def test_a_file_all_of_whose_slots_are_free_is_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.storage_backends.packed.segment.SLOTS_MAX", 4)
    monkeypatch.setattr("unified_cache.storage_backends.packed.segments.IDLE_BYTES_MAX", 4 * SLOT_BYTES - 1)
    with closing(opened(root)) as storage:
        put(storage, range(10))
        assert packs(root) == [f"kv.{PAGE_BYTES}.{number}.pack" for number in (1, 2, 3)]
        storage.remove([label(number) for number in (4, 5, 6, 0)])
        assert len(packs(root)) == 3
        storage.remove([label(7)])
        storage.remove([label(number) for number in (1, 2, 3)])
        assert packs(root) == [f"kv.{PAGE_BYTES}.3.pack"]
        put(storage, range(20, 24))
        assert packs(root) == [f"kv.{PAGE_BYTES}.{number}.pack" for number in (1, 3)]
        assert held(storage, 24) == [8, 9, 20, 21, 22, 23]
        assert len(descriptors(root)) == 2 + 4


def test_a_hole_is_made_once_whoever_opens_the_store_how_often(root: Path) -> None:
    object_bytes = 2 * BLOCK_BYTES
    pages = [sealed_page(label(number), object_bytes) for number in range(32)]
    with closing(PackedStorage.open(root)) as storage:
        storage.put(pages, Level.CACHED)
        storage.remove([page.label for page in pages[::2]])
    for removed_count in (0, 1):
        disk = FaultyDisk()
        with closing(PackedStorage.open(root, disk=disk)) as storage:
            storage.remove([page.label for page in pages[1 : 1 + removed_count]])
        assert disk.calls.count("punch") == removed_count
    with closing(PackedStorage.open(root)) as storage:
        assert all(storage.put(pages, Level.CACHED))
        assert all(storage.get([blank_page(page.label, object_bytes) for page in pages]))


def test_slots_are_used_again_the_lowest_first(storage: PackedStorage) -> None:
    put(storage, range(10))
    storage.remove([label(number) for number in (7, 2, 4)])
    put(storage, [10])
    put(storage, [11, 12, 13])
    assert slots(storage, range(10, 14)) == [(1, 2), (1, 4), (1, 7), (1, 10)]


def test_where_no_hole_can_be_made_slots_are_used_again_all_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.storage_backends.packed.segments.IDLE_BYTES_MAX", 3 * SLOT_BYTES)
    for turn in range(3):
        with closing(opened(root, disk=FaultyDisk(before={"punch": refuses(errno.EOPNOTSUPP)}))) as storage:
            put(storage, range(10))
            length = next(root.glob("*/*.pack")).stat().st_size
            for number in range(10, 30):
                storage.remove([label(number % 9), label(number % 9 + 1)])
                assert put(storage, [number % 9, number % 9 + 1]) == [True, True]
                assert all(storage.get([blank_page(label(n)) for n in range(10)]))
            assert next(root.glob("*/*.pack")).stat().st_size == length, turn
            storage.remove([label(number) for number in range(1, 9)])
    with closing(opened(root)) as storage:
        assert held(storage, 10) == [0, 9]


def many_shapes(count: int, pages_count: int = 1) -> list[list[PageIO]]:
    """Return pages of so many pools, some of each."""
    return [[sealed_page(label(number, f"p{pool}")) for number in range(pages_count)] for pool in range(count)]


def test_a_file_costs_the_memory_of_its_pages_and_not_of_its_slots(storage: PackedStorage) -> None:
    put(storage, [0])
    gc.collect()
    tracemalloc.start()
    try:
        for pages in many_shapes(32):
            assert all(storage.put(pages, Level.CACHED))
        assert tracemalloc.get_traced_memory()[0] < 32 * 16_384
    finally:
        tracemalloc.stop()


def test_files_that_eviction_leaves_without_a_page_go_whatever_room_they_take(root: Path) -> None:
    with closing(opened(root, pages_max=4)) as storage:
        for pages in many_shapes(100):
            assert all(storage.put(pages, Level.CACHED))
            assert len(packs(root)) <= 4 + EMPTY_FILES_MAX + 1
        assert storage.bytes_used == 4 * TAKEN_BYTES
        assert len(descriptors(root)) <= 4 + EMPTY_FILES_MAX + 4


def test_where_no_further_file_may_be_opened_those_with_the_fewest_pages_go(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.storage_backends.packed.segments.FILES_MAX", 16)
    with closing(opened(root)) as storage:
        put(storage, range(3))
        for pages in many_shapes(100):
            assert all(storage.put(pages, Level.CACHED))
            assert all(storage.get([blank_page(page.label) for page in pages]))
            assert len(packs(root)) <= 16
        assert held(storage, 3) == [0, 1, 2]
        assert all(storage.put([sealed_page(label(1, "p99"))], Level.CACHED)), "a file that is there has room"
        left = sum(map(bool, storage.exists([page.label for pages in many_shapes(100, 2) for page in pages])))
        assert storage.counts.evicted_count == 101 - left


def test_records_of_files_that_are_gone_are_those_of_files_of_any_length(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.storage_backends.directory.records.RECORDS_MIN", 1 << 18)
    with closing(opened(root)) as storage:
        records_count = len(storage._index._records._uses)
        for kibibytes in (*range(100, 400, 4), *range(400, 100, -4)):
            pages = [sealed_page(label(0, f"p{pool}"), kibibytes << 10) for pool in range(3)]
            assert all(storage.put(pages, Level.CACHED))
            storage.clear(pages[0].label.identity)
        assert len(storage._index._records._uses) == records_count

"""A file store without a cap keeps no index of its objects: neither time at open nor memory grows with them."""

import tracemalloc
from contextlib import closing
from pathlib import Path

from tests.support.files import FaultyDisk, put
from unified_cache.storage_backends.directory.front import PAGES_WAITING_MAX
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Level
from unified_cache.testing.storage_contract import PAGE_BYTES, blank_page, label, listing, sealed_page

OBJECT_BYTES_MAX = 100
"""Memory for each object that would show an index: one takes four times as much."""


def fill(root: Path, numbers: range) -> None:
    with closing(FileStorage.open(root, disk=FaultyDisk())) as storage:
        assert all(put(storage, numbers))


def calls_to_open(root: Path) -> int:
    disk = FaultyDisk()
    with closing(FileStorage.open(root, disk=disk)):
        return len(disk.calls)


def test_opening_it_makes_as_many_calls_whatever_is_stored(root: Path) -> None:
    fill(root, range(4))
    few = calls_to_open(root)
    fill(root, range(4, 200))
    assert calls_to_open(root) == few


def test_objects_take_no_memory_of_the_process(root: Path) -> None:
    with closing(FileStorage.open(root, disk=FaultyDisk())) as storage:
        pages = [sealed_page(label(number)) for number in range(4 * PAGES_WAITING_MAX)]
        assert all(storage.put(pages[:PAGES_WAITING_MAX], Level.CACHED))
        assert all(storage.get([blank_page(page.label) for page in pages[:PAGES_WAITING_MAX]]))
        tracemalloc.start()
        assert all(storage.put(pages, Level.CACHED))
        grown_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert grown_bytes < 3 * PAGES_WAITING_MAX * OBJECT_BYTES_MAX


def test_bytes_used_are_those_of_the_directories_whoever_stored_them(root: Path) -> None:
    fill(root, range(3))
    with closing(FileStorage.open(root)) as storage, closing(FileStorage.open(root)) as other:
        put(other, range(3, 5))
        other.remove([label(0)])
        put(storage, range(5, 6))
        assert storage.bytes_used == 5 * PAGE_BYTES
        assert len(list(listing(storage, label(0).identity))) == 5


def test_what_it_reads_is_evicted_last_under_a_later_cap(root: Path) -> None:
    fill(root, range(4))
    with closing(FileStorage.open(root)) as storage:
        assert all(storage.get([blank_page(label(0))]))
    with closing(FileStorage.open(root, bytes_max=PAGE_BYTES)) as storage:
        assert [bool(answer) for answer in storage.exists([label(number) for number in range(4)])] == [True] + [
            False
        ] * 3


def test_what_it_puts_again_is_evicted_last_by_another_process(root: Path) -> None:
    with (
        closing(FileStorage.open(root)) as uncapped,
        closing(FileStorage.open(root, bytes_max=3 * PAGE_BYTES)) as capped,
    ):
        for number in range(3):
            put(capped, [number])
        put(uncapped, [0])
        put(capped, [3])
        assert [bool(answer) for answer in capped.exists([label(number) for number in range(4)])] == [
            True,
            False,
            True,
            True,
        ]

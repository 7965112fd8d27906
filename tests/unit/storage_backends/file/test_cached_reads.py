"""Batches of small pages: what the system has in memory is read at once, while it reads the others from the disk."""

import errno
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.files import DiskFault, FaultyDisk, RefusingDisk, path_of, put
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Answer
from unified_cache.testing.storage_contract import blank_page, bytes_of, label, sealed_page

PAGES = range(5)


def check_all_are_hits(storage: FileStorage) -> None:
    found = [blank_page(label(number), cuts=(128, 500)) for number in PAGES]
    assert storage.get(found) == [Answer.HIT] * len(PAGES)
    for number, page in zip(PAGES, found, strict=True):
        assert bytes_of(page) == bytes_of(sealed_page(label(number)))


def test_what_is_in_memory_takes_one_call_a_page(root: Path) -> None:
    disk = FaultyDisk()
    with closing(FileStorage.open(root, disk=disk)) as storage:
        put(storage, PAGES)
        at = len(disk.calls)
        check_all_are_hits(storage)
        assert disk.calls[at:].count("preadv_cached") == len(PAGES)
        assert "preadv" not in disk.calls[at:]


def test_one_page_alone_is_not_asked_for_twice(root: Path) -> None:
    disk = FaultyDisk()
    with closing(FileStorage.open(root, disk=disk)) as storage:
        put(storage, PAGES)
        at = len(disk.calls)
        assert storage.get([blank_page(label(1))]) == [Answer.HIT]
        assert "preadv_cached" not in disk.calls[at:]


def test_what_is_in_memory_in_part_is_read_anew(root: Path) -> None:
    disk = FaultyDisk(DiskFault.SHORT, range(1 << 30), only="preadv_cached")
    with closing(FileStorage.open(root, disk=disk)) as storage:
        put(storage, PAGES)
        check_all_are_hits(storage)


@pytest.mark.parametrize(
    ("reason", "asked_count"),
    [(errno.EAGAIN, 2 * len(PAGES)), (errno.EIO, 2 * len(PAGES)), (errno.EOPNOTSUPP, 1)],
)
def test_what_is_not_in_memory_is_read_and_a_system_that_cannot_tell_is_asked_once(
    reason: int, asked_count: int, root: Path
) -> None:
    disk = RefusingDisk(reason)
    with closing(FileStorage.open(root, disk=disk)) as storage:
        put(storage, PAGES)
        at = len(disk.calls)
        check_all_are_hits(storage)
        check_all_are_hits(storage)
        assert disk.calls[at:].count("preadv_cached") == asked_count
        assert disk.calls[at:].count("preadv") == 2 * len(PAGES)


@pytest.mark.parametrize("change", [-1, 1])
def test_an_object_of_another_length_is_flawed_among_others(change: int, root: Path) -> None:
    with closing(FileStorage.open(root)) as storage:
        put(storage, PAGES)
        path = path_of(root, label(2))
        path.write_bytes((path.read_bytes() + b"x")[: path.stat().st_size + change])
        answers = storage.get([blank_page(label(number)) for number in PAGES])
        assert answers == [Answer.HIT, Answer.HIT, Answer.FLAWED, Answer.HIT, Answer.HIT]
        assert not path.exists()

"""The file store: restarts, intruders, the cap, several processes."""

import itertools
import os
import shutil
import socket
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.files import DiskFault, FaultyDisk, held, path_of, put, temps
from unified_cache.storage_backends.directory.front import PAGES_WAITING_MAX, STAMP_GRAIN_NS
from unified_cache.storage_backends.file.quota import UNREMOVABLE_MAX
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.testing.storage_contract import (
    PAGE_BYTES,
    blank_page,
    bytes_of,
    label,
    sealed_page,
)

CLOCK_START_NS = 1_700_000_000_000_000_000


def capped(root: Path, pages_max: int, clock: Callable[[], int]) -> FileStorage:
    return FileStorage.open(root, bytes_max=pages_max * PAGE_BYTES, clock=clock)


@pytest.fixture
def clock() -> Callable[[], int]:
    """Each call is later than the one before by more than the grain of modification times."""
    return itertools.count(CLOCK_START_NS, 2 * STAMP_GRAIN_NS).__next__


# Restarts


def test_the_temp_directory_of_a_living_writer_is_left_alone(root: Path) -> None:
    first = FileStorage.open(root)
    second = FileStorage.open(root)
    assert len(list((root / "tmp").iterdir())) == 2
    assert put(first, [1]) == put(second, [2]) == [True]
    first.close()
    second.close()
    assert list((root / "tmp").iterdir()) == []


def test_temp_directories_of_dead_writers_are_swept_whatever_is_left_in_them(root: Path) -> None:
    FileStorage.open(root).close()
    (root / "tmp" / "dead" / "directory").mkdir(parents=True)
    (root / "tmp" / "dead" / "directory" / "file").write_bytes(b"x")
    (root / "tmp" / "dead" / "0").write_bytes(b"half a page")
    (root / "tmp" / "dead" / "lock").touch()
    (root / "tmp" / "unborn").mkdir()
    storage = FileStorage.open(root, new_writer=lambda: "living")
    assert [path.name for path in (root / "tmp").iterdir()] == ["living"]
    storage.close()


def test_a_temp_directory_whose_lock_was_lost_with_the_power_is_swept(root: Path) -> None:
    FileStorage.open(root).close()
    (root / "tmp" / "lockless").mkdir()
    (root / "tmp" / "lockless" / "0").write_bytes(b"half a page")
    with closing(FileStorage.open(root)):
        assert not (root / "tmp" / "lockless").exists()


def test_what_a_sweep_cannot_remove_is_removed_by_the_next_one(root: Path) -> None:
    FileStorage.open(root).close()
    (root / "tmp" / "dead").mkdir()
    (root / "tmp" / "dead" / "0").write_bytes(b"half a page")
    (root / "tmp" / "dead" / "lock").touch()
    FileStorage.open(root, disk=FaultyDisk(DiskFault.EACCES, range(1), only="unlink")).close()
    assert temps(root) == ["0"]
    FileStorage.open(root).close()
    assert list((root / "tmp").iterdir()) == []


# What stands in the place of an object


def truncate(path: Path, root: Path) -> None:
    os.truncate(path, PAGE_BYTES // 2)


def lengthen(path: Path, root: Path) -> None:
    os.truncate(path, PAGE_BYTES + 1)


def empty(path: Path, root: Path) -> None:
    os.truncate(path, 0)


def link(path: Path, root: Path) -> None:
    path.rename(root.parent / "bystander")
    path.symlink_to(root.parent / "bystander")


def dangle(path: Path, root: Path) -> None:
    path.unlink()
    path.symlink_to(root.parent / "nowhere")


def pipe(path: Path, root: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path, root: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_bytes(b"x")


def listen(path: Path, root: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as bound:
        there = Path.cwd()
        os.chdir(path.parent)  # the name of a socket is at most 107 bytes long
        bound.bind(path.name)
        os.chdir(there)


INTRUSIONS = (truncate, lengthen, empty, link, dangle, pipe, directory, listen)


@pytest.mark.parametrize("intrude", INTRUSIONS)
@pytest.mark.parametrize("level", Level)
def test_an_intruder_in_the_place_of_an_object_is_a_miss_and_is_cleared_away(
    intrude: Callable[[Path, Path], None], level: Level, storage: FileStorage, root: Path
) -> None:
    put(storage, [1])
    intrude(path_of(root, label(1)), root)
    assert storage.get([blank_page(label(1))]) == [Answer.FLAWED]
    assert storage.counts.foreign_count == 1
    assert storage.exists([label(1)]) == [Answer.MISS]
    assert not os.path.lexists(path_of(root, label(1)))
    assert put(storage, [1], level) == [True]
    assert storage.get([blank_page(label(1))]) == [Answer.HIT]
    assert temps(root) == []


@pytest.mark.parametrize("change_bytes", [-1, 1])
def test_a_file_of_another_length_is_a_miss_for_more_buffers_than_one_call_takes(
    change_bytes: int, storage: FileStorage, root: Path
) -> None:
    named, page_bytes = label(1), 3000
    every_byte = range(1, page_bytes)
    assert storage.put([sealed_page(named, page_bytes)], Level.CACHED) == [Answer.STORED]
    assert storage.get([blank_page(named, page_bytes, every_byte)]) == [Answer.HIT]
    os.truncate(path_of(root, named), page_bytes + change_bytes)
    assert storage.get([blank_page(named, page_bytes, every_byte)]) == [Answer.FLAWED]
    assert storage.counts.foreign_count == 1


@pytest.mark.parametrize("intrude", INTRUSIONS)
def test_an_intruder_in_the_place_of_an_object_does_not_block_a_put(
    intrude: Callable[[Path, Path], None], storage: FileStorage, root: Path
) -> None:
    put(storage, [1])
    intrude(path_of(root, label(1)), root)
    assert put(storage, [1]) == [True]
    found = blank_page(label(1))
    assert storage.get([found]) == [Answer.HIT]
    assert bytes_of(found) == bytes_of(sealed_page(label(1)))


def test_the_target_of_a_link_in_the_place_of_an_object_is_not_touched(storage: FileStorage, root: Path) -> None:
    put(storage, [1])
    link(path_of(root, label(1)), root)
    before = (root.parent / "bystander").stat()
    storage.get([blank_page(label(1))])
    put(storage, [1])
    after = (root.parent / "bystander").stat()
    assert (after.st_mtime_ns, after.st_ino, after.st_size) == (before.st_mtime_ns, before.st_ino, before.st_size)


def test_a_directory_removed_under_an_open_store_is_made_anew(storage: FileStorage, root: Path) -> None:
    put(storage, range(5))
    shutil.rmtree(root / label(0).identity.hex())
    assert storage.get([blank_page(label(1))]) == [Answer.MISS]
    assert put(storage, range(5), Level.DURABLE) == [True] * 5
    assert all(storage.get([blank_page(label(number)) for number in range(5)]))


# Cap and eviction


def times_of(root: Path, numbers: Iterable[int]) -> list[int]:
    return [path_of(root, label(number)).stat().st_mtime_ns for number in numbers]


def test_reads_are_stamped_together_when_the_grain_is_over(root: Path) -> None:
    now = [CLOCK_START_NS]
    storage = capped(root, 4, lambda: now[0])
    put(storage, [1, 2, 3])
    stored = times_of(root, [1, 2, 3])
    for number in (1, 2, 1):
        storage.get([blank_page(label(number))])
    assert times_of(root, [1, 2, 3]) == stored
    now[0] += 2 * STAMP_GRAIN_NS
    storage.get([blank_page(label(4))])
    first, second, third = times_of(root, [1, 2, 3])
    assert stored[0] < second < first < now[0]
    assert third == stored[2]
    storage.close()


def test_no_more_than_so_many_reads_wait_for_their_stamp(root: Path) -> None:
    with closing(FileStorage.open(root, clock=lambda: CLOCK_START_NS)) as storage:
        numbers = range(PAGES_WAITING_MAX + 1)
        put(storage, numbers)
        stored = times_of(root, numbers)
        storage.get([blank_page(label(number)) for number in numbers[:-1]])
        assert times_of(root, numbers) == stored
        storage.get([blank_page(label(numbers[-1]))])
        assert all(now > before for now, before in zip(times_of(root, numbers), stored, strict=True))


def test_reads_are_stamped_when_the_store_closes(root: Path) -> None:
    storage = capped(root, 2, lambda: CLOCK_START_NS)
    put(storage, [1, 2])
    stored = times_of(root, [1, 2])
    storage.get([blank_page(label(2))])
    path_of(root, label(1)).unlink()
    storage.get([blank_page(label(1))])
    storage.close()
    assert times_of(root, [2])[0] > stored[1]


def test_an_object_that_cannot_be_removed_does_not_wedge_eviction(root: Path, clock: Callable[[], int]) -> None:
    storage = capped(root, 3, clock)
    for number in range(3):
        put(storage, [number])
    directory(path_of(root, label(0)), root)
    assert put(storage, [3]) == [True]
    assert held(storage, 4) == [2, 3]
    assert storage.counts.unremovable_count == 1
    storage.close()


def test_a_put_is_declined_where_nothing_can_be_removed(root: Path, clock: Callable[[], int]) -> None:
    pages_max = UNREMOVABLE_MAX * 2
    storage = capped(root, pages_max, clock)
    put(storage, range(pages_max))
    for number in range(pages_max):
        directory(path_of(root, label(number)), root)
    assert put(storage, [pages_max]) == [False]
    assert storage.counts.unremovable_count == UNREMOVABLE_MAX + 1
    storage.close()


# Several processes


def test_each_process_finds_what_the_others_stored_and_misses_what_they_removed(root: Path) -> None:
    mine, theirs = FileStorage.open(root), FileStorage.open(root)
    put(theirs, range(4))
    assert mine.exists([label(0), label(9)]) == [Answer.HIT, Answer.MISS]
    assert mine.get([blank_page(label(0))]) == [Answer.HIT]
    assert mine.bytes_used == theirs.bytes_used == 4 * PAGE_BYTES
    theirs.remove([label(0)])
    assert mine.exists([label(0)]) == [Answer.MISS]
    assert mine.get([blank_page(label(0))]) == [Answer.MISS]
    assert mine.bytes_used == theirs.bytes_used == 3 * PAGE_BYTES
    put(mine, [0])
    assert theirs.get([blank_page(label(0))]) == [Answer.HIT]
    mine.close()
    theirs.close()


def test_a_page_removed_by_another_process_is_written_again_by_put(root: Path) -> None:
    mine, theirs = FileStorage.open(root), FileStorage.open(root)
    put(mine, [1])
    theirs.remove([label(1)])
    assert put(mine, [1]) == [True]
    assert theirs.get([blank_page(label(1))]) == [Answer.HIT]
    mine.close()
    theirs.close()

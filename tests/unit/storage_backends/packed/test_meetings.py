"""Calls of the packed store that meet: another call comes in the middle of one, at a call on the disk."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.files import DiskFault, FaultyDisk, put
from unified_cache.core.errors import StorageError
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.testing.storage_contract import PAGE_BYTES, blank_page, bytes_of, label, sealed_page

OTHER = "other"
"""A pool of its own, and so files of its own."""


class MeetingDisk(Disk):
    """A disk on which something happens behind one sync of a file's bytes."""

    def __init__(self) -> None:
        self.syncs: list[int] = []
        self.meetings: dict[int, Callable[[], object]] = {}
        """What happens behind the sync of that number, from 1 on."""

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        """Let what is to happen happen."""
        self.syncs.append(os.fstat(fd).st_ino)
        self.meetings.pop(len(self.syncs), lambda: None)()


@pytest.fixture
def disk() -> MeetingDisk:
    return MeetingDisk()


@pytest.fixture
def storage(disk: MeetingDisk, tmp_path: Path) -> Iterator[PackedStorage]:
    storage = opened(tmp_path / "store", disk)
    yield storage
    storage.close()


def opened(root: Path, disk: Disk | None = None, bytes_max: int | None = None) -> PackedStorage:
    return PackedStorage.open(root, bytes_max=bytes_max, free_bytes_min=0, disk=disk)


def test_a_durable_page_that_another_put_was_first_to_store_cached_is_synced_all_the_same(
    disk: MeetingDisk, storage: PackedStorage
) -> None:
    disk.meetings[2] = lambda: put(storage, [1], Level.CACHED)
    assert put(storage, [1], Level.DURABLE) == [True]
    assert len(disk.syncs) == 3  # pages, entries, and the page of the other put


def test_a_put_at_another_length_that_comes_between_is_what_is_stored(
    disk: MeetingDisk, storage: PackedStorage
) -> None:
    longer = sealed_page(label(1), 2 * PAGE_BYTES)
    disk.meetings[2] = lambda: storage.put([longer], Level.CACHED)
    assert put(storage, [1], Level.DURABLE) == [False]
    found = blank_page(label(1), 2 * PAGE_BYTES)
    assert storage.get([found]) == [Answer.HIT]
    assert bytes_of(found) == bytes_of(longer)
    assert storage.bytes_used == 2 * PAGE_BYTES


def test_a_durable_put_does_not_mind_that_a_page_which_was_there_goes_meanwhile_with_its_file(
    disk: MeetingDisk, storage: PackedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = label(2)._replace(pool=OTHER)
    storage.put([sealed_page(there)], Level.CACHED)
    monkeypatch.setattr(storage._segments, "_idle_bytes_max", 0)
    disk.meetings[3] = lambda: storage.remove([there])
    assert storage.put([sealed_page(label(1)), sealed_page(there)], Level.DURABLE)[0]
    assert len(disk.syncs) == 3
    assert storage.exists([label(1), there]) == [Answer.HIT, Answer.MISS]


@pytest.mark.parametrize("number", [1, 2])
def test_a_durable_put_fails_where_somebody_removed_the_file_under_it_and_the_next_one_makes_another(
    number: int, tmp_path: Path
) -> None:
    with closing(opened(tmp_path / "store")) as storage:
        put(storage, [1])
        for path in (tmp_path / "store").rglob("*.pack"):
            path.unlink()
        with pytest.raises(StorageError, match="ENOENT"):
            put(storage, [number], Level.DURABLE)
        assert put(storage, [1, 2], Level.DURABLE) == [True, True]
    with closing(opened(tmp_path / "store")) as storage:
        assert storage.exists([label(1), label(2)]) == [Answer.HIT, Answer.HIT]


def test_a_page_that_is_unreadable_again_and_again_leaves_nothing_behind_when_it_is_removed(tmp_path: Path) -> None:
    disk = FaultyDisk(DiskFault.EIO, only="preadv")
    with closing(opened(tmp_path / "store", disk)) as storage:
        for _ in range(3):
            put(storage, [1])
            disk.failing = range(1 << 30)
            assert storage.get([blank_page(label(1))]) == [Answer.UNAVAILABLE]
            disk.failing = range(0)
        assert storage.counts.unreadable_count == 3
        assert storage.remove([label(1)]) == 1
    with closing(opened(tmp_path / "store")) as storage:
        assert storage.exists([label(1)]) == [Answer.MISS]
        assert storage.bytes_used == 0


def test_a_file_whose_name_could_not_be_made_to_stay_does_not_stay(tmp_path: Path) -> None:
    root = tmp_path / "store"
    opened(root).close()
    disk = FaultyDisk(DiskFault.EIO, only="fsync")
    with closing(opened(root, disk)) as storage:
        disk.failing = range(1 << 30)
        for number in range(5):
            with pytest.raises(StorageError, match="EIO"):
                put(storage, [number])
        disk.failing = range(0)
        assert list(root.rglob("*.pack")) == []
        assert put(storage, [1]) == [True]
        assert [path.name for path in root.rglob("*.pack")] == [f"kv.{PAGE_BYTES}.1.pack"]


def test_a_store_that_was_closed_can_be_opened_while_a_child_of_its_process_lives(tmp_path: Path) -> None:
    storage = opened(tmp_path / "store")
    child = os.fork()
    if not child:
        signal.pause()
    try:
        storage.close()
        with closing(opened(tmp_path / "store")) as again:
            assert put(again, [1]) == [True]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_way_that_cannot_be_synced_is_no_reason_to_refuse_a_new_store(tmp_path: Path) -> None:
    class ProcDisk(Disk):
        """A disk on which a directory of another kind of file system leads to the store."""

        def fsync(self, fd: int) -> None:  # type: ignore[override]
            """Refuse for that directory."""
            if os.fstat(fd).st_ino == tmp_path.stat().st_ino:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with closing(opened(tmp_path / "store", ProcDisk())) as storage:
        assert put(storage, [1], Level.DURABLE) == [True]


def test_clear_takes_pages_that_cannot_be_read_along(tmp_path: Path) -> None:
    disk = FaultyDisk(DiskFault.EIO, only="preadv")
    with closing(opened(tmp_path / "store", disk)) as storage:
        put(storage, range(3))
        disk.failing = range(1 << 30)
        assert storage.get([blank_page(label(1))]) == [Answer.UNAVAILABLE]
        disk.failing = range(0)
        assert storage.clear(label(0).identity) == 3
    with closing(opened(tmp_path / "store")) as storage:
        assert storage.exists([label(number) for number in range(3)]) == [Answer.MISS] * 3
        assert storage.bytes_used == 0

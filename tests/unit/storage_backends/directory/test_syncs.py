"""Syncs of a durable batch: on threads of their own where a disk is waited for, and on the caller's where none is."""

import errno
import os
from contextlib import closing
from pathlib import Path
from threading import get_ident

import pytest

from unified_cache.core.seal import HEADER_BYTES, seal
from unified_cache.storage_backends.directory.disk import BatchSyncs, Disk
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.protocol import Level, PageIO
from unified_cache.testing.storage_contract import label

PAGES_COUNT = 20


class SyncThreads(Disk):
    """A disk of some file system that notes by which threads it was asked to sync."""

    def __init__(self, file_system: str) -> None:
        self.file_system = file_system
        self.threads: list[int] = []
        self.failing: frozenset[int] = frozenset()
        self.asked_count = 0
        """How often the file system was asked for."""

    def file_system_of(self, fd: int) -> str:  # type: ignore[override]
        self.asked_count += 1
        return self.file_system

    def fsync(self, fd: int) -> None:  # type: ignore[override]
        self.threads.append(get_ident())
        if fd in self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fsync(fd)


def _sealed(number: int) -> PageIO:
    page = bytearray(HEADER_BYTES + 64)
    seal(memoryview(page), label(number))
    return PageIO(label(number), None, (memoryview(page),))


@pytest.mark.parametrize(("file_system", "is_here"), [("tmpfs", True), ("ramfs", True), ("ext4", False), ("", False)])
def test_a_durable_batch_takes_threads_only_where_a_disk_is_waited_for(
    tmp_path: Path, file_system: str, is_here: bool
) -> None:
    disk = SyncThreads(file_system)
    with closing(FileStorage.open(tmp_path / "store", disk=disk)) as storage:
        disk.threads.clear()
        assert all(storage.put([_sealed(number) for number in range(PAGES_COUNT)], Level.DURABLE))
    elsewhere_count = sum(thread != get_ident() for thread in disk.threads)
    assert len(disk.threads) >= PAGES_COUNT
    assert elsewhere_count == 0 if is_here else elsewhere_count >= PAGES_COUNT // 2


@pytest.mark.parametrize("file_system", ["tmpfs", "ext4"])
def test_every_sync_of_a_batch_is_made_and_has_its_own_outcome(tmp_path: Path, file_system: str) -> None:
    fds = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(8)]
    try:
        disk = SyncThreads(file_system)
        disk.failing = frozenset({fds[2], fds[5]})
        syncs = BatchSyncs(disk)
        for _ in range(2):
            disk.threads.clear()
            outcomes = syncs.sync(fds)
            assert [number for number, outcome in enumerate(outcomes) if outcome is not None] == [2, 5]
            assert len(disk.threads) == len(fds)
        assert disk.asked_count == 1
        assert syncs.sync([]) == []
    finally:
        for fd in fds:
            os.close(fd)


def test_a_single_file_is_synced_by_its_caller_and_nothing_is_asked(tmp_path: Path) -> None:
    disk = SyncThreads("ext4")
    path = tmp_path / "file"
    path.write_bytes(b"page")
    fd = os.open(path, os.O_RDWR)
    try:
        assert BatchSyncs(disk).sync([fd]) == [None]
    finally:
        os.close(fd)
    assert disk.threads == [get_ident()]
    assert not disk.asked_count

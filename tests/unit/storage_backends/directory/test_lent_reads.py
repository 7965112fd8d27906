"""Pages that are read into lent rows: from memory alone, while they are lent, and believed where they prove it."""

import errno
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.support.files import FaultyDisk, RefusingDisk
from tests.support.store_kinds import StoreKind
from tests.support.wrappers import PATIENCE_S
from unified_cache.seal import HEADER_BYTES
from unified_cache.storage_backends.directory import lent_reads
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.lent_rows import LentRows, RowsLoan
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.storage_backends.verified import VerifiedStorage
from unified_cache.testing.storage_contract import blank_page, bytes_of, label, sealed_page

PAGE_BYTES = 4321
ROWS_BYTES = (1, 1999, PAGE_BYTES - HEADER_BYTES - 2000)
PAGES = range(4)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in several pieces what is small."""
    monkeypatch.setattr(lent_reads, "PIECE_BYTES", 1000)


class LentPage:
    """A page to be read, and rows that are lent for it."""

    def __init__(self, number: int) -> None:
        self.memory = bytearray(sum(ROWS_BYTES))
        view, rows, start = memoryview(self.memory), [], 0
        for row_bytes in ROWS_BYTES:
            rows.append(view[start : start + row_bytes])
            start += row_bytes
        self.loan = RowsLoan([tuple(rows)])
        self.header = bytearray(HEADER_BYTES)
        self.lent = LentRows(self.loan, 0, memoryview(self.header), len(rows))
        self.page = blank_page(label(number), PAGE_BYTES)._replace(lent=self.lent)
        self.content = bytes_of(sealed_page(label(number), PAGE_BYTES))

    @property
    def is_in_rows(self) -> bool:
        return self.lent.is_proven and bytes(self.header + self.memory) == self.content

    @property
    def is_in_buffers(self) -> bool:
        return bytes_of(self.page) == self.content

    @property
    def are_buffers_untouched(self) -> bool:
        return not any(bytes_of(self.page))


def put_pages(storage: VerifiedStorage) -> None:
    pages = [sealed_page(label(number), PAGE_BYTES) for number in PAGES]
    assert storage.put(pages, Level.CACHED) == [Answer.STORED] * len(PAGES)


def get(storage: VerifiedStorage, pages: Sequence[LentPage]) -> list[Answer]:
    return storage.get([each.page for each in pages])


@pytest.mark.parametrize("count", [1, len(PAGES)])
def test_what_is_in_memory_goes_into_the_rows_and_the_buffers_stay_as_they_were(
    kind: StoreKind, root: Path, count: int
) -> None:
    with closing(VerifiedStorage(kind.open(root))) as storage:
        put_pages(storage)
        pages = [LentPage(number) for number in PAGES[:count]]
        assert get(storage, pages) == [Answer.HIT] * count
        assert all(each.is_in_rows and each.are_buffers_untouched for each in pages)


@pytest.mark.parametrize("reason", [errno.EAGAIN, errno.EIO, errno.EOPNOTSUPP])
def test_what_is_not_in_memory_goes_into_the_buffers(kind: StoreKind, root: Path, reason: int) -> None:
    with closing(VerifiedStorage(kind.open(root, disk=RefusingDisk(reason)))) as storage:
        put_pages(storage)
        pages = [LentPage(number) for number in PAGES]
        assert get(storage, pages) == [Answer.HIT] * len(PAGES)
        assert all(each.is_in_buffers and not any(each.memory) for each in pages)


class MemoryDisk(Disk):
    """A file system without a disk, that has everything in memory and cannot say so."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.asked_count = 0

    def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.asked_count += 1
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def file_system_of(self, fd: int) -> str:  # type: ignore[override]
        return self.kind


@pytest.mark.parametrize(("file_system", "is_lent"), [("tmpfs", True), ("nfs4", False), ("", False)])
def test_a_file_system_in_memory_is_read_into_the_rows_although_it_cannot_tell(
    kind: StoreKind, root: Path, file_system: str, is_lent: bool
) -> None:
    with closing(VerifiedStorage(kind.open(root, disk=MemoryDisk(file_system)))) as storage:
        put_pages(storage)
        first, second = LentPage(0), LentPage(1)
        assert get(storage, [first]) == get(storage, [second]) == [Answer.HIT]
        assert first.is_in_buffers  # the question that found it out
        assert second.is_in_rows is is_lent
        assert second.is_in_buffers is not is_lent


def test_rows_that_were_taken_back_are_not_written_and_the_page_is_read_all_the_same(
    kind: StoreKind, root: Path
) -> None:
    with closing(VerifiedStorage(kind.open(root))) as storage:
        put_pages(storage)
        page = LentPage(1)
        page.loan.take_back()
        assert get(storage, [page]) == [Answer.HIT]
        assert page.is_in_buffers
        assert not any(page.memory)
        page.memory.clear()  # BufferError, had anybody a view of it


class DamagingDisk(Disk):
    """A disk that damages the header of what it reads into rows, and nothing else."""

    def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = os.preadv(fd, buffers, offset)
        if len(buffers[0]) == HEADER_BYTES:
            buffers[0][-1] ^= 1
        return count


def test_rows_that_do_not_prove_the_page_are_no_verdict_on_it(kind: StoreKind, root: Path) -> None:
    with closing(VerifiedStorage(kind.open(root, disk=DamagingDisk()))) as storage:
        put_pages(storage)
        pages = [LentPage(number) for number in PAGES]
        assert get(storage, pages) == [Answer.HIT] * len(PAGES)
        assert all(each.is_in_buffers and not each.lent.is_proven for each in pages)
        assert not storage.flaws_count


@pytest.mark.parametrize("at", [0, 47, HEADER_BYTES, HEADER_BYTES + 1500, PAGE_BYTES - 1])
def test_a_page_that_is_damaged_in_the_store_is_flawed_and_removed(kind: StoreKind, root: Path, at: int) -> None:
    with closing(VerifiedStorage(kind.open(root))) as storage:
        damaged = sealed_page(label(1), PAGE_BYTES)
        damaged.buffers[0][at] ^= 1
        storage.put([sealed_page(label(0), PAGE_BYTES), damaged], Level.CACHED)
        pages = [LentPage(0), LentPage(1)]
        assert get(storage, pages) == [Answer.HIT, Answer.FLAWED]
        assert pages[0].is_in_rows
        assert sum(storage.flaws_count.values()) == 1
        assert get(storage, pages) == [Answer.HIT, Answer.MISS]


def test_a_page_under_the_name_of_another_is_flawed(kind: StoreKind, root: Path) -> None:
    with closing(VerifiedStorage(kind.open(root))) as storage:
        other = sealed_page(label(2), PAGE_BYTES)
        storage.put([PageIO(label(1), None, other.buffers)], Level.CACHED)
        assert get(storage, [LentPage(1)]) == [Answer.FLAWED]


class SlowMemoryDisk(FaultyDisk):
    """A disk whose copy from memory takes until it is told to end."""

    def __init__(self) -> None:
        super().__init__(only="preadv_cached")
        self.is_copying, self.may_end = Event(), Event()

    def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = os.preadv(fd, buffers, offset)
        self.is_copying.set()
        assert self.may_end.wait(PATIENCE_S)
        return count


def test_who_takes_rows_back_waits_for_the_copy_under_way_and_has_them_alone_then(kind: StoreKind, root: Path) -> None:
    disk = SlowMemoryDisk()
    with closing(VerifiedStorage(kind.open(root, disk=disk))) as storage:
        put_pages(storage)
        page = LentPage(0)
        reader = Thread(target=get, args=(storage, [page]))
        reader.start()
        assert disk.is_copying.wait(PATIENCE_S)
        owner = Thread(target=page.loan.take_back)
        owner.start()
        owner.join(0.01)
        assert owner.is_alive()
        disk.may_end.set()
        for thread in (owner, reader):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        page.memory.clear()  # BufferError, had anybody a view of it

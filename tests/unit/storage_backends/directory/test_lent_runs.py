"""Pages of one call that are read into lent rows together: neighbours of a packed store by one call of the system."""

import errno
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.store_kinds import StoreKind
from unified_cache.seal import HEADER_BYTES
from unified_cache.storage_backends.directory import lent_reads
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.lent_rows import LentRows, RowsLoan
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.storage_backends.verified import VerifiedStorage
from unified_cache.testing.storage_contract import blank_page, bytes_of, label, sealed_page

PAGES_COUNT = 6
SIZES = [HEADER_BYTES + 1000, HEADER_BYTES + 33_000, HEADER_BYTES + (1 << 15)]
"""Pages whose slots have a rest behind them, and of whole blocks; slots of small grains, too."""


class ReadLog(Disk):
    """A disk that notes the reads from memory, and gives so many bytes of each at most."""

    def __init__(self) -> None:
        self.bytes_max = 1 << 40
        self.offsets: list[int] = []

    def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        if not self.bytes_max:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        left_bytes, some = self.bytes_max, []
        for buffer in buffers:
            some.append(buffer[:left_bytes])
            left_bytes -= len(some[-1])
        return os.preadv(fd, some, offset)


class LentBatch:
    """Pages of one call, each with two rows, lent for as long as the call takes."""

    def __init__(self, numbers: Sequence[int], page_bytes: int) -> None:
        payload_bytes = page_bytes - HEADER_BYTES
        self.memories = [bytearray(payload_bytes) for _ in numbers]
        views = [memoryview(memory) for memory in self.memories]
        self.loan = RowsLoan([(view[:300], view[300:]) for view in views])
        self.headers = [bytearray(HEADER_BYTES) for _ in numbers]
        self.lent = [
            LentRows(self.loan, place, memoryview(header), rows_count=2) for place, header in enumerate(self.headers)
        ]
        self.pages = [
            blank_page(label(number), page_bytes)._replace(lent=lent)
            for number, lent in zip(numbers, self.lent, strict=True)
        ]
        self.contents = [bytes_of(sealed_page(label(number), page_bytes)) for number in numbers]

    def in_rows(self) -> list[bool]:
        """Tell of each page whether its rows hold it, and are known to."""
        return [
            lent.is_proven and bytes(header + memory) == content
            for lent, header, memory, content in zip(self.lent, self.headers, self.memories, self.contents, strict=True)
        ]

    def in_buffers(self) -> list[bool]:
        """Tell of each page whether its buffers hold it."""
        return [bytes_of(page) == content for page, content in zip(self.pages, self.contents, strict=True)]


def _put(storage: VerifiedStorage, page_bytes: int) -> None:
    pages = [sealed_page(label(number), page_bytes) for number in range(PAGES_COUNT)]
    assert storage.put(pages, Level.CACHED) == [Answer.STORED] * PAGES_COUNT


@pytest.mark.parametrize("page_bytes", SIZES)
def test_neighbours_come_by_one_call_and_each_proves_itself(tmp_path: Path, page_bytes: int) -> None:
    disk = ReadLog()
    with closing(VerifiedStorage(PackedStorage.open(tmp_path / "store", disk=disk))) as storage:
        _put(storage, page_bytes)
        batch = LentBatch(range(PAGES_COUNT), page_bytes)
        assert storage.get(batch.pages) == [Answer.HIT] * PAGES_COUNT
        assert batch.in_rows() == [True] * PAGES_COUNT
        assert not any(batch.in_buffers())
        assert len(disk.offsets) == 1


def test_pages_that_do_not_follow_each_other_come_by_a_call_for_each_run(tmp_path: Path) -> None:
    disk = ReadLog()
    with closing(VerifiedStorage(PackedStorage.open(tmp_path / "store", disk=disk))) as storage:
        _put(storage, SIZES[1])
        batch = LentBatch([4, 5, 9, 0, 1, 3], SIZES[1])
        assert storage.get(batch.pages) == [Answer.HIT, Answer.HIT, Answer.MISS] + [Answer.HIT] * 3
        assert batch.in_rows() == [True, True, False, True, True, True]
        assert len(disk.offsets) == 3


@pytest.mark.parametrize("page_bytes", SIZES)
@pytest.mark.parametrize("whole_count", [0, 1, 3])
def test_of_a_run_that_is_partly_in_memory_the_rest_goes_into_the_buffers(
    tmp_path: Path, page_bytes: int, whole_count: int
) -> None:
    disk = ReadLog()
    with closing(VerifiedStorage(PackedStorage.open(tmp_path / "store", disk=disk))) as storage:
        _put(storage, page_bytes)
        storage.get(LentBatch([0, 1], page_bytes).pages)
        first_offset = disk.offsets[0]
        alone = LentBatch([1], page_bytes)
        storage.get(alone.pages)
        stride_bytes = disk.offsets[1] - first_offset
        disk.bytes_max = whole_count * stride_bytes + page_bytes // 2 * bool(whole_count)
        batch = LentBatch(range(PAGES_COUNT), page_bytes)
        assert storage.get(batch.pages) == [Answer.HIT] * PAGES_COUNT
        assert batch.in_rows() == [number < whole_count for number in range(PAGES_COUNT)]
        assert batch.in_buffers() == [number >= whole_count for number in range(PAGES_COUNT)]
        assert not storage.flaws_count


def test_a_damaged_page_in_a_run_is_the_only_one_that_is_flawed(kind: StoreKind, root: Path) -> None:
    with closing(VerifiedStorage(kind.open(root))) as storage:
        pages = [sealed_page(label(number), SIZES[1]) for number in range(PAGES_COUNT)]
        pages[2].buffers[0][-7] ^= 1
        storage.put([*pages[:4], PageIO(label(4), None, pages[5].buffers), pages[5]], Level.CACHED)
        batch = LentBatch(range(PAGES_COUNT), SIZES[1])
        answers = storage.get(batch.pages)
        assert answers == [Answer.FLAWED if number in {2, 4} else Answer.HIT for number in range(PAGES_COUNT)]
        assert batch.in_rows() == [number not in {2, 4} for number in range(PAGES_COUNT)]
        assert sum(storage.flaws_count.values()) == 2


def test_rows_of_two_calls_are_never_held_together(tmp_path: Path) -> None:
    disk = ReadLog()
    with closing(VerifiedStorage(PackedStorage.open(tmp_path / "store", disk=disk))) as storage:
        _put(storage, SIZES[1])
        first, second = LentBatch([0, 1], SIZES[1]), LentBatch([2, 3], SIZES[1])
        second.loan.take_back()
        assert storage.get([*first.pages, *second.pages]) == [Answer.HIT] * 4
        assert first.in_rows() == [True, True]
        assert second.in_buffers() == [True, True]
        assert not any(map(any, second.memories))


def test_rows_are_not_held_for_longer_than_a_bounded_copy(
    kind: StoreKind, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lent_reads, "RUN_BYTES_MAX", 2 * SIZES[1])
    filled_counts: list[int] = []
    with closing(VerifiedStorage(kind.open(root))) as storage:
        _put(storage, SIZES[1])
        batch = LentBatch(range(PAGES_COUNT), SIZES[1])
        guard = batch.loan.guard

        class FillGuard:
            """A guard that notes how many pages were filled while it was held."""

            def __enter__(self) -> None:
                guard.acquire()
                filled_counts.append(-sum(lent.is_filled for lent in batch.lent))

            def __exit__(self, *_: object) -> None:
                filled_counts[-1] += sum(lent.is_filled for lent in batch.lent)
                guard.release()

        batch.loan.guard = FillGuard()  # type: ignore[assignment]  # as a lock it is used
        assert storage.get(batch.pages) == [Answer.HIT] * PAGES_COUNT
    assert filled_counts == [2, 2, 2]


def test_rows_that_an_earlier_try_filled_prove_nothing_after_a_later_one_that_fell_short(
    kind: StoreKind, root: Path
) -> None:
    with closing(VerifiedStorage(kind.open(root, disk=(disk := ReadLog())))) as storage:
        _put(storage, SIZES[1])
        batch = LentBatch([0, 1], SIZES[1])
        assert storage.get(batch.pages) == [Answer.HIT] * 2
        disk.bytes_max = SIZES[1] // 2
        for memory in batch.memories:
            memory[:] = bytes(len(memory))
        assert storage.get(batch.pages) == [Answer.HIT] * 2
        assert batch.in_rows() == [False] * 2
        assert batch.in_buffers() == [True] * 2

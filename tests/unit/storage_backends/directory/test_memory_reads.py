"""Pages that are read from memory into the rows of who asks: without waiting, verified there, or left to ``get``."""

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.files import DiskFault, FaultyDisk, RefusingDisk, path_of, put
from tests.support.store_kinds import DirectoryStorage, StoreKind
from unified_cache.core.seal import HEADER_BYTES, Label
from unified_cache.storage_backends.directory import page_reads
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.front import PAGES_WAITING_MAX, STAMP_GRAIN_NS
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.memory_reads import targets_of
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.testing.storage_contract import blank_page, bytes_of, label, sealed_page

PAGES_COUNT = 6
NUMBERS = range(PAGES_COUNT)
SIZES = [HEADER_BYTES + 1000, HEADER_BYTES + 33_000, HEADER_BYTES + (1 << 15)]
"""Pages whose slots have a rest behind them, and of whole blocks; slots of small grains, too."""


class WantedPage(NamedTuple):
    """A page to be read, and its memory in three rows."""

    label: Label
    rows: tuple[memoryview, ...]
    memory: bytearray
    content: bytes
    """What the memory is to hold in the end."""

    @classmethod
    def of(cls, number: int, page_bytes: int) -> "WantedPage":
        memory = bytearray(page_bytes - HEADER_BYTES)
        view = memoryview(memory)
        rows = (view[:1], view[1:300], view[300:])
        content = bytes_of(sealed_page(label(number), page_bytes))[HEADER_BYTES:]
        return cls(label(number), rows, memory, content)

    @property
    def is_whole(self) -> bool:
        return self.memory == self.content


def put_numbers(
    storage: DirectoryStorage, page_bytes: int = SIZES[1], numbers: Sequence[int] = NUMBERS
) -> list[Answer]:
    return storage.put([sealed_page(label(number), page_bytes) for number in numbers], Level.CACHED)


def read(storage: DirectoryStorage, pages: Sequence[WantedPage]) -> list[bool]:
    return storage.read_memory(targets_of(pages))


def wanted(page_bytes: int = SIZES[1], numbers: Sequence[int] = NUMBERS) -> list[WantedPage]:
    return [WantedPage.of(number, page_bytes) for number in numbers]


class WaitingForbidden(Disk):
    """A disk that refuses, once it was told to, every call that may wait for it; it notes the reads from memory."""

    MAY_NOT_WAIT = frozenset({"open_cached", "has_cached", "preadv_cached", "close"})

    def __init__(self) -> None:
        self.is_strict = False
        self.offsets: list[int] = []
        for name in Disk.__dict__:
            if not name.startswith("_") and name not in self.MAY_NOT_WAIT:
                vars(self)[name] = self._guarded(name, getattr(Disk(), name))

    def _guarded(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def guarded(*given: object, **named: object) -> object:
            assert not self.is_strict, f"{name} may wait"
            return call(*given, **named)

        return guarded

    def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        return os.preadv(fd, buffers, offset)


class PartlyCached(Disk):
    """A disk that has so many bytes of what is asked for in memory."""

    def __init__(self, bytes_max: int = 0) -> None:
        self.bytes_max = bytes_max

    def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not self.bytes_max:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        left_bytes, some = self.bytes_max, []
        for buffer in buffers:
            some.append(buffer[:left_bytes])
            left_bytes -= len(some[-1])
        return os.preadv(fd, some, offset)


@pytest.mark.parametrize("page_bytes", SIZES)
def test_pages_in_memory_come_without_a_call_that_could_wait(kind: StoreKind, root: Path, page_bytes: int) -> None:
    disk = WaitingForbidden()
    with closing(kind.open(root, disk=disk)) as storage:
        put_numbers(storage, page_bytes)
        pages = wanted(page_bytes, [3, 99, 0, 1, 2])
        disk.is_strict = True
        assert read(storage, pages) == [True, False, True, True, True]
        disk.is_strict = False
        assert [page.is_whole for page in pages] == [True, False, True, True, True]


def test_pages_whose_names_are_in_memory_are_known_without_a_call_that_could_wait(kind: StoreKind, root: Path) -> None:
    disk = WaitingForbidden()
    with closing(kind.open(root, disk=disk)) as storage:
        put_numbers(storage)
        storage.remove([label(2)])
        disk.is_strict = True
        assert storage.knows([label(number) for number in (3, 99, 2, 0)]) == [True, False, False, True]
        disk.is_strict = False


@pytest.mark.parametrize("page_bytes", SIZES)
def test_a_large_page_comes_piece_by_piece(
    kind: StoreKind, root: Path, page_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_reads, "PIECE_BYTES", page_bytes // 3)
    disk = WaitingForbidden()
    with closing(kind.open(root, disk=disk)) as storage:
        put_numbers(storage, page_bytes)
        pages = wanted(page_bytes)
        assert read(storage, pages) == [True] * PAGES_COUNT
        assert all(page.is_whole for page in pages)
        assert len(disk.offsets) > PAGES_COUNT


@pytest.mark.parametrize("page_bytes", SIZES)
def test_neighbours_come_by_one_call(root: Path, page_bytes: int) -> None:
    disk = WaitingForbidden()
    with closing(PackedStorage.open(root, disk=disk)) as storage:
        put_numbers(storage, page_bytes)
        assert read(storage, wanted(page_bytes)) == [True] * PAGES_COUNT
        assert len(disk.offsets) == 1
        assert read(storage, wanted(page_bytes, [4, 5, 9, 0, 1, 3])) == [True, True, False, True, True, True]
        assert len(disk.offsets) == 1 + 3


def test_a_run_has_a_bound(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_reads, "RUN_BYTES_MAX", 2 * SIZES[1])
    disk = WaitingForbidden()
    with closing(PackedStorage.open(root, disk=disk)) as storage:
        put_numbers(storage)
        assert read(storage, wanted()) == [True] * PAGES_COUNT
        assert len(disk.offsets) == PAGES_COUNT // 2


@pytest.mark.parametrize("page_bytes", SIZES)
@pytest.mark.parametrize("whole_count", [0, 1, 3])
def test_of_a_run_that_is_partly_in_memory_the_first_pages_come(root: Path, page_bytes: int, whole_count: int) -> None:
    disk = PartlyCached(1 << 30)
    with closing(PackedStorage.open(root, disk=disk)) as storage:
        put_numbers(storage, page_bytes)
        slot_bytes = storage_slot_bytes(page_bytes)
        disk.bytes_max = whole_count * slot_bytes + page_bytes // 2 * bool(whole_count)
        pages = wanted(page_bytes)
        assert read(storage, pages) == [number < whole_count for number in NUMBERS]
        assert [page.is_whole for page in pages] == [number < whole_count for number in NUMBERS]
        assert storage.get([sealed_page(page.label, page_bytes) for page in pages]) == [Answer.HIT] * PAGES_COUNT


def storage_slot_bytes(page_bytes: int) -> int:
    grain_bytes = 4096 if page_bytes >= 8 * 4096 else 128
    return -(-page_bytes // grain_bytes) * grain_bytes


class NothingCached(Disk):
    """A disk of which nothing is in memory, and that nobody may ask to read ahead."""

    @staticmethod
    def has_cached(fd: int, start: int, count: int) -> bool:
        return False

    def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert sum(map(len, buffers)) == 1, "a read from memory would have the system begin to read"
        return 0


class MemoryDisk(Disk):
    """A file system without a disk, that has everything in memory and cannot say so."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def file_system_of(self, fd: int) -> str:  # type: ignore[override]
        return self.kind


@pytest.mark.parametrize(("file_system", "is_read"), [("tmpfs", True), ("nfs4", False), ("", False)])
def test_a_file_system_in_memory_is_read_although_it_cannot_tell(
    kind: StoreKind, root: Path, file_system: str, is_read: bool
) -> None:
    with closing(kind.open(root, disk=MemoryDisk(file_system))) as storage:
        put_numbers(storage)
        read(storage, wanted(numbers=[0]))  # the question that finds it out
        pages = wanted()
        assert read(storage, pages) == [is_read] * PAGES_COUNT
        assert [page.is_whole for page in pages] == [is_read] * PAGES_COUNT


class WaitingOpens(MemoryDisk):
    """A file system whose opens wait for a network, also where the name is in memory."""

    def open_cached(self, name: str, flags: int, *, dir_fd: int) -> int:  # type: ignore[override]
        raise AssertionError("it may wait, on the thread of a caller who must not")


def test_a_file_system_that_cannot_tell_what_is_in_memory_is_asked_for_no_name_by_who_must_not_wait(root: Path) -> None:
    with closing(StoreKind.FILE.open(root, disk=WaitingOpens("fuse"))) as storage:
        put_numbers(storage)
        pages = wanted()
        assert read(storage, pages) == [False] * PAGES_COUNT
        assert storage.knows([page.label for page in pages]) == [False] * PAGES_COUNT


class NamesOnDisk(Disk):
    """A disk that has no name in memory, or an operating system that cannot say so."""

    def __init__(self, reason: int) -> None:
        self.reason = reason

    def open_cached(self, name: str, flags: int, *, dir_fd: int) -> int:  # type: ignore[override]
        raise OSError(self.reason, os.strerror(self.reason))


@pytest.mark.parametrize(
    ("disk", "kinds"),
    [
        *((RefusingDisk(reason), StoreKind) for reason in (errno.EAGAIN, errno.EIO, errno.EOPNOTSUPP)),
        (NothingCached(), StoreKind),
        *((NamesOnDisk(reason), [StoreKind.FILE]) for reason in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EPERM)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_not_in_memory_is_left_to_get(disk: Disk, kinds: Sequence[StoreKind], tmp_path: Path) -> None:
    for kind in kinds:
        with closing(kind.open(tmp_path / kind.value, disk=disk)) as storage:
            put_numbers(storage)
            for _ in range(2):
                assert read(storage, wanted()) == [False] * PAGES_COUNT
            is_told = not isinstance(disk, NamesOnDisk)
            if kind is StoreKind.FILE and isinstance(disk, RefusingDisk):
                is_told = disk.reason != errno.EOPNOTSUPP
            assert storage.knows([label(0)]) == [is_told]
            assert storage.get([sealed_page(label(0), SIZES[1])]) == [Answer.HIT]


@pytest.mark.parametrize("at", [0, 47, HEADER_BYTES, HEADER_BYTES + 1500, SIZES[1] - 1])
def test_a_damaged_page_and_one_under_another_s_name_do_not_come(kind: StoreKind, root: Path, at: int) -> None:
    with closing(kind.open(root)) as storage:
        stored = [sealed_page(label(number), SIZES[1]) for number in NUMBERS]
        stored[2].buffers[0][at] ^= 1
        stored[4] = PageIO(label(4), stored[5].buffers)
        storage.put(stored, Level.CACHED)
        pages = wanted()
        assert read(storage, pages) == [number not in {2, 4} for number in NUMBERS]
        assert all(pages[number].is_whole for number in NUMBERS if number not in {2, 4})


@pytest.mark.parametrize("other_bytes", [SIZES[1] - 1, SIZES[1] + 1])
def test_an_object_of_another_length_does_not_come_and_stays(kind: StoreKind, root: Path, other_bytes: int) -> None:
    with closing(kind.open(root)) as storage:
        put_numbers(storage)
        assert read(storage, wanted(other_bytes)) == [False] * PAGES_COUNT
        assert read(storage, wanted()) == [True] * PAGES_COUNT


def test_a_page_read_from_memory_is_recent(kind: StoreKind, root: Path) -> None:
    with closing(kind.open(root, bytes_max=4 * kind.taken_bytes(SIZES[1]))) as storage:
        put_numbers(storage, numbers=[0, 1, 2, 3])
        second = WantedPage.of(1, SIZES[1])
        assert read(storage, [second]) == [True]
        put_numbers(storage, numbers=[4, 5])
        assert storage.exists([label(number) for number in NUMBERS]) == [
            Answer.HIT if number in {0, 1, 4, 5} else Answer.MISS for number in NUMBERS
        ]


def test_recency_of_reads_from_memory_survives_a_restart(kind: StoreKind, root: Path) -> None:
    with closing(kind.open(root)) as storage:
        put_numbers(storage, numbers=[0, 1, 2])
        assert read(storage, wanted(numbers=[0])) == [True]
    with closing(kind.open(root, bytes_max=2 * kind.taken_bytes(SIZES[1]))) as storage:
        assert storage.exists([label(0)]) == [Answer.HIT]


def test_a_call_at_which_times_of_use_are_due_is_left_to_get(kind: StoreKind, root: Path) -> None:
    now_ns = [10**18]
    with closing(kind.open(root, clock=lambda: now_ns[0])) as storage:
        put_numbers(storage)
        assert read(storage, wanted()) == [True] * PAGES_COUNT
        now_ns[0] += STAMP_GRAIN_NS + 10**9
        assert read(storage, wanted()) == [False] * PAGES_COUNT
        storage.get([sealed_page(label(0), SIZES[1])])
        assert read(storage, wanted()) == [True] * PAGES_COUNT


def test_times_of_use_that_wait_to_be_written_have_a_bound(kind: StoreKind, root: Path) -> None:
    numbers = range(PAGES_WAITING_MAX + 1)
    with closing(kind.open(root)) as storage:
        put_numbers(storage, SIZES[0], numbers)
        assert all(read(storage, wanted(SIZES[0], numbers)))
        assert read(storage, wanted(SIZES[0])) == [False] * PAGES_COUNT
        storage.get([sealed_page(label(0), SIZES[0])])
        assert read(storage, wanted(SIZES[0])) == [True] * PAGES_COUNT


def test_what_another_process_stored_is_left_to_get_once(root: Path) -> None:
    with closing(StoreKind.FILE.open(root, bytes_max=1 << 30)) as storage:
        with closing(StoreKind.FILE.open(root, bytes_max=1 << 30)) as other:
            put_numbers(other)
        assert read(storage, wanted()) == [False] * PAGES_COUNT
        assert storage.get([sealed_page(label(number), SIZES[1]) for number in NUMBERS]) == [Answer.HIT] * PAGES_COUNT
        assert read(storage, wanted()) == [True] * PAGES_COUNT


# Batches of small pages: what the system has in memory is read at once, while it reads the others from the disk


BATCH = range(5)


def check_all_are_hits(storage: FileStorage) -> None:
    found = [blank_page(label(number), cuts=(128, 500)) for number in BATCH]
    assert storage.get(found) == [Answer.HIT] * len(BATCH)
    for number, page in zip(BATCH, found, strict=True):
        assert bytes_of(page) == bytes_of(sealed_page(label(number)))


def test_what_is_in_memory_takes_one_call_a_page_and_one_page_alone_is_not_asked_for_twice(root: Path) -> None:
    disk = FaultyDisk()
    with closing(FileStorage.open(root, disk=disk)) as storage:
        put(storage, BATCH)
        at = len(disk.calls)
        check_all_are_hits(storage)
        assert disk.calls[at:].count("preadv_cached") == len(BATCH)
        assert "preadv" not in disk.calls[at:]
        at = len(disk.calls)
        assert storage.get([blank_page(label(1))]) == [Answer.HIT]
        assert "preadv_cached" not in disk.calls[at:]


def test_what_is_in_memory_in_part_is_read_again(root: Path) -> None:
    disk = FaultyDisk(DiskFault.SHORT, range(1 << 30), only="preadv_cached")
    with closing(FileStorage.open(root, disk=disk)) as storage:
        put(storage, BATCH)
        check_all_are_hits(storage)


@pytest.mark.parametrize(
    ("reason", "asked_count"),
    [(errno.EAGAIN, 2 * len(BATCH)), (errno.EIO, 2 * len(BATCH)), (errno.EOPNOTSUPP, 0)],
)
def test_what_is_not_in_memory_is_read_and_a_system_that_cannot_tell_is_asked_once(
    reason: int, asked_count: int, root: Path
) -> None:
    disk = RefusingDisk(reason)
    with closing(FileStorage.open(root, disk=disk)) as storage:
        put(storage, BATCH)
        at = len(disk.calls)
        check_all_are_hits(storage)
        check_all_are_hits(storage)
        assert disk.calls[at:].count("preadv_cached") == asked_count
        assert disk.calls[at:].count("preadv") == 2 * len(BATCH)


@pytest.mark.parametrize("change", [-1, 1])
def test_an_object_of_another_length_is_flawed_among_others(change: int, root: Path) -> None:
    with closing(FileStorage.open(root)) as storage:
        put(storage, BATCH)
        path = path_of(root, label(2))
        path.write_bytes((path.read_bytes() + b"x")[: path.stat().st_size + change])
        answers = storage.get([blank_page(label(number)) for number in BATCH])
        assert answers == [Answer.HIT, Answer.HIT, Answer.FLAWED, Answer.HIT, Answer.HIT]
        assert not path.exists()

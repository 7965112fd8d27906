"""Pages that are read from memory into the rows of who asks: without waiting, verified there, or left to ``get``."""

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.files import FaultyDisk, put, refuses
from tests.support.store_kinds import DirectoryStorage, StoreKind
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.storage_backends.directory import disk as disk_module
from unified_cache.storage_backends.directory import page_reads
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.front import PAGES_WAITING_MAX, STAMP_GRAIN_NS
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.testing.storage_contract import blank_page, bytes_of, label, sealed_page

PAGES_COUNT = 6
NUMBERS = range(PAGES_COUNT)
SIZES = [HEADER_BYTES + 1000, HEADER_BYTES + 33_000, HEADER_BYTES + (1 << 15)]
"""Pages whose slots have a rest behind them, and of whole blocks; slots of small grains, too."""


CUTS = (HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 300)
"""Ends of a header and of three rows."""


def put_numbers(
    storage: DirectoryStorage, page_bytes: int = SIZES[1], numbers: Sequence[int] = NUMBERS
) -> list[Answer]:
    return storage.put([sealed_page(label(number), page_bytes) for number in numbers], Level.CACHED)


def wanted(page_bytes: int = SIZES[1], numbers: Sequence[int] = NUMBERS) -> list[PageIO]:
    return [blank_page(label(number), page_bytes, CUTS) for number in numbers]


def whole(pages: Sequence[PageIO]) -> list[bool]:
    """Return which pages hold what was put under their label."""
    found = [(page.label, bytes_of(page)) for page in pages]
    return [content == bytes_of(sealed_page(named, len(content))) for named, content in found]


class StrictDisk(FaultyDisk):
    """A disk that refuses, once it was told to, every call that may wait for it; it notes the reads from memory."""

    MAY_NOT_WAIT = frozenset({"open_cached", "has_cached", "preadv_cached", "close"})

    def __init__(self) -> None:
        self.is_strict = False
        self.offsets: list[int] = []
        waiting = {name for name in Disk.__dict__ if not name.startswith("_")} - self.MAY_NOT_WAIT
        super().__init__(before=dict.fromkeys(waiting, self._refuse), instead={"preadv_cached": self._read_from_memory})

    def _refuse(self, *_given: object, **_named: object) -> None:
        assert not self.is_strict, "it may wait"

    def _read_from_memory(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
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
    disk = StrictDisk()
    with closing(kind.open(root, disk=disk)) as storage:
        put_numbers(storage, page_bytes)
        pages = wanted(page_bytes, [3, 99, 0, 1, 2])
        disk.is_strict = True
        assert storage.read_memory(pages) == [True, False, True, True, True]
        disk.is_strict = False
        assert whole(pages) == [True, False, True, True, True]


def test_pages_whose_names_are_in_memory_are_known_without_a_call_that_could_wait(kind: StoreKind, root: Path) -> None:
    disk = StrictDisk()
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
    for module in (disk_module, page_reads):
        monkeypatch.setattr(module, "PIECE_BYTES", page_bytes // 3)
    disk = StrictDisk()
    with closing(kind.open(root, disk=disk)) as storage:
        put_numbers(storage, page_bytes, NUMBERS[1:])
        damaged = sealed_page(label(0), page_bytes)
        damaged.buffers[0][-1] ^= 1
        storage.put([damaged], Level.CACHED)
        pages = wanted(page_bytes)
        assert storage.read_memory(pages) == whole(pages) == [number > 0 for number in NUMBERS]
        assert len(disk.offsets) > PAGES_COUNT


@pytest.mark.parametrize("page_bytes", SIZES)
def test_neighbours_come_by_one_call(root: Path, page_bytes: int) -> None:
    disk = StrictDisk()
    with closing(PackedStorage.open(root, disk=disk)) as storage:
        put_numbers(storage, page_bytes)
        assert storage.read_memory(wanted(page_bytes)) == [True] * PAGES_COUNT
        assert len(disk.offsets) == 1
        assert storage.read_memory(wanted(page_bytes, [4, 5, 9, 0, 1, 3])) == [True, True, False, True, True, True]
        assert len(disk.offsets) == 1 + 3


@pytest.mark.parametrize("page_bytes", SIZES)
@pytest.mark.parametrize("whole_count", [0, 1, 3])
def test_of_a_run_that_is_partly_in_memory_the_first_pages_come(root: Path, page_bytes: int, whole_count: int) -> None:
    disk = PartlyCached(1 << 30)
    with closing(PackedStorage.open(root, disk=disk)) as storage:
        put_numbers(storage, page_bytes)
        slot_bytes = storage_slot_bytes(page_bytes)
        disk.bytes_max = whole_count * slot_bytes + page_bytes // 2 * bool(whole_count)
        pages = wanted(page_bytes)
        assert storage.read_memory(pages) == [number < whole_count for number in NUMBERS]
        assert whole(pages) == [number < whole_count for number in NUMBERS]
        assert storage.get([sealed_page(page.label, page_bytes) for page in pages]) == [Answer.HIT] * PAGES_COUNT


def storage_slot_bytes(page_bytes: int) -> int:
    grain_bytes = 4096 if page_bytes >= 8 * 4096 else 128
    return -(-page_bytes // grain_bytes) * grain_bytes


def nothing_cached() -> Disk:
    """Return a disk of which nothing is in memory, and that nobody may ask to read ahead."""

    def preadv_cached(_fd: int, buffers: Sequence[memoryview], _offset: int) -> int:
        assert sum(map(len, buffers)) == 1, "a read from memory would have the system begin to read"
        return 0

    return FaultyDisk(instead={"has_cached": lambda *_: False, "preadv_cached": preadv_cached})


def disk_in_memory(kind: str, **before: Callable[..., object]) -> Disk:
    """Return a disk of a file system that has everything in memory and cannot say so."""
    before["preadv_cached"] = refuses(errno.EOPNOTSUPP)
    return FaultyDisk(before=before, instead={"file_system_of": lambda _fd: kind})


@pytest.mark.parametrize(("file_system", "is_read"), [("tmpfs", True), ("nfs4", False), ("", False)])
def test_a_file_system_in_memory_is_read_although_it_cannot_tell(
    kind: StoreKind, root: Path, file_system: str, is_read: bool
) -> None:
    with closing(kind.open(root, disk=disk_in_memory(file_system))) as storage:
        put_numbers(storage)
        storage.read_memory(wanted(numbers=[0]))  # the question that finds it out
        pages = wanted()
        assert storage.read_memory(pages) == [is_read] * PAGES_COUNT
        assert whole(pages) == [is_read] * PAGES_COUNT


def test_a_file_system_that_cannot_tell_what_is_in_memory_is_asked_for_no_name_by_who_must_not_wait(root: Path) -> None:
    disk = disk_in_memory("fuse", open_cached=lambda *_, **_fds: pytest.fail("it may wait"))
    with closing(StoreKind.FILE.open(root, disk=disk)) as storage:
        put_numbers(storage)
        pages = wanted()
        assert storage.read_memory(pages) == [False] * PAGES_COUNT
        assert storage.knows([page.label for page in pages]) == [False] * PAGES_COUNT


@pytest.mark.parametrize(
    ("refused", "reason", "kinds"),
    [
        *(("preadv_cached", reason, StoreKind) for reason in (errno.EAGAIN, errno.EIO, errno.EOPNOTSUPP)),
        ("", 0, StoreKind),
        *(("open_cached", reason, [StoreKind.FILE]) for reason in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EPERM)),
    ],
)
def test_what_is_not_in_memory_is_left_to_get(
    refused: str, reason: int, kinds: Sequence[StoreKind], tmp_path: Path
) -> None:
    """Names and bytes are on a disk alone, or on a system that cannot say so."""
    for kind in kinds:
        disk = FaultyDisk(before={refused: refuses(reason)}) if refused else nothing_cached()
        with closing(kind.open(tmp_path / kind.value, disk=disk)) as storage:
            put_numbers(storage)
            for _ in range(2):
                assert storage.read_memory(wanted()) == [False] * PAGES_COUNT
            is_told = refused != "open_cached"
            if kind is StoreKind.FILE and refused == "preadv_cached":
                is_told = reason != errno.EOPNOTSUPP
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
        assert storage.read_memory(pages) == [number not in {2, 4} for number in NUMBERS]
        assert whole(pages) == [number not in {2, 4} for number in NUMBERS]


@pytest.mark.parametrize("other_bytes", [SIZES[1] - 1, SIZES[1] + 1])
def test_an_object_of_another_length_does_not_come_and_stays(kind: StoreKind, root: Path, other_bytes: int) -> None:
    with closing(kind.open(root)) as storage:
        put_numbers(storage)
        assert storage.read_memory(wanted(other_bytes)) == [False] * PAGES_COUNT
        assert storage.read_memory(wanted()) == [True] * PAGES_COUNT


def test_a_page_read_from_memory_is_recent(kind: StoreKind, root: Path) -> None:
    with closing(kind.open(root, bytes_max=4 * kind.taken_bytes(SIZES[1]))) as storage:
        put_numbers(storage, numbers=[0, 1, 2, 3])
        (second,) = wanted(numbers=[1])
        assert storage.read_memory([second]) == [True]
        put_numbers(storage, numbers=[4, 5])
        assert storage.exists([label(number) for number in NUMBERS]) == [
            Answer.HIT if number in {0, 1, 4, 5} else Answer.MISS for number in NUMBERS
        ]


def test_recency_of_reads_from_memory_survives_a_restart(kind: StoreKind, root: Path) -> None:
    with closing(kind.open(root)) as storage:
        put_numbers(storage, numbers=[0, 1, 2])
        assert storage.read_memory(wanted(numbers=[0])) == [True]
    with closing(kind.open(root, bytes_max=2 * kind.taken_bytes(SIZES[1]))) as storage:
        assert storage.exists([label(0)]) == [Answer.HIT]


def test_a_call_at_which_times_of_use_are_due_is_left_to_get(kind: StoreKind, root: Path) -> None:
    now_ns = [10**18]
    with closing(kind.open(root, clock=lambda: now_ns[0])) as storage:
        put_numbers(storage)
        assert storage.read_memory(wanted()) == [True] * PAGES_COUNT
        now_ns[0] += STAMP_GRAIN_NS + 10**9
        assert storage.read_memory(wanted()) == [False] * PAGES_COUNT
        storage.get([sealed_page(label(0), SIZES[1])])
        assert storage.read_memory(wanted()) == [True] * PAGES_COUNT


def test_times_of_use_that_wait_to_be_written_have_a_bound(kind: StoreKind, root: Path) -> None:
    numbers = range(PAGES_WAITING_MAX + 1)
    with closing(kind.open(root)) as storage:
        put_numbers(storage, SIZES[0], numbers)
        assert all(storage.read_memory(wanted(SIZES[0], numbers)))
        assert storage.read_memory(wanted(SIZES[0])) == [False] * PAGES_COUNT
        storage.get([sealed_page(label(0), SIZES[0])])
        assert storage.read_memory(wanted(SIZES[0])) == [True] * PAGES_COUNT


def test_what_another_process_stored_is_read_from_memory(root: Path) -> None:
    with closing(StoreKind.FILE.open(root, bytes_max=1 << 30)) as storage:
        with closing(StoreKind.FILE.open(root, bytes_max=1 << 30)) as other:
            put_numbers(other)
        assert storage.read_memory(wanted()) == [True] * PAGES_COUNT


BATCH = range(5)


def check_all_are_hits(storage: FileStorage) -> None:
    found = [blank_page(label(number), cuts=(128, 500)) for number in BATCH]
    assert storage.get(found) == [Answer.HIT] * len(BATCH)
    assert all(bytes_of(page) == bytes_of(sealed_page(page.label)) for page in found)


@pytest.mark.parametrize(("has_first", "begun_count"), [(True, 0), (False, len(BATCH)), (None, len(BATCH))])
def test_all_small_files_are_begun_to_be_read_before_one_is_awaited_unless_they_are_in_memory(
    has_first: bool | None, begun_count: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_cached(fd: int, start: int, count: int) -> bool:
        if has_first is None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return has_first

    disk = FaultyDisk()
    monkeypatch.setattr(disk, "has_cached", has_cached)
    with closing(FileStorage.open(root, disk=disk)) as storage:
        put(storage, BATCH)
        at = len(disk.calls)
        check_all_are_hits(storage)
        calls = [name for name in disk.calls[at:] if name in {"begin_reading", "preadv"}]
        assert calls == ["begin_reading"] * begun_count + ["preadv"] * len(BATCH)

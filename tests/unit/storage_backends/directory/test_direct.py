"""Pages that the system does not have in memory: read past its memory where the disk lets us, and never wrongly."""

import errno
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from mmap import mmap
from pathlib import Path

import pytest

from tests.support.files import descriptors, held, path_of
from tests.support.store_kinds import DirectoryStorage, StoreKind
from unified_cache.core.errors import StorageError
from unified_cache.core.seal import HEADER_BYTES, Label, PageChecksum, seal_buffers
from unified_cache.storage_backends.directory import read_queue
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.page_reads import BOUNCE_SLOTS, DIRECT_BLOCK_BYTES
from unified_cache.storage_backends.directory.read_queue import QUEUE_READS_MAX, FileRead, FileReads, ReadQueues
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.testing.storage_contract import blank_page, bytes_of, label

PAGES_COUNT = 5
PAGE_BYTES = (128 << 10) + 128
"""A payload of whole blocks, and a header."""

SLOT_BYTES = (128 << 10) + DIRECT_BLOCK_BYTES
"""Whole blocks that a page is in."""


class DirectDisk(Disk):
    """A disk that notes what is read directly, and may refuse it or fall short."""

    def __init__(self) -> None:
        self.direct_reads: list[int] = []
        """Bytes of each direct read."""
        self.refusal = 0
        """Reason to refuse to begin a direct read; 0 to let it."""
        self.refusals_count = 0
        self.read_fault = 0
        """Reason for which every direct read fails."""
        self.is_short = False
        """Whether a direct read brings a block alone."""
        self.queue_fault = 0
        """Reason for which the system gives no queue."""

    def begin_direct(self, fd: int) -> None:  # type: ignore[override]
        if self.refusal:
            self.refusals_count += 1
            raise OSError(self.refusal, os.strerror(self.refusal))
        Disk.begin_direct(fd)

    def read_each(self, reads: Iterable[FileRead], depth: int) -> FileReads:  # type: ignore[override]
        if self.queue_fault:
            raise OSError(self.queue_fault, os.strerror(self.queue_fault))
        if self.read_fault or self.is_short:
            return self._failed(self._noted(reads))
        return Disk.read_each(self._noted(reads), depth)

    def _failed(self, reads: Iterable[FileRead]) -> FileReads:
        for read in reads:
            if self.read_fault:
                yield read, OSError(self.read_fault, os.strerror(self.read_fault))
            else:
                yield read, os.preadv(read.fd, [read.buffer[:DIRECT_BLOCK_BYTES]], read.offset)

    def _noted(self, reads: Iterable[FileRead]) -> Iterator[FileRead]:
        for read in reads:
            self.direct_reads.append(len(read.buffer))
            yield read


@pytest.fixture
def takes_direct_reads(tmp_path: Path) -> None:
    """Skip where the file system of the tests takes no direct reads, or keeps its files in memory."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(DIRECT_BLOCK_BYTES))
    forget(tmp_path)
    fd = os.open(probe, os.O_RDONLY)
    try:
        if Disk.has_cached(fd, 0, DIRECT_BLOCK_BYTES):
            pytest.skip(f"{tmp_path} is in memory")
        Disk.begin_direct(fd)
        os.preadv(fd, [mmap(-1, DIRECT_BLOCK_BYTES)], 0)
    except OSError as error:
        pytest.skip(f"{tmp_path} takes no direct reads: {error}")
    finally:
        os.close(fd)


Opening = Callable[[Path, Disk], DirectoryStorage]


@pytest.fixture
def opening(kind: StoreKind, takes_direct_reads: None) -> Opening:
    return lambda root, disk: kind.open(root, disk=disk)


@pytest.fixture
def disk() -> DirectDisk:
    return DirectDisk()


@pytest.fixture
def storage(opening: Opening, disk: DirectDisk, tmp_path: Path) -> Iterator[DirectoryStorage]:
    with closing(opening(tmp_path / "store", disk)) as storage:
        assert all(storage.put([sealed(number) for number in range(PAGES_COUNT)], Level.CACHED))
        yield storage


def buffer_of(page_bytes: int = PAGE_BYTES, offset: int = 0) -> memoryview:
    return memoryview(mmap(-1, page_bytes + offset))[offset:]


def sealed(number: int, page_bytes: int = PAGE_BYTES) -> PageIO:
    buffer = buffer_of(page_bytes)
    for start in range(128, page_bytes, DIRECT_BLOCK_BYTES):
        buffer[start] = (number + start // DIRECT_BLOCK_BYTES) % 251
    buffer[page_bytes - 1] = number + 1
    seal_buffers((buffer,), label(number))
    return PageIO(label(number), (buffer,))


def blank(named: Label, page_bytes: int = PAGE_BYTES, offset: int = 0) -> PageIO:
    return PageIO(named, (buffer_of(page_bytes, offset),))


def forget(root: Path) -> None:
    """Have the system keep nothing of any file in memory."""
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def cached_files(root: Path) -> list[Path]:
    """Return the files of pages of which the system has the end in memory, where no table is."""
    cached: list[Path] = []
    for path in root.rglob("*"):
        if path.is_file() and path.stat().st_size > PAGE_BYTES - 1:
            fd = os.open(path, os.O_RDONLY)
            if Disk.has_cached(fd, path.stat().st_size - DIRECT_BLOCK_BYTES, DIRECT_BLOCK_BYTES):
                cached.append(path)
            os.close(fd)
    return cached


def check_hits(storage: DirectoryStorage, offset: int = 0) -> None:
    pages = [blank(label(number), offset=offset) for number in range(PAGES_COUNT)]
    assert storage.get(pages) == [Answer.HIT] * PAGES_COUNT
    for number, page in enumerate(pages):
        assert page.buffers[0] == sealed(number).buffers[0]


def test_pages_that_are_not_in_memory_come_right_and_leave_nothing_there(
    storage: DirectoryStorage, disk: DirectDisk, tmp_path: Path
) -> None:
    forget(tmp_path)
    check_hits(storage)
    assert not cached_files(tmp_path / "store")
    check_hits(storage, offset=64)
    # A file for each page; of slots beside each other two come by one read. Where a page goes to changes nothing.
    counts = [1] * PAGES_COUNT if isinstance(storage, FileStorage) else [2, 2, 1]
    assert disk.direct_reads == 2 * [count * SLOT_BYTES for count in counts]


def test_pages_in_memory_are_read_from_there(storage: DirectoryStorage, disk: DirectDisk) -> None:
    check_hits(storage)
    assert not disk.direct_reads


def test_a_small_page_that_is_asked_for_alone_comes_through_the_systems_memory(
    storage: DirectoryStorage, disk: DirectDisk, tmp_path: Path
) -> None:
    forget(tmp_path)
    assert storage.get([blank(label(1))]) == [Answer.HIT]
    assert not disk.direct_reads


CUTTINGS = ((), (HEADER_BYTES,), (1, 2, 3), (DIRECT_BLOCK_BYTES,), (HEADER_BYTES, 70_000, 100_000))


@pytest.mark.parametrize("cuts", CUTTINGS)
@pytest.mark.parametrize(
    "page_bytes", [32 << 10, (64 << 10) + 128, (132 << 10) - 1, (256 << 10) + 1, 264 << 10, (1 << 20) + 128]
)
def test_pages_of_any_length_in_any_cuts_land_right(
    opening: Opening, disk: DirectDisk, tmp_path: Path, page_bytes: int, cuts: tuple[int, ...]
) -> None:
    count = 7
    cuts = tuple(cut for cut in cuts if cut < page_bytes)
    with closing(opening(tmp_path / "store", disk)) as storage:
        assert all(storage.put([sealed(number, page_bytes) for number in range(count)], Level.CACHED))
        forget(tmp_path)
        pages = [
            blank_page(label(number), page_bytes, cuts)._replace(checksum=PageChecksum()) for number in range(count)
        ]
        assert storage.get(pages) == [Answer.HIT] * count
        assert not cached_files(tmp_path / "store")
        assert disk.direct_reads
        for number, page in enumerate(pages):
            assert bytes_of(page) == sealed(number, page_bytes).buffers[0]
            assert page.checksum is not None
            assert page.checksum.of(page_bytes) == int.from_bytes(bytes_of(page)[112:120], "little")


def test_more_pages_than_land_at_a_time_come_right_however_they_lie(
    opening: Opening, disk: DirectDisk, tmp_path: Path
) -> None:
    page_bytes, count = (48 << 10) + 128, 3 * BOUNCE_SLOTS
    with closing(opening(tmp_path / "store", disk)) as storage:
        assert all(storage.put([sealed(number, page_bytes) for number in range(count)], Level.CACHED))
        forget(tmp_path)
        # Some were never stored.
        numbers = [*range(count), *range(1000, 1010)]
        random.Random(7).shuffle(numbers)
        pages = [blank(label(number), page_bytes) for number in numbers]
        answers = storage.get(pages)
        assert answers == [Answer.HIT if number < count else Answer.MISS for number in numbers]
        for number, page in zip(numbers, pages, strict=True):
            assert number >= count or page.buffers[0] == sealed(number, page_bytes).buffers[0]
        assert not cached_files(tmp_path / "store")


def test_what_is_in_memory_comes_from_there_among_what_is_not(
    opening: Opening, disk: DirectDisk, tmp_path: Path
) -> None:
    with closing(opening(tmp_path / "store", disk)) as storage:
        assert all(storage.put([sealed(number) for number in range(40)], Level.CACHED))
        forget(tmp_path)
        for number in (3, 4, 17, 39):
            assert storage.get([blank(label(number))]) == [Answer.HIT]
        pages = [blank(label(number)) for number in range(40)]
        assert storage.get(pages) == [Answer.HIT] * 40
        for number, page in enumerate(pages):
            assert page.buffers[0] == sealed(number).buffers[0]


def test_a_call_that_is_interrupted_closes_what_it_opened(
    file_storage: FileStorage, disk: DirectDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes, count = (48 << 10) + 128, 2 * BOUNCE_SLOTS
    assert all(file_storage.put([sealed(number, page_bytes) for number in range(count)], Level.CACHED))
    forget(tmp_path)
    before = descriptors(tmp_path)
    begun = disk.begin_direct

    def begin_direct(fd: int) -> None:
        if len(disk.direct_reads) == count // 2:
            raise KeyboardInterrupt
        begun(fd)

    monkeypatch.setattr(disk, "begin_direct", begin_direct)
    with pytest.raises(KeyboardInterrupt):
        file_storage.get([blank(label(number), page_bytes) for number in range(count)])
    assert descriptors(tmp_path) == before
    monkeypatch.undo()
    pages = [blank(label(number), page_bytes) for number in range(count)]
    assert file_storage.get(pages) == [Answer.HIT] * count


@pytest.mark.parametrize("fault", [errno.EINVAL, errno.EIO, 0], ids=["EINVAL", "EIO", "short"])
def test_a_direct_read_that_fails_or_falls_short_is_followed_by_an_ordinary_one(
    storage: DirectoryStorage, disk: DirectDisk, tmp_path: Path, fault: int
) -> None:
    disk.read_fault, disk.is_short = fault, not fault
    forget(tmp_path)
    check_hits(storage)
    count = len(disk.direct_reads)
    reads_count = 3 if isinstance(storage, PackedStorage) else PAGES_COUNT
    assert count == (1 if fault == errno.EINVAL else reads_count)
    forget(tmp_path)
    check_hits(storage)
    assert len(disk.direct_reads) == (count if fault == errno.EINVAL else 2 * count)


def test_a_file_system_that_takes_no_direct_reads_is_asked_once(
    storage: DirectoryStorage, disk: DirectDisk, tmp_path: Path
) -> None:
    disk.refusal = errno.EINVAL
    for _ in range(2):
        forget(tmp_path)
        check_hits(storage)
    assert disk.refusals_count == 1
    assert not disk.direct_reads


@pytest.mark.parametrize("fault", [errno.ENOSYS, errno.EAGAIN])
def test_without_a_queue_pages_come_through_the_systems_memory_and_the_next_call_asks_again(
    storage: DirectoryStorage, disk: DirectDisk, tmp_path: Path, fault: int
) -> None:
    disk.queue_fault = fault
    found: list[list[str]] = []
    for _ in range(2):
        forget(tmp_path)
        check_hits(storage)
        found.append(descriptors(tmp_path))
    assert not disk.direct_reads
    assert found[0] == found[1]
    disk.queue_fault = 0
    forget(tmp_path)
    check_hits(storage)
    assert disk.direct_reads


@pytest.mark.parametrize("change_bytes", [-1, 1, -DIRECT_BLOCK_BYTES, 2 * DIRECT_BLOCK_BYTES])
def test_a_file_of_another_length_is_flawed(
    file_storage: FileStorage, disk: DirectDisk, tmp_path: Path, change_bytes: int
) -> None:
    assert all(file_storage.put([sealed(1), sealed(2)], Level.CACHED))
    path = path_of(tmp_path / "store", label(1))
    content = path.read_bytes() + bytes(max(change_bytes, 0))
    path.write_bytes(content[: PAGE_BYTES + change_bytes])
    forget(tmp_path)
    assert file_storage.get([blank(label(1)), blank(label(2))]) == [Answer.FLAWED, Answer.HIT]
    assert disk.direct_reads
    assert not path.exists()


@pytest.fixture
def file_storage(disk: DirectDisk, takes_direct_reads: None, tmp_path: Path) -> Iterator[FileStorage]:
    with closing(FileStorage.open(tmp_path / "store", disk=disk)) as storage:
        yield storage


class SyncFaults(Disk):
    """A disk on which the syncs of some files of pages fail, of several at a time."""

    def __init__(self) -> None:
        self.failing: set[int] = set()
        """Lengths of the files whose sync fails."""

    def fsync(self, fd: int) -> None:  # type: ignore[override]
        if os.fstat(fd).st_size in self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fsync(fd)


def test_of_files_that_are_synced_together_those_before_the_first_fault_are_stored(tmp_path: Path) -> None:
    disk = SyncFaults()
    with closing(FileStorage.open(tmp_path / "store", disk=disk)) as storage:
        disk.failing = {9000, 10_000}
        sizes = [5000, 6000, 9000, 7000, 10_000]
        with pytest.raises(StorageError):
            storage.put([sealed(number, size) for number, size in enumerate(sizes)], Level.DURABLE)
        assert held(storage, 5) == [0, 1]
        disk.failing = set()
        assert all(storage.put([sealed(number, size) for number, size in enumerate(sizes)], Level.DURABLE))
        pages = [blank(label(number), size) for number, size in enumerate(sizes)]
        assert storage.get(pages) == [Answer.HIT] * 5


# Direct reads of several files that are under way together, and read one after the other where the system cannot


FILES_COUNT = 5
DEPTH = 8


def content_of(number: int) -> bytes:
    """Return the content of a file: no two alike, none of whole blocks."""
    return bytes([number % 251 + 1]) * (3 * DIRECT_BLOCK_BYTES + number)


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[list[int]]:
    """Yield descriptors that read directly, or skip where the file system does not."""
    opened: list[int] = []
    try:
        for number in range(FILES_COUNT):
            path = tmp_path / str(number)
            path.write_bytes(content_of(number))
            opened.append(os.open(path, os.O_RDONLY))
            try:
                Disk.begin_direct(opened[-1])
                os.preadv(opened[-1], [mmap(-1, DIRECT_BLOCK_BYTES)], 0)
            except OSError as error:
                pytest.skip(f"{tmp_path} takes no direct reads: {error}")
        yield opened
    finally:
        for fd in opened:
            os.close(fd)


def reads_of(fds: Sequence[int], offset: int = 0) -> list[FileRead]:
    """Ask for all of each file."""
    return [FileRead(number, fd, memoryview(mmap(-1, 4 * DIRECT_BLOCK_BYTES)), offset) for number, fd in enumerate(fds)]


def came(read: FileRead, count: int | OSError) -> bytes:
    assert isinstance(count, int)
    return bytes(read.buffer[:count])


def outcomes_of(queues: ReadQueues, reads: Sequence[FileRead], depth: int = DEPTH) -> list[int | OSError]:
    """Read all and return what came of each, in the order in which they were asked for."""
    outcomes = {read.number: outcome for read, outcome in queues.read(reads, depth)}
    assert sorted(outcomes) == list(range(len(reads)))
    return [outcomes[number] for number in range(len(reads))]


@pytest.fixture
def queues() -> ReadQueues:
    """Return queues of the kernel, or skip where there are none."""
    made = ReadQueues()
    try:
        assert not list(made.read([], DEPTH))
    except OSError as error:
        pytest.skip(f"this system has no queues: {error}")
    return made


@pytest.mark.parametrize("depth", [1, 8, 46, QUEUE_READS_MAX])
def test_three_quarters_of_the_depth_stay_under_way_while_what_came_is_used(
    fds: list[int], queues: ReadQueues, depth: int
) -> None:
    reads = reads_of(fds * 60)
    taken_count = 0

    def taken() -> Iterator[FileRead]:
        nonlocal taken_count
        for read in reads:
            taken_count += 1
            yield read

    for used_count, _ in enumerate(queues.read(taken(), depth)):
        under_way_count = taken_count - used_count
        assert under_way_count <= depth
        if taken_count < len(reads):
            # Of what ends together the last is used when none of it is under way any more.
            assert taken_count >= depth - depth // 4


def test_whoever_stops_waits_for_what_is_under_way(fds: list[int], queues: ReadQueues) -> None:
    reads = reads_of(fds)
    with closing(queues.read(reads, DEPTH)) as coming:
        next(coming)
    # All were begun together, and nothing is filled any more: what is there now stays there.
    assert [came(read, len(content_of(number))) for number, read in enumerate(reads)] == [
        content_of(number) for number in range(FILES_COUNT)
    ]


@pytest.mark.parametrize("place", [0, 2, FILES_COUNT - 1])
@pytest.mark.parametrize(("flaw", "reason"), [({"fd": -1}, errno.EBADF), ({"offset": 100}, errno.EINVAL)])
def test_a_read_that_fails_is_reported_and_the_others_come(
    fds: list[int], queues: ReadQueues, place: int, flaw: dict[str, int], reason: int
) -> None:
    reads = reads_of(fds)
    reads[place] = reads[place]._replace(**flaw)  # type: ignore[arg-type]
    counts = outcomes_of(queues, reads)
    failed = counts.pop(place)
    assert isinstance(failed, OSError)
    assert failed.errno == reason
    del reads[place]
    expected = [content_of(number) for number in range(FILES_COUNT) if number != place]
    assert [came(read, count) for read, count in zip(reads, counts, strict=True)] == expected


def test_a_child_that_was_forked_reads_without_its_parent_s_queue(fds: list[int], queues: ReadQueues) -> None:
    outcomes_of(queues, reads_of(fds))
    pid = os.fork()
    if not pid:
        try:
            reads = reads_of(fds)
            counts = outcomes_of(queues, reads)
            is_right = all(came(reads[number], counts[number]) == content_of(number) for number in range(FILES_COUNT))
            os._exit(0 if is_right else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    reads = reads_of(fds)
    assert came(reads[0], outcomes_of(queues, reads)[0]) == content_of(0)


def test_a_system_without_queues_says_so(fds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_queue, "_calls", lambda: None)
    with pytest.raises(OSError, match="not implemented"):
        ReadQueues().read(reads_of(fds), DEPTH)

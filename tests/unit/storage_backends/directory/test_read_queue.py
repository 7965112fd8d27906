"""Direct reads of several files that are under way together, and read one after the other where the system cannot."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from mmap import mmap
from pathlib import Path

import pytest

from unified_cache.storage_backends.directory import disk as disk_module
from unified_cache.storage_backends.directory import read_queue
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.page_reads import DIRECT_BLOCK_BYTES
from unified_cache.storage_backends.directory.read_queue import QUEUE_READS_MAX, FileRead, ReadQueues

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
    """Ask for all of each file, in two buffers."""
    buffers = [(memoryview(mmap(-1, DIRECT_BLOCK_BYTES)), memoryview(mmap(-1, 3 * DIRECT_BLOCK_BYTES))) for _ in fds]
    return [FileRead(number, fd, each, offset) for number, (fd, each) in enumerate(zip(fds, buffers, strict=True))]


def came(read: FileRead, count: int | OSError) -> bytes:
    assert isinstance(count, int)
    return b"".join(read.buffers)[:count]


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


def test_files_read_together_come_each_into_its_own_buffers(fds: list[int], queues: ReadQueues) -> None:
    for offset in (0, DIRECT_BLOCK_BYTES):
        reads = reads_of(fds, offset)
        counts = outcomes_of(queues, reads)
        found = [came(read, count) for read, count in zip(reads, counts, strict=True)]
        assert found == [content_of(number)[offset:] for number in range(FILES_COUNT)]


@pytest.mark.parametrize("depth", [1, 2, 7, QUEUE_READS_MAX])
def test_more_reads_than_a_queue_holds_all_come(fds: list[int], queues: ReadQueues, depth: int) -> None:
    reads = reads_of(fds * (2 * QUEUE_READS_MAX // FILES_COUNT + 1))
    counts = outcomes_of(queues, reads, depth)
    assert len(reads) > QUEUE_READS_MAX
    for number, (read, count) in enumerate(zip(reads, counts, strict=True)):
        assert came(read, count) == content_of(number % FILES_COUNT)


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


def test_a_read_is_taken_when_all_that_were_yielded_have_been_used(fds: list[int], queues: ReadQueues) -> None:
    used: set[int] = set()
    free = {0, 1, 2, 3}

    def taken() -> Iterator[FileRead]:
        for read in reads_of(fds * 8):
            yield read._replace(number=free.pop())

    for read, outcome in queues.read(taken(), 4):
        assert isinstance(outcome, int)
        used.add(read.number)
        free.add(read.number)
    assert len(free) == 4
    assert used <= free


def test_whoever_stops_waits_for_what_is_under_way(fds: list[int], queues: ReadQueues) -> None:
    reads = reads_of(fds)
    with closing(queues.read(reads, DEPTH)) as coming:
        next(coming)
    # All were begun together, and nothing is filled any more: what is there now stays there.
    assert [came(read, len(content_of(number))) for number, read in enumerate(reads)] == [
        content_of(number) for number in range(FILES_COUNT)
    ]


def test_a_fault_while_reads_are_taken_waits_for_those_under_way(fds: list[int], queues: ReadQueues) -> None:
    reads = reads_of(fds[:2])

    def failing() -> Iterator[FileRead]:
        yield from reads
        raise ConnectionError

    with pytest.raises(ConnectionError):
        list(queues.read(failing(), 2))
    assert outcomes_of(queues, reads_of(fds)) == [len(content_of(number)) for number in range(FILES_COUNT)]


def test_a_read_that_fails_is_told_and_the_others_come(fds: list[int], queues: ReadQueues) -> None:
    reads = reads_of(fds)
    reads[2] = reads[2]._replace(offset=100)
    counts = outcomes_of(queues, reads)
    assert isinstance(counts.pop(2), OSError)
    del reads[2]
    expected = [content_of(number) for number in range(FILES_COUNT) if number != 2]
    assert [came(read, count) for read, count in zip(reads, counts, strict=True)] == expected


@pytest.mark.parametrize("place", [0, 2, FILES_COUNT - 1])
def test_a_file_that_is_not_open_is_told_and_the_others_come(fds: list[int], queues: ReadQueues, place: int) -> None:
    reads = reads_of(fds)
    reads[place] = reads[place]._replace(fd=-1)
    counts = outcomes_of(queues, reads)
    failed = counts.pop(place)
    assert isinstance(failed, OSError)
    assert failed.errno == errno.EBADF
    assert counts == [len(content_of(number)) for number in range(FILES_COUNT) if number != place]


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


def test_a_system_without_queues_reads_one_file_after_the_other(
    fds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_queue, "_calls", lambda: None)
    with pytest.raises(OSError, match="not implemented"):
        ReadQueues().read(reads_of(fds), DEPTH)

    monkeypatch.setattr(disk_module, "_read_queues", ReadQueues)
    reads = reads_of([*fds, -1])
    *counts, failed = [outcome for _, outcome in Disk().preadv_each(reads, DEPTH)]
    assert [came(read, count) for read, count in zip(reads, counts, strict=False)] == list(
        map(content_of, range(FILES_COUNT))
    )
    assert isinstance(failed, OSError)

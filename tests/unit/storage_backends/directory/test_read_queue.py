"""Direct reads of several files that are begun together, and read one after the other where the system cannot."""

import errno
import os
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path

import pytest

from unified_cache.storage_backends.directory import disk as disk_module
from unified_cache.storage_backends.directory import read_queue
from unified_cache.storage_backends.directory.direct import DIRECT_BLOCK_BYTES
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.read_queue import QUEUE_READS_MAX, FileRead, ReadQueues

FILES_COUNT = 5


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


def reads_of(fds: list[int], offset: int = 0) -> list[FileRead]:
    """Ask for all of each file, in two buffers."""
    buffers = [(memoryview(mmap(-1, DIRECT_BLOCK_BYTES)), memoryview(mmap(-1, 3 * DIRECT_BLOCK_BYTES))) for _ in fds]
    return [FileRead(fd, each, offset) for fd, each in zip(fds, buffers, strict=True)]


def came(read: FileRead, count: int | OSError) -> bytes:
    assert isinstance(count, int)
    return b"".join(read.buffers)[:count]


@pytest.fixture
def queues() -> ReadQueues:
    """Return queues of the kernel, or skip where there are none."""
    made = ReadQueues()
    try:
        made.read([])
    except OSError as error:
        pytest.skip(f"this system has no queues: {error}")
    return made


def test_files_read_together_come_each_into_its_own_buffers(fds: list[int], queues: ReadQueues) -> None:
    for offset in (0, DIRECT_BLOCK_BYTES):
        reads = reads_of(fds, offset)
        counts = queues.read(reads)
        found = [came(read, count) for read, count in zip(reads, counts, strict=True)]
        assert found == [content_of(number)[offset:] for number in range(FILES_COUNT)]


def test_more_reads_than_a_queue_holds_all_come(fds: list[int], queues: ReadQueues) -> None:
    reads = reads_of(fds * (2 * QUEUE_READS_MAX // FILES_COUNT))
    counts = queues.read(reads)
    assert len(reads) > QUEUE_READS_MAX
    for number, (read, count) in enumerate(zip(reads, counts, strict=True)):
        assert came(read, count) == content_of(number % FILES_COUNT)


def test_a_read_that_fails_is_told_and_the_others_come(fds: list[int], queues: ReadQueues) -> None:
    reads = reads_of(fds)
    reads[2] = reads[2]._replace(offset=100)
    counts = queues.read(reads)
    failed = counts.pop(2)
    # What the kernel does not even begin is left, with what follows it, to the caller.
    assert isinstance(failed, OSError) or failed == 0
    assert came(reads[0], counts[0]) == content_of(0)
    assert came(reads[1], counts[1]) == content_of(1)


def test_a_file_that_is_not_open_is_no_read_under_way(fds: list[int], queues: ReadQueues) -> None:
    reads = reads_of([fds[0], -1])
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        queues.read(reads[1:])
    assert queues.read(reads)[1] == 0
    assert came(reads[0], len(content_of(0))) == content_of(0)


def test_a_child_that_was_forked_reads_without_its_parent_s_queue(fds: list[int], queues: ReadQueues) -> None:
    queues.read(reads_of(fds))
    pid = os.fork()
    if not pid:
        try:
            refused = False
            try:
                queues.read(reads_of(fds))
            except OSError:
                refused = True
            reads = reads_of(fds)
            counts = queues.read(reads)
            is_right = all(came(reads[number], counts[number]) == content_of(number) for number in range(FILES_COUNT))
            os._exit(0 if refused and is_right else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    reads = reads_of(fds)
    assert came(reads[0], queues.read(reads)[0]) == content_of(0)


def test_a_system_without_queues_reads_one_file_after_the_other(
    fds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_queue, "_calls", lambda: None)
    with pytest.raises(OSError, match="not implemented"):
        ReadQueues().read(reads_of(fds))

    monkeypatch.setattr(disk_module, "_read_queues", ReadQueues)
    reads = reads_of([*fds, -1])
    counts = Disk().preadv_each(reads)
    assert [came(read, count) for read, count in zip(reads[:-1], counts, strict=False)] == list(
        map(content_of, range(FILES_COUNT))
    )
    assert isinstance(counts[-1], OSError)

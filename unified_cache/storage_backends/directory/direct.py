"""Reads and writes that pass by the system's memory, straight between the disk and the caller's.

    file     [ object                      |  rest of its block ][ object  ...      neighbours, all of one length
    memory   [ page: whole blocks ]  [ tail of the page in a scratch ]  [ page ...

A direct read moves whole blocks between places that are aligned to them, and an object is some bytes longer than its
whole blocks. So its last bytes go through a scratch, and are copied.
"""

import ctypes
import errno
from collections.abc import Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from queue import Empty, SimpleQueue

from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.read_queue import FileRead

__all__ = [
    "DIRECT_BLOCK_BYTES",
    "DIRECT_PAGES_MAX",
    "DIRECT_WRITE_BYTES_MIN",
    "DirectReads",
    "DirectWrites",
    "is_block_aligned",
]

DIRECT_BLOCK_BYTES = 4096
"""What a direct read is aligned to, in the file and in memory. Many disks take 512, a few ask for all of it."""

DIRECT_PAGES_MAX = 64
"""Pages of one read; each takes two of the 1024 buffers that a call may have, and a block of a scratch."""

DIRECT_WRITE_BYTES_MIN = 1 << 20
"""Smaller objects that must be durable take as long through the page cache, where the next read then finds them."""

_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class DirectReads:
    """Direct reads of one store. Thread-safe.

    What the system has in memory is not due, nor what it cannot tell of, nor where the memory to be filled is not
    aligned. A read that did not bring everything, for whatever reason, counts as none: an ordinary one follows,
    which tells what is wrong.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._scratches: SimpleQueue[mmap] = SimpleQueue()
        """Of calls that have returned: as many as there were calls at a time."""
        self._is_refused = False

    @property
    def is_refused(self) -> bool:
        """Whether the system cannot tell what it has in memory, or the file system takes no direct reads."""
        return self._is_refused

    def is_due(self, fd: int, offset: int) -> bool:
        """Tell whether what is at an offset is to be read directly: its first block is not in memory.

        To look at all of it would take as long as it has blocks. What is changed there is read right.
        """
        if self._is_refused:
            return False
        try:
            return not self._disk.has_cached(fd, offset, DIRECT_BLOCK_BYTES)
        except OSError:
            self._is_refused = True
            return False

    def read(self, fd: int, pages: Sequence[memoryview], stride_bytes: int, offset: int) -> int:
        """Read up to ``DIRECT_PAGES_MAX`` neighbours, one every ``stride_bytes``; return how many bytes came.

        ``fd`` reads directly, ``stride_bytes`` and ``offset`` are whole blocks, and the pages, all of one length, begin
        on a block. A stride is longer than the whole blocks of a page by one block at most. The last page is filled if
        as many bytes came as lie between its start and its end; 0 if none did.
        """
        whole_bytes = len(pages[0]) // DIRECT_BLOCK_BYTES * DIRECT_BLOCK_BYTES
        rest_bytes = stride_bytes - whole_bytes
        scratch = self._lend_scratch()
        try:
            tails = memoryview(scratch)
            buffers: list[memoryview] = []
            for number, page in enumerate(pages):
                start = number * DIRECT_BLOCK_BYTES
                buffers += (page[:whole_bytes], tails[start : start + rest_bytes])
            try:
                count = self._disk.preadv(fd, buffers if rest_bytes else buffers[::2], offset)
            except OSError as error:
                self._is_refused = self._is_refused or error.errno in _REFUSED
                return 0
            tail_bytes = len(pages[0]) - whole_bytes
            if tail_bytes:
                for page, tail in zip(pages, buffers[1::2], strict=True):
                    page[whole_bytes:] = tail[:tail_bytes]
        finally:
            self._scratches.put(scratch)
        return count

    def read_files(self, files: Sequence[tuple[int, memoryview]]) -> list[int]:
        """Read up to ``DIRECT_PAGES_MAX`` pages, each from the start of a file of its own, all at a time.

        Return how many bytes came of each: one more than the page has, or many more, where its file is longer.
        The descriptors read directly, and the pages begin on a block.
        """
        scratch = self._lend_scratch()
        try:
            # A block more than the whole ones of a page brings the rest of it, and tells whether the file is longer.
            tails = memoryview(scratch)
            reads: list[FileRead] = []
            for number, (fd, page) in enumerate(files):
                start = number * DIRECT_BLOCK_BYTES
                whole_bytes = len(page) // DIRECT_BLOCK_BYTES * DIRECT_BLOCK_BYTES
                reads.append(FileRead(fd, (page[:whole_bytes], tails[start : start + DIRECT_BLOCK_BYTES]), 0))
            outcomes = self._disk.preadv_each(reads)
            for read, (_, page) in zip(reads, files, strict=True):
                whole, tail = read.buffers
                page[len(whole) :] = tail[: len(page) - len(whole)]
        finally:
            self._scratches.put(scratch)
        counts: list[int] = []
        for outcome in outcomes:
            if isinstance(outcome, OSError):
                self._is_refused = self._is_refused or outcome.errno in _REFUSED
                counts.append(0)
            else:
                counts.append(outcome)
        return counts

    def refuse(self) -> None:
        """Read nothing directly from now on."""
        self._is_refused = True

    def _lend_scratch(self) -> mmap:
        try:
            return self._scratches.get_nowait()
        except Empty:
            return mmap(-1, DIRECT_PAGES_MAX * DIRECT_BLOCK_BYTES, flags=MAP_PRIVATE | MAP_ANONYMOUS)


class DirectWrites:
    """Direct writes of one store. Thread-safe."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._is_refused = False

    @property
    def is_refused(self) -> bool:
        """Whether the file system takes no direct writes."""
        return self._is_refused

    def refuse(self) -> None:
        """Write nothing directly from now on."""
        self._is_refused = True

    def write_blocks(self, fd: int, page: memoryview, offset: int) -> int:
        """Write the whole blocks of a page that begins on a block, at a block of a file; return how many bytes went.

        ``fd`` writes directly. As for ``write_front``, it may be any part of them.

        Raises:
            OSError: they could not be written.
        """
        try:
            return self._disk.pwritev(fd, [page[: len(page) // DIRECT_BLOCK_BYTES * DIRECT_BLOCK_BYTES]], offset)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._is_refused = True
            return 0

    def write_front(self, fd: int, page: memoryview) -> int:
        """Write the whole blocks of a page that begins on a block, at the start of a file; return how many bytes went.

        It may be any part of them, none too, and where the file system takes no direct writes always is: what is left
        is written from there on in the ordinary way, which ``fd`` is open for again.

        Raises:
            OSError: they could not be written.
        """
        if self._is_refused:
            return 0
        try:
            self._disk.begin_direct(fd)
        except OSError:
            self._is_refused = True
            return 0
        try:
            return self._disk.write(fd, page[: len(page) // DIRECT_BLOCK_BYTES * DIRECT_BLOCK_BYTES])
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._is_refused = True
            return 0
        finally:
            self._disk.end_direct(fd)


def is_block_aligned(page: memoryview) -> bool:
    """Tell whether a page in one buffer begins where a direct read may begin."""
    return page.contiguous and not page.readonly and not _address(page) % DIRECT_BLOCK_BYTES


def _address(page: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(page))

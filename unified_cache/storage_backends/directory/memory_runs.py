"""Runs of pages in one file, read from the system's memory into rows: neighbours by one call, then verified.

    file     [ header payload | rest of slot ][ header payload | rest of slot ] ...     neighbours of a packed store
    memory   header, rows        nobody looks     header, rows                          one call for all of them

Between two copies of half a MiB the processor's caches lose whatever code runs there, so as little as possible does.
"""

import errno
from collections.abc import Sequence

from unified_cache.seal import PageChecksum
from unified_cache.storage_backends.directory.descriptors import BEYOND, BUFFERS_MAX, PIECE_BYTES, BuffersLeft
from unified_cache.storage_backends.directory.disk import IN_MEMORY, Disk
from unified_cache.storage_backends.memory_reads import RowsTarget

__all__ = ["MemoryRuns", "run_pages_max"]

RUN_BYTES_MAX = 2 << 20
"""Bytes of one call: they are in the processor's caches when they are verified."""

GAP_BYTES_MAX = 4096
"""Longest rest of a slot behind a page."""

BLOCK_BYTES = 4096
"""What is looked at of a run: whether the system has its first block in memory."""

_GAP = memoryview(bytearray(GAP_BYTES_MAX))
"""For the bytes between two pages; nobody looks at it."""


class MemoryRuns:
    """Reads of files of one file system, as far as the system has them in memory. Thread-safe.

    Whatever goes wrong, a page was not read, and the read by ``get`` that follows tells what it was.
    """

    __slots__ = ("_disk", "_is_memory", "_is_told")

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._is_told = True
        """Whether the file system is believed to tell what it has in memory."""
        self._is_memory = False
        """Whether it cannot, and needs not: it is memory."""

    @property
    def is_possible(self) -> bool:
        """Whether reads from memory can be told from others; found out by the first of them."""
        return self._is_told or self._is_memory

    def is_cold(self, fd: int, offset: int) -> bool:
        """Tell whether the system lacks what is at an offset, as far as it can say.

        A read there would come to nothing, and have the system begin to read what is better read directly.
        """
        if self._is_memory:
            return False
        try:
            return not self._disk.has_cached(fd, offset, BLOCK_BYTES)
        except OSError:
            return False

    def read_file(self, fd: int, target: RowsTarget) -> bool:
        """Read a page that is all of a file; False where the file is longer, too."""
        return self._read_page(fd, target, (*target.buffers, BEYOND), 0)

    def read_run(self, fd: int, targets: Sequence[RowsTarget], stride_bytes: int, offset: int) -> list[bool]:
        """Read neighbours, all of one length, one every ``stride_bytes``; see ``run_pages_max`` for how many."""
        if len(targets) == 1:
            return [self._read_page(fd, targets[0], targets[0].buffers, offset)]
        gap_bytes = stride_bytes - targets[0].object_bytes
        gap = (_GAP[:gap_bytes],) if gap_bytes else ()
        count = self._read(fd, [buffer for target in targets for buffer in (*target.buffers, *gap)], offset)
        filled_count = min((count + gap_bytes) // stride_bytes, len(targets))
        return [number < filled_count and target.holds_page() for number, target in enumerate(targets)]

    def _read_page(self, fd: int, target: RowsTarget, buffers: Sequence[memoryview], offset: int) -> bool:
        """Read one page; ``buffers`` are longer than it where a longer file is another page's."""
        if target.object_bytes >= 2 * PIECE_BYTES or len(buffers) > BUFFERS_MAX:
            return self._read_pieces(fd, target, buffers, offset)
        return self._read(fd, buffers, offset) == target.object_bytes and target.holds_page()

    def _read_pieces(self, fd: int, target: RowsTarget, buffers: Sequence[memoryview], offset: int) -> bool:
        """Read a page piece by piece, each added to the checksum while it is in the processor's caches."""
        rest, done_bytes, checksum = BuffersLeft(buffers), 0, PageChecksum()
        while done_bytes < target.object_bytes:
            left_bytes = target.object_bytes - done_bytes
            # The last piece is up to two, so that a page of a power of two and a header has no short one.
            is_last = left_bytes < 2 * PIECE_BYTES
            count = self._read(fd, rest.front(left_bytes + 1 if is_last else PIECE_BYTES), offset + done_bytes)
            if not 0 < count <= left_bytes:
                return False
            checksum.add(done_bytes, rest.take(count))
            done_bytes += count
        return target.holds_page(checksum.of(target.object_bytes))

    def _read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read what the system has in memory; return how many bytes came, 0 where it does not tell."""
        try:
            preadv = self._disk.preadv if self._is_memory else self._disk.preadv_cached
            return preadv(fd, buffers, offset)
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP and not self._is_memory:
                self._is_memory = self._disk.file_system_of(fd) in IN_MEMORY
                self._is_told = False
            return 0


def run_pages_max(target: RowsTarget) -> int:
    """Return how many neighbours like this page may be read by one call, at least itself."""
    by_buffers = BUFFERS_MAX // (len(target.buffers) + 1)
    page_bytes = target.object_bytes
    return max(min(RUN_BYTES_MAX // page_bytes, by_buffers), 1) if page_bytes < 2 * PIECE_BYTES else 1

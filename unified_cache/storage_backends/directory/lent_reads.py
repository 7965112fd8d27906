"""Reads of files into lent rows: of what the system has in memory, so that they wait for no disk.

    file     [ header payload | rest of slot ][ header payload | rest of slot ] ...     neighbours of a packed store
    memory   header, rows        nobody looks     header, rows                          one call for all of them

Between two copies of half a MiB the processor's caches lose whatever code runs there, so as little as possible does:
neighbours come by one call, and files one after the other once everything that they need is ready.
"""

import errno
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from unified_cache.seal import PageChecksum
from unified_cache.storage_backends.directory.descriptors import BEYOND, BUFFERS_MAX, PIECE_BYTES, BuffersLeft
from unified_cache.storage_backends.directory.disk import IN_MEMORY, Disk
from unified_cache.storage_backends.lent_rows import LentRows

__all__ = ["LentFile", "LentReads", "run_pages_max"]

RUN_BYTES_MAX = 4 << 20
"""Bytes that are copied while the rows are held: whoever takes them back waits for a millisecond, not for more."""

GAP_BYTES_MAX = 4096
"""Longest rest of a slot behind a page."""

_GAP = memoryview(bytearray(GAP_BYTES_MAX))
"""For the bytes between two pages; nobody looks at it."""


class LentFile(NamedTuple):
    """A page that is a whole file, and rows that are lent for it."""

    number: int
    """By which its caller knows it."""
    fd: int
    lent: LentRows
    page_bytes: int


class LentReads:
    """Fills lent rows from files of one file system. Thread-safe.

    Whatever goes wrong, rows are not filled, and the read into buffers that follows tells what it was.
    """

    __slots__ = ("_disk", "_is_memory", "_is_told")

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._is_told = True
        """Whether the file system is believed to tell what it has in memory."""
        self._is_memory = False
        """Whether it cannot, and needs not: it is memory."""

    def fill_files(self, files: Sequence[LentFile]) -> set[int]:
        """Fill rows with whole files; return the numbers of those that have just so many bytes, all in memory."""
        filled: set[int] = set()
        for some in _groups(files):
            if not (self._is_told or self._is_memory):
                break  # found out by the first group
            loan = some[0].lent.loan
            with loan.guard:
                if not loan.is_over:
                    filled.update(self._fill_each(some))
        return filled

    def fill_run(self, fd: int, lent: Sequence[LentRows], page_bytes: int, stride_bytes: int, offset: int) -> int:
        """Fill rows with neighbours in a file, one every ``stride_bytes``; return how many were filled, from the first.

        All rows are of one loan, see ``run_pages_max`` for how many there may be.
        """
        if not (self._is_told or self._is_memory):
            return 0
        loan = lent[0].loan
        with loan.guard:
            if loan.is_over:
                return 0
            if len(lent) == 1:
                return int(self._fill(fd, lent[0], lent[0].buffers(), page_bytes, offset))
            return self._fill_all(fd, lent, page_bytes, stride_bytes, offset)

    def _fill_each(self, files: Sequence[LentFile]) -> list[int]:
        """Fill rows that are held; return the numbers of the files that came."""
        targets = [(*file.lent.buffers(), BEYOND) for file in files]
        return [
            file.number
            for file, target in zip(files, targets, strict=True)
            if self._fill(file.fd, file.lent, target, file.page_bytes, 0)
        ]

    def _fill_all(self, fd: int, lent: Sequence[LentRows], page_bytes: int, stride_bytes: int, offset: int) -> int:
        """Fill rows that are held; return how many came, from the first."""
        gap_bytes = stride_bytes - page_bytes
        gap = (_GAP[:gap_bytes],) if gap_bytes else ()
        count = self._read(fd, [buffer for rows in lent for buffer in (*rows.buffers(), *gap)], offset)
        filled_count = min((count + gap_bytes) // stride_bytes, len(lent))
        for rows in lent[:filled_count]:
            rows.sum_up()
        return filled_count

    def _fill(self, fd: int, lent: LentRows, target: Sequence[memoryview], page_bytes: int, offset: int) -> bool:
        """Fill the rows of one page; ``target`` is longer than the page where a longer file is another page's."""
        if page_bytes < 2 * PIECE_BYTES and len(target) <= BUFFERS_MAX:
            is_filled = self._read(fd, target, offset) == page_bytes
            if is_filled:
                lent.sum_up()
            return is_filled
        return self._fill_in_pieces(fd, lent, target, page_bytes, offset)

    def _fill_in_pieces(
        self, fd: int, lent: LentRows, target: Sequence[memoryview], page_bytes: int, offset: int
    ) -> bool:
        """Fill rows piece by piece, each added to the checksum while it is in the processor's caches."""
        rest, done_bytes, checksum = BuffersLeft(target), 0, PageChecksum()
        while done_bytes < page_bytes:
            left_bytes = page_bytes - done_bytes
            # The last piece is up to two, so that a page of a power of two and a header has no short one.
            is_last = left_bytes < 2 * PIECE_BYTES
            count = self._read(fd, rest.front(left_bytes + 1 if is_last else PIECE_BYTES), offset + done_bytes)
            if not 0 < count <= left_bytes:
                return False
            checksum.add(done_bytes, rest.take(count))
            done_bytes += count
        lent.sum_up(checksum)
        return True

    def _read(self, fd: int, target: Sequence[memoryview], offset: int) -> int:
        """Read what the system has in memory; return how many bytes came, 0 where it does not tell."""
        try:
            preadv = self._disk.preadv if self._is_memory else self._disk.preadv_cached
            return preadv(fd, target, offset)
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                self._is_memory = self._disk.file_system_of(fd) in IN_MEMORY
                self._is_told = False
            return 0


def run_pages_max(lent: LentRows, page_bytes: int) -> int:
    """Return how many neighbours like this one may be filled by one call, at least itself."""
    by_buffers = BUFFERS_MAX // (lent.buffers_count + 1)
    return max(min(RUN_BYTES_MAX // page_bytes, by_buffers), 1) if page_bytes < 2 * PIECE_BYTES else 1


def _groups(files: Iterable[LentFile]) -> Iterator[list[LentFile]]:
    """Cut files into groups of one loan, as long as a run may be."""
    group: list[LentFile] = []
    group_bytes = 0
    for file in files:
        if group and (group[0].lent.loan is not file.lent.loan or group_bytes + file.page_bytes > RUN_BYTES_MAX):
            yield group
            group, group_bytes = [], 0
        group.append(file)
        group_bytes += file.page_bytes
    if group:
        yield group

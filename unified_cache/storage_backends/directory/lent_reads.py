"""Reads of files into lent rows: of what the system has in memory, so that they wait for no disk."""

import errno

from unified_cache.storage_backends.directory.descriptors import BEYOND, PIECE_BYTES, BuffersLeft
from unified_cache.storage_backends.directory.disk import IN_MEMORY, Disk
from unified_cache.storage_backends.lent_rows import LentRows

__all__ = ["LentReads"]


class LentReads:
    """Fills lent rows from files of one file system. Thread-safe."""

    __slots__ = ("_disk", "_is_memory", "_is_told")

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._is_told = True
        """Whether the file system is believed to tell what it has in memory."""
        self._is_memory = False
        """Whether it cannot, and needs not: it is memory."""

    def fill_file(self, fd: int, lent: LentRows, wanted_bytes: int) -> bool:
        """Fill the rows with a whole file; tell whether it has so many bytes, not more, and all are in memory."""
        return self._fill(fd, lent, 0, wanted_bytes, (BEYOND,))

    def fill(self, fd: int, lent: LentRows, wanted_bytes: int, offset: int) -> bool:
        """Fill the rows from an offset on; tell whether all of it is in memory."""
        return self._fill(fd, lent, offset, wanted_bytes, ())

    def _fill(self, fd: int, lent: LentRows, offset: int, wanted_bytes: int, after: tuple[memoryview, ...]) -> bool:
        """Fill rows piece by piece, each added to the checksum while it is in the processor's caches.

        Whatever goes wrong, the read into buffers that follows tells what.
        """
        if not (self._is_told or self._is_memory):
            return False
        try:
            with lent as buffers:
                if not buffers:
                    return False
                preadv = self._disk.preadv if self._is_memory else self._disk.preadv_cached
                rest, done_bytes = BuffersLeft(buffers), 0
                while done_bytes < wanted_bytes:
                    left_bytes = wanted_bytes - done_bytes
                    # The last piece is up to two, so that a page of a power of two and a header has no short one.
                    is_last = left_bytes < 2 * PIECE_BYTES
                    front = rest.front(left_bytes if is_last else PIECE_BYTES)
                    if is_last:
                        front += after
                    count = preadv(fd, front, offset + done_bytes)
                    if not 0 < count <= left_bytes:
                        return False
                    lent.add(done_bytes, rest.take(count))
                    done_bytes += count
                lent.is_filled = True
                return True
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                self._is_memory = self._disk.file_system_of(fd) in IN_MEMORY
                self._is_told = False
            return False

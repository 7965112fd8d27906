"""The system's memory of the files of one file system: whether it has a page there, and reads that wait for no disk."""

import errno
from collections.abc import Sequence

from unified_cache.storage_backends.directory.disk import IN_MEMORY, Disk

__all__ = ["BLOCK_BYTES", "SystemMemory"]

BLOCK_BYTES = 4096
"""What is looked at of a page: whether the system has its first block. To look at all would take as long as it has."""


class SystemMemory:
    """The system's memory, as far as the system can tell what it has there. Thread-safe."""

    __slots__ = ("_disk", "_is_memory", "_tells_blocks", "_tells_reads")

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._tells_blocks = True
        """Whether it is believed to tell whether a block is there."""
        self._tells_reads = True
        """Whether it is believed to read what is there, and nothing else."""
        self._is_memory = False
        """Whether the file system cannot tell, and needs not: it is memory."""

    @property
    def is_readable(self) -> bool:
        """Whether reads of what is there can be told from others; found out by the first of them."""
        return self._tells_reads or self._is_memory

    @property
    def tells_blocks(self) -> bool:
        """Whether it is worth to ask ``is_cold``."""
        return self._tells_blocks

    def is_cold(self, fd: int, offset: int) -> bool:
        """Return whether the system lacks the block at an offset, as far as it can say.

        A read of it from memory would come to nothing, and have the system begin to read what is better read directly.
        """
        if self._is_memory or not self._tells_blocks:
            return False
        try:
            return not self._disk.has_cached(fd, offset, BLOCK_BYTES)
        except OSError:
            self._tells_blocks = False
            return False

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers as far as their bytes are there, and let the system begin to read others.

        Return how many bytes came. Whatever goes wrong, none came, and an ordinary read tells what it was.
        """
        try:
            if self._is_memory:
                return self._disk.preadv(fd, buffers, offset)
            return self._disk.preadv_cached(fd, buffers, offset) if self._tells_reads else 0
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP and not self._is_memory:
                self._is_memory = self._disk.file_system_of(fd) in IN_MEMORY
                self._tells_reads = False
            return 0

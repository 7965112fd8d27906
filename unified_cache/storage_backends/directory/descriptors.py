"""Files and directories by descriptor: whole reads, whole writes, errors named."""

import errno
import os
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress

from unified_cache.errors import StorageError, StorageFullError
from unified_cache.seal import PageChecksum
from unified_cache.storage_backends.directory.disk import Disk

__all__ = [
    "BEYOND",
    "BUFFERS_MAX",
    "DIRECTORY_FLAGS",
    "LED_BYTES_MIN",
    "PIECE_BYTES",
    "READ_FLAGS",
    "WRITE_FLAGS",
    "BuffersLeft",
    "Directory",
    "close_quietly",
    "distrust",
    "is_distrusted",
    "missing_bytes",
    "missing_inodes",
    "read_all",
    "read_at",
    "size_of",
    "storage_error",
    "sync_or_distrust",
    "write_at",
]

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Never follows a link and never waits for the other end of a FIFO."""

WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

BUFFERS_MAX = os.sysconf("SC_IOV_MAX")
"""Buffers that one readv or writev takes; 1024 on Linux."""

PIECE_BYTES = 1 << 20
"""Bytes of a page that are read before they are added to its checksum, which finds them in the processor's caches."""

LED_BYTES_MIN = 1 << 20
"""Of a file so long the first ``LEAD_BYTES`` are read by a call of their own."""

LEAD_BYTES = 16 << 10
"""A short read at the start of a file lets Linux read ahead while what has come is copied, in several requests at a
time. Asked for all at once it waits for a request as long as it makes them, and what is not cached comes half as fast.
"""

BEYOND = memoryview(bytearray(1))
"""For the byte after a page, which is not there; nobody looks at it."""

_DISTRUSTED = stat.S_ISVTX
"""The sticky bit, which no system gives a meaning on files, nor on directories that their owner alone may write."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PASSING = frozenset(
    {errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.ESTALE}
)


def storage_error(error: OSError, doing: str) -> StorageError:
    """Say which fault an error of the operating system is to a caller; ``doing`` names what failed and the path."""
    message = f"{doing}: {error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})"
    if error.errno in _FULL:
        return StorageFullError(message)
    return StorageError(message, retryable=error.errno in _PASSING)


def sync_or_distrust(disk: Disk, fd: int) -> None:
    """Let everything in a file or a directory survive a crash; where that fails, it is distrusted from then on.

    Raises:
        OSError: it could not be written. A second sync would say that it was.
    """
    try:
        disk.fsync(fd)
    except OSError:
        distrust(disk, fd)
        raise


def distrust(disk: Disk, fd: int) -> None:
    """Mark a file or a directory in which a sync failed, for every process until the power goes.

    Linux takes pages that it could not write for written, and reads them from memory as if they were. The mark is in
    the same memory, so it stays as long as that is so; what is read after a loss of power is the truth again.
    """
    with suppress(OSError):
        disk.chmod(fd, stat.S_IMODE(disk.fstat(fd).st_mode) | _DISTRUSTED)


def is_distrusted(status: os.stat_result) -> bool:
    """Tell whether a status is that of a file or a directory in which a sync failed."""
    return bool(status.st_mode & _DISTRUSTED)


def close_quietly(disk: Disk, fd: int) -> None:
    """Close a descriptor through which nothing was written; what the system says of it changes nothing."""
    try:
        disk.close(fd)
    except OSError:
        return  # Not by ``suppress``, which costs as much as the close: this is on the path of every read.


def write_at(disk: Disk, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write the buffers one after the other from an offset on, however many calls it takes: one, as a rule."""
    count = disk.pwritev(fd, buffers[:BUFFERS_MAX], offset)
    if count == _sum_bytes(buffers):
        return
    rest = BuffersLeft(buffers)
    rest.take(count)
    while rest.buffers:
        offset += count
        count = disk.pwritev(fd, rest.buffers[:BUFFERS_MAX], offset)
        rest.take(count)


def read_all(
    disk: Disk, fd: int, buffers: Sequence[memoryview], wanted_bytes: int, checksum: PageChecksum | None = None
) -> bool:
    """Fill the buffers, of ``wanted_bytes`` in all; False where the file is shorter or longer than they are.

    It asks for a byte more than they hold, which tells so without a look at the file's length. With a ``checksum``, see
    ``read_at``.
    """
    if wanted_bytes < LED_BYTES_MIN and len(buffers) < BUFFERS_MAX:
        count = disk.preadv(fd, (*buffers, BEYOND), 0)
        if count >= wanted_bytes or not count:
            if checksum is not None and count == wanted_bytes:
                checksum.add_all(buffers)
            return count == wanted_bytes
    is_filled = _fill(disk, fd, buffers, 0, checksum, first_bytes=LEAD_BYTES)
    return is_filled and not disk.preadv(fd, [BEYOND], wanted_bytes)


def read_at(
    disk: Disk,
    fd: int,
    buffers: Sequence[memoryview],
    wanted_bytes: int,
    offset: int,
    checksum: PageChecksum | None = None,
) -> bool:
    """Fill the buffers, of ``wanted_bytes`` in all, from an offset on; False where the file ends before they do.

    One call does it, as a rule. With a ``checksum`` it is one for every ``PIECE_BYTES``, which are added to it before
    the next are read.
    """
    is_one_piece = checksum is None or wanted_bytes < 2 * PIECE_BYTES
    if is_one_piece and disk.preadv(fd, buffers[:BUFFERS_MAX], offset) == wanted_bytes:
        if checksum is not None:
            checksum.add_all(buffers)
        return True
    return _fill(disk, fd, buffers, offset, checksum, first_bytes=PIECE_BYTES)


def size_of(disk: Disk, directory: "Directory", name: str) -> int | None:
    """Return the length of a regular file, None where there is none."""
    try:
        status = disk.stat(name, dir_fd=directory.fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def missing_bytes(disk: Disk, fd: int, wanted_bytes: int) -> int:
    """Return how much less than that is free on the file system; a write will say what is wrong with one that fails."""
    try:
        status = disk.fstatvfs(fd)
    except OSError:
        return 0
    return wanted_bytes - int(status.f_bavail) * int(status.f_frsize)


def missing_inodes(disk: Disk, fd: int, wanted_count: int) -> int:
    """Return how many files less than that the file system takes; 0 where it sets no limit to their number."""
    try:
        status = disk.fstatvfs(fd)
    except OSError:
        return 0
    return wanted_count - int(status.f_favail) if status.f_files else 0


def _fill(
    disk: Disk, fd: int, buffers: Sequence[memoryview], offset: int, checksum: PageChecksum | None, first_bytes: int
) -> bool:
    """Fill buffers by as many calls as it takes, the first for at most ``first_bytes``; False where the file ends."""
    rest = BuffersLeft(buffers)
    piece_bytes = first_bytes
    done_bytes = 0
    while rest.buffers:
        count = disk.preadv(fd, rest.front(piece_bytes), offset + done_bytes)
        if not count:
            return False
        filled = rest.take(count)
        if checksum is not None:
            checksum.add(done_bytes, filled)
        done_bytes += count
        piece_bytes = PIECE_BYTES if checksum is not None else sys.maxsize
    return True


def _sum_bytes(buffers: Sequence[memoryview]) -> int:
    return buffers[0].nbytes if len(buffers) == 1 else sum([buffer.nbytes for buffer in buffers])


class BuffersLeft:
    """Rest of a run of buffers: the bytes still to be read or written."""

    __slots__ = ("buffers",)

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.buffers = [buffer.cast("B") for buffer in buffers if buffer.nbytes]

    def front(self, count: int) -> list[memoryview]:
        """Return the first ``count`` bytes or all, as far as one call takes them."""
        front: list[memoryview] = []
        for buffer in self.buffers[:BUFFERS_MAX]:
            front.append(buffer[:count])
            count -= len(front[-1])
            if not count:
                break
        return front

    def take(self, count: int) -> list[memoryview]:
        """Take ``count`` bytes off the front; return them."""
        done = 0
        while done < len(self.buffers) and count >= len(self.buffers[done]):
            count -= len(self.buffers[done])
            done += 1
        taken = self.buffers[:done]
        del self.buffers[:done]
        if count:
            taken.append(self.buffers[0][:count])
            self.buffers[0] = self.buffers[0][count:]
        return taken


class Directory:
    """An open directory. Its descriptor is closed when the last thread that uses it lets it go, or by ``close``."""

    __slots__ = ("_disk", "anchored", "fd")

    def __init__(self, disk: Disk, fd: int) -> None:
        self._disk = disk
        self.fd = fd
        self.anchored = False
        """Whether its own name is known to survive a crash."""

    def close(self) -> None:
        """Close the descriptor now; nobody may be using it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close_quietly(self._disk, fd)

    def __del__(self) -> None:
        self.close()

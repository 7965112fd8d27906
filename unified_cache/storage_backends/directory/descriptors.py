"""Files and directories by descriptor: whole reads, whole writes, errors named."""

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress

from unified_cache.errors import StorageError, StorageFullError
from unified_cache.storage_backends.directory.disk import Disk

__all__ = [
    "DIRECTORY_FLAGS",
    "READ_FLAGS",
    "WRITE_FLAGS",
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
    "write_all",
    "write_at",
]

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Never follows a link and never waits for the other end of a FIFO."""

WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_BUFFERS_MAX = os.sysconf("SC_IOV_MAX")
"""Buffers that one readv or writev takes; 1024 on Linux."""

_BEYOND = memoryview(bytearray(1))
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


def write_all(disk: Disk, fd: int, buffers: Sequence[memoryview]) -> None:
    """Write the buffers one after the other, however many calls it takes."""
    if len(buffers) == 1 and disk.write(fd, buffers[0]) == buffers[0].nbytes:
        return
    rest = _BuffersLeft(buffers)
    if len(buffers) == 1:
        rest.skip(disk.lseek(fd, 0, os.SEEK_CUR))
    while rest.buffers:
        rest.skip(disk.writev(fd, rest.buffers[:_BUFFERS_MAX]))


def read_all(disk: Disk, fd: int, buffers: Sequence[memoryview], wanted_bytes: int) -> bool:
    """Fill the buffers one after the other; False where the file is shorter or longer than they are.

    It asks for a byte more than they hold, which tells so without a look at the file's length.
    """
    if len(buffers) < _BUFFERS_MAX:
        count = disk.readv(fd, (*buffers, _BEYOND))
        if count >= wanted_bytes:
            return count == wanted_bytes
    else:
        count = 0
    rest = _BuffersLeft(buffers)
    rest.skip(count)
    while rest.buffers:
        count = disk.readv(fd, rest.buffers[:_BUFFERS_MAX])
        if not count:
            return False
        rest.skip(count)
    return not disk.readv(fd, [_BEYOND])


def write_at(disk: Disk, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write the buffers one after the other from an offset on, however many calls it takes."""
    if len(buffers) == 1 and disk.pwritev(fd, buffers, offset) == buffers[0].nbytes:
        return
    rest = _BuffersLeft(buffers)
    while rest.buffers:
        count = disk.pwritev(fd, rest.buffers[:_BUFFERS_MAX], offset)
        rest.skip(count)
        offset += count


def read_at(disk: Disk, fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
    """Fill the buffers one after the other from an offset on; False where the file ends before they do."""
    if len(buffers) == 1 and disk.preadv(fd, buffers, offset) == buffers[0].nbytes:
        return True
    rest = _BuffersLeft(buffers)
    while rest.buffers:
        count = disk.preadv(fd, rest.buffers[:_BUFFERS_MAX], offset)
        if not count:
            return False
        rest.skip(count)
        offset += count
    return True


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


class _BuffersLeft:
    """Rest of a run of buffers: the bytes still to be read or written."""

    __slots__ = ("buffers",)

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.buffers = [buffer.cast("B") for buffer in buffers if buffer.nbytes]

    def skip(self, count: int) -> None:
        """Take ``count`` bytes off the front."""
        done = 0
        while done < len(self.buffers) and count >= self.buffers[done].nbytes:
            count -= self.buffers[done].nbytes
            done += 1
        del self.buffers[:done]
        if count:
            self.buffers[0] = self.buffers[0][count:]


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

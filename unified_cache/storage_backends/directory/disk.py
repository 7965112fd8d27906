"""Calls on files that the stores in a directory make: their one seam to the operating system.

What Linux has and another system may lack is bound when it is first needed, or replaced by a call that does as much:
nothing but the holes of ``packed:`` depends on Linux.
"""

import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import ClassVar, cast

from unified_cache.core.errors import StorageError, StorageFullError
from unified_cache.core.seal import PageChecksum
from unified_cache.storage_backends.directory.read_queue import FileRead, FileReads, ReadQueues

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
"""File systems without a disk: they have everything in memory and cannot say so, and a sync of theirs does nothing."""

_PUNCH_HOLE = 0x01 | 0x02

_OPENAT2 = 437
"""Number of openat2(2) on every Linux, 5.6 and later."""

_RESOLVE_CACHED = 0x20
"""Look a name up in memory alone; Linux 5.12 and later."""

_CACHESTAT = 451
"""Number of cachestat(2) on every Linux, 6.5 and later; C libraries have no call of that name yet."""

_Fallocate = Callable[[int, int, int, int], int]
_VectoredCall = Callable[[int, Sequence[memoryview], int], int]


@cache
def _fallocate() -> _Fallocate | None:
    """Bind fallocate(2); None where the C library has none, as on macOS."""
    try:
        found = ctypes.CDLL(None, use_errno=True).fallocate
    except AttributeError:
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return cast("_Fallocate", found)


class _CacheStatRange(ctypes.Structure):
    """Range that cachestat(2) is asked about."""

    _fields_: ClassVar = [("offset", ctypes.c_uint64), ("count", ctypes.c_uint64)]


class _CacheStat(ctypes.Structure):
    """Answer of cachestat(2), in pages of the memory of the system."""

    _fields_: ClassVar = [
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "evicted_lately")
    ]


class _OpenHow(ctypes.Structure):
    """Argument of openat2(2): flags, mode, and where a name may be looked up."""

    _fields_: ClassVar = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


@cache
def _how_cached(flags: int) -> _OpenHow:
    return _OpenHow(flags, 0, _RESOLVE_CACHED)


@cache
def _syscall() -> Callable[..., int] | None:
    """Bind syscall(2) of the C library, for calls that it has no name for; None where this system is no Linux.

    For calls that wait for nothing: the interpreter lock is kept meanwhile.
    """
    if sys.platform != "linux":
        return None
    try:
        found = ctypes.PyDLL(None, use_errno=True).syscall
    except AttributeError:
        return None
    found.restype = ctypes.c_long
    return cast("Callable[..., int]", found)


@cache
def _read_queues() -> ReadQueues:
    return ReadQueues()


def _read_cached(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    return os.preadv(fd, buffers, offset, os.RWF_NOWAIT)


def _refuse_cached(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Refuse, as a file system does that cannot tell what it has in memory."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


_ESCAPE = re.compile(r"\\([0-7]{3})")


def missing_mount(
    path: Path, fstab: Path = Path("/etc/fstab"), mounts: Path = Path("/proc/self/mountinfo")
) -> Path | None:
    """Return where above ``path`` a file system is to be mounted and is not; None where nobody knows of one."""
    try:
        expected, mounted = _column(fstab, 1), _column(mounts, 4)
    except OSError:
        return None
    # Of what is mounted nothing is asked: a server that is gone would hold the call.
    missing = {Path(os.path.realpath(each)) for each in expected - mounted}
    place = Path(os.path.realpath(path))
    # The nearest one decides: what is mounted below one that is missing is a place of its own.
    found = next((each for each in (place, *place.parents) if each in missing | mounted), None)
    return None if found is None or found in mounted else found


def _column(table: Path, column: int) -> set[Path]:
    """Return the paths in a column of a table of mounts."""
    lines = [line.split() for line in table.read_text("utf-8", "surrogateescape").splitlines() if line[:1] != "#"]
    names = [fields[column] for fields in lines if len(fields) > column and fields[column].startswith("/")]
    return {Path(_ESCAPE.sub(lambda octal: chr(int(octal[1], 8)), name)) for name in names}


class Disk:
    """Every call on files that a store in a directory makes, as the operating system has it.

    A test passes one whose calls fail, fall short or are counted. The store asks nobody else, so what such a disk
    does not see did not happen.
    """

    makedirs = staticmethod(os.makedirs)
    mkdir = staticmethod(os.mkdir)
    dup2 = staticmethod(os.dup2)
    rmdir = staticmethod(os.rmdir)
    rmtree = staticmethod(shutil.rmtree)
    open = staticmethod(os.open)
    close = staticmethod(os.close)
    flock = staticmethod(fcntl.flock)
    access = staticmethod(os.access)
    stat = staticmethod(os.stat)
    fstat = staticmethod(os.fstat)
    fstatvfs = staticmethod(os.fstatvfs)
    statvfs = staticmethod(os.statvfs)
    read = staticmethod(os.read)
    pread = staticmethod(os.pread)
    preadv = staticmethod(cast("_VectoredCall", os.preadv))
    preadv_cached = staticmethod(_read_cached if "RWF_NOWAIT" in vars(os) else _refuse_cached)
    write = staticmethod(os.write)
    pwrite = staticmethod(os.pwrite)
    pwritev = staticmethod(cast("_VectoredCall", os.pwritev))
    utime = staticmethod(os.utime)
    chmod = staticmethod(os.chmod)
    fsync = staticmethod(os.fsync)
    fdatasync = staticmethod(os.fdatasync if "fdatasync" in vars(os) else os.fsync)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)

    def fsync_each(self, fds: Sequence[int]) -> list[OSError | None]:
        """Sync several files or directories at a time; return what went wrong with each.

        Each waits for the disk to have all of it, and those that wait together wait for the same commit of the file
        system's journal: 16 take about as long as two.
        """
        unknown = OSError(errno.EIO, f"{os.strerror(errno.EIO)}: a sync did not return")
        outcomes: list[OSError | None] = [unknown] * len(fds)

        def sync(number: int) -> None:
            outcomes[number] = sync_outcome(self, fds[number])

        threads: list[Thread] = []
        for number in range(1, len(fds)):
            thread = Thread(target=sync, args=(number,), name="storage-sync", daemon=True)
            try:
                thread.start()
                threads.append(thread)
            except RuntimeError:  # the system has no thread left
                sync(number)
        if fds:
            sync(0)
        for thread in threads:
            thread.join()
        return outcomes

    @staticmethod
    def read_each(reads: Iterable[FileRead], depth: int) -> FileReads:
        """Read from files that read directly, ``depth`` at a time; yield reads as they end.

        Each comes with the bytes that were read, which like those of ``preadv`` may be less than it was asked for, or
        with what went wrong. The next are taken when there is room for them. Raises OSError, with none taken, where the
        system has no queue for them.
        """
        return _read_queues().read(reads, depth)

    @staticmethod
    def has_cached(fd: int, start: int, count: int) -> bool:
        """Return whether the system has any byte of a range of a file in memory; EOPNOTSUPP where it cannot tell."""
        call = _syscall()
        found = _CacheStat()
        if call is None or call(_CACHESTAT, fd, ctypes.byref(_CacheStatRange(start, count)), ctypes.byref(found), 0):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return bool(found.cached)

    @staticmethod
    def open_cached(name: str, flags: int, *, dir_fd: int) -> int:
        """Open a file whose name is in memory, leaving no time of access; EAGAIN where it is not, EPERM, EOPNOTSUPP."""
        call = _syscall()
        if call is None or "O_NOATIME" not in vars(os):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        how = _how_cached(flags | os.O_NOATIME)
        fd = call(_OPENAT2, dir_fd, name.encode(), ctypes.byref(how), ctypes.sizeof(how))
        if fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)
        return fd

    @staticmethod
    def leave_access_time(fd: int) -> None:
        """Make reads of a descriptor leave no time of access behind; EPERM where the file is somebody else's."""
        if "O_NOATIME" in vars(os):
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NOATIME)

    @staticmethod
    def begin_direct(fd: int) -> None:
        """Make reads of a descriptor bypass the page cache; EINVAL, as a rule, where that cannot be."""
        if "O_DIRECT" not in vars(os):
            raise OSError(errno.EINVAL, f"{os.strerror(errno.EINVAL)}: this system has no O_DIRECT")
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)

    def missing_mount(self, path: Path) -> Path | None:
        """Return what ``missing_mount`` does by the tables of this system."""
        return missing_mount(path)

    @staticmethod
    def begin_reading(fd: int) -> None:
        """Ask the system to read a file into its memory, and wait for nothing."""
        if "posix_fadvise" in vars(os):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)

    @staticmethod
    def listdir(fd: int) -> list[str]:
        """List the names in an open directory, in no order."""
        return os.listdir(fd)

    @staticmethod
    def file_system_of(fd: int) -> str:
        """Return the kind of file system that an open file is on, as ``ext4``; empty where nobody knows."""
        device = os.fstat(fd).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        try:
            with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as mounts:
                for line in mounts:
                    mount, _, kind = line.partition(" - ")
                    if mount.split(" ")[2] == wanted:
                        return kind.partition(" ")[0]
        except (OSError, IndexError):
            return ""
        return ""

    @staticmethod
    def has_data(fd: int, start: int, end: int) -> bool:
        """Return whether a range of a file takes room; where nobody knows, it does. It moves the offset of the file."""
        if "SEEK_DATA" not in vars(os):
            return start < end
        try:
            return os.lseek(fd, start, os.SEEK_DATA) < end
        except OSError as error:
            return start < end and error.errno != errno.ENXIO

    @staticmethod
    def punch(fd: int, start: int, count: int) -> None:
        """Make a hole in a file, which gives its blocks back; EOPNOTSUPP, and nothing changed, where there are none."""
        fallocate = _fallocate()
        if fallocate is None:
            raise OSError(errno.EOPNOTSUPP, f"{os.strerror(errno.EOPNOTSUPP)}: this system has no fallocate")
        if fallocate(fd, _PUNCH_HOLE, start, count):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def sync_outcome(disk: Disk, fd: int) -> OSError | None:
    """Sync a descriptor; return the error of it, None where there is none."""
    try:
        disk.fsync(fd)
    except OSError as error:
        return error
    return None


READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Never follows a link and never waits for the other end of a FIFO."""

WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

BUFFERS_MAX = os.sysconf("SC_IOV_MAX")
"""Buffers that one readv or writev takes; 1024 on Linux."""

PIECE_BYTES = 1 << 20
"""Bytes of a page that are read before they are added to its checksum, which finds them in the processor's caches."""

BEYOND = memoryview(bytearray(1))
"""For the byte after a page, which is not there; nobody looks at it."""

_DISTRUSTED = stat.S_ISVTX
"""The sticky bit, which no system gives a meaning on files, nor on directories that their owner alone may write."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PASSING = frozenset(
    {errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.ESTALE}
)


def storage_error(error: OSError, doing: str) -> StorageError:
    """Return the store's error for one of the operating system; ``doing`` names what failed and the path."""
    message = f"{doing}: {error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})"
    if error.errno in _FULL:
        return StorageFullError(message)
    return StorageError(message, retryable=error.errno in _PASSING)


class StorageFaults:
    """Raise the store's error for one of the operating system in a ``with`` block; ``doing`` as ``storage_error``."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, OSError):
            raise storage_error(error, self._doing) from error


def sync_or_distrust(disk: Disk, fd: int) -> None:
    """Sync a file or directory; where that raises, it is distrusted: a second sync would say that it was written."""
    try:
        disk.fsync(fd)
    except OSError:
        distrust(disk, fd)
        raise


def distrust(disk: Disk, fd: int) -> None:
    """Mark a file or a directory in which a sync failed, for every process until the power goes.

    Linux reads pages that it could not write from memory as if they were written; the mark is in the same memory.
    """
    with suppress(OSError):
        disk.chmod(fd, stat.S_IMODE(disk.fstat(fd).st_mode) | _DISTRUSTED)


def is_distrusted(status: os.stat_result) -> bool:
    """Return whether a status is that of a file or a directory in which a sync failed."""
    return bool(status.st_mode & _DISTRUSTED)


def close_quietly(disk: Disk, fd: int) -> None:
    """Close a descriptor through which nothing was written; what the system says of it changes nothing."""
    try:
        disk.close(fd)
    except OSError:
        return  # Not by ``suppress``, which costs as much as the close: this is on the path of every read.


@contextmanager
def opened(disk: Disk, path: str | Path, flags: int, *, dir_fd: int) -> Iterator[int]:
    """Open a file or a directory for as long as the block runs; one that it makes is its owner's alone."""
    fd = disk.open(path, flags, 0o600, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        close_quietly(disk, fd)


def anchor(disk: Disk, root_fd: int, name: str) -> None:
    """Sync a directory of the root and the root, so that their names are the same after a crash."""
    with opened(disk, name, DIRECTORY_FLAGS, dir_fd=root_fd) as fd:
        disk.fsync(fd)
    disk.fsync(root_fd)


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


_Read = Callable[[int, Sequence[memoryview], int], int]
"""Fills buffers from an offset of a file on, maybe not all of them; returns how many bytes came."""


def read_at(
    read: _Read,
    fd: int,
    buffers: Sequence[memoryview],
    wanted_bytes: int,
    offset: int = 0,
    checksum: PageChecksum | None = None,
    is_file: bool = False,
) -> bool:
    """Fill buffers, of ``wanted_bytes`` in all, from an offset on; False where the file ends before they do.

    Or where it goes on, and ``is_file`` says that they are all of it. One call does it, as a rule. With a ``checksum``
    it is one for every ``PIECE_BYTES`` of a large page, which are added to it before the next are read.
    """
    if (checksum is None or wanted_bytes < 2 * PIECE_BYTES) and len(buffers) < BUFFERS_MAX:
        count = read(fd, (*buffers, BEYOND) if is_file else buffers, offset)
        if count == wanted_bytes:
            if checksum is not None:
                checksum.add_all(buffers)
            return True
        if not 0 < count < wanted_bytes:
            return False
    rest, done_bytes = BuffersLeft(buffers), 0
    while rest.buffers:  # such a call may stop short of what is there
        count = read(fd, rest.front(sys.maxsize if checksum is None else PIECE_BYTES), offset + done_bytes)
        if not count:
            return False
        filled = rest.take(count)
        if checksum is not None:
            checksum.add(done_bytes, filled)
        done_bytes += count
    return not (is_file and read(fd, (BEYOND,), offset + done_bytes))


def size_of(disk: Disk, root_fd: int, path: str) -> int | None:
    """Return the length of a regular file below a directory, None where there is none."""
    try:
        status = disk.stat(path, dir_fd=root_fd, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def missing_bytes(disk: Disk, fd: int, wanted_bytes: int) -> int:
    """Return how much less than that is free on the file system; a write will say what is wrong with one that fails."""
    try:
        status = disk.fstatvfs(fd)
    except OSError:
        return 0
    return wanted_bytes - int(status.f_bavail) * int(status.f_frsize)


def disk_bytes(disk: Disk, place: int | Path) -> int | None:
    """Return the size of the file system of a descriptor or a path; None where it does not say."""
    try:
        status = disk.statvfs(place)
    except OSError:
        return None
    return int(status.f_blocks) * int(status.f_frsize)


def block_bytes(disk: Disk, fd: int) -> int:
    """Return what the file system gives a file at a time; a byte where it does not say."""
    try:
        return max(int(disk.fstatvfs(fd).f_frsize), 1)
    except OSError:
        return 1


def in_blocks(block_bytes: int, object_bytes: int) -> int:
    """Return what a file of a length takes of the file system, as ``du`` counts it."""
    return -(-object_bytes // block_bytes) * block_bytes


def missing_inodes(disk: Disk, fd: int, wanted_count: int) -> int:
    """Return how many files less than that the file system takes; 0 where it sets no limit to their number."""
    try:
        status = disk.fstatvfs(fd)
    except OSError:
        return 0
    return wanted_count - int(status.f_favail) if status.f_files else 0


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

"""The one seam between the file store and the operating system."""

import ctypes
import fcntl
import os
import shutil

__all__ = ["Disk"]

_PUNCH_HOLE = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, see fallocate(2)."""

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Disk:
    """Every call on files that the file store makes, as the operating system has it.

    A test passes one whose calls fail, fall short or are counted. The store asks nobody else, so what such a disk
    does not see did not happen.
    """

    makedirs = staticmethod(os.makedirs)
    mkdir = staticmethod(os.mkdir)
    rmdir = staticmethod(os.rmdir)
    rmtree = staticmethod(shutil.rmtree)
    open = staticmethod(os.open)
    close = staticmethod(os.close)
    flock = staticmethod(fcntl.flock)
    access = staticmethod(os.access)
    stat = staticmethod(os.stat)
    fstat = staticmethod(os.fstat)
    fstatvfs = staticmethod(os.fstatvfs)
    lseek = staticmethod(os.lseek)
    read = staticmethod(os.read)
    pread = staticmethod(os.pread)
    preadv = staticmethod(os.preadv)
    readv = staticmethod(os.readv)
    write = staticmethod(os.write)
    writev = staticmethod(os.writev)
    pwrite = staticmethod(os.pwrite)
    pwritev = staticmethod(os.pwritev)
    utime = staticmethod(os.utime)
    fsync = staticmethod(os.fsync)
    fdatasync = staticmethod(os.fdatasync)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)

    @staticmethod
    def listdir(fd: int) -> list[str]:
        """List the names in an open directory, in no order."""
        return os.listdir(fd)

    @staticmethod
    def punch(fd: int, start: int, count: int) -> None:
        """Give the blocks of a range of a file back to the file system; it reads as zeros from now on."""
        if _fallocate(fd, _PUNCH_HOLE, start, count):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

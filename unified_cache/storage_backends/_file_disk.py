"""The one seam between the file store and the operating system."""

import fcntl
import os
import shutil

__all__ = ["Disk"]


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
    readv = staticmethod(os.readv)
    write = staticmethod(os.write)
    writev = staticmethod(os.writev)
    utime = staticmethod(os.utime)
    fsync = staticmethod(os.fsync)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)

    @staticmethod
    def listdir(fd: int) -> list[str]:
        """List the names in an open directory, in no order."""
        return os.listdir(fd)

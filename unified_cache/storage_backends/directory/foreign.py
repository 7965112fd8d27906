"""Foreign files: links, directories and files of another length under the name of an object, removed and counted."""

import errno
import stat
from contextlib import suppress
from threading import Lock

from unified_cache.storage_backends.directory.descriptors import Directory
from unified_cache.storage_backends.directory.root import StoreRoot

__all__ = ["NOT_A_FILE", "UNREADABLE", "ForeignFiles", "is_whole"]

NOT_A_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR})
"""Errors of ``open`` for a link, a socket or a device without driver."""

UNREADABLE = frozenset(
    number for number, name in errno.errorcode.items() if name in {"EIO", "EACCES", "EPERM", "EUCLEAN", "EBADMSG"}
)
"""Errors that say that one object cannot be read, not that none can: a bad block, a wrong owner. By name, for Linux
alone has EUCLEAN."""


class ForeignFiles:
    """Clears away links, FIFOs, directories and files of another length. Thread-safe."""

    def __init__(self, root: StoreRoot) -> None:
        self._root = root
        self._count = 0
        self._guard = Lock()

    @property
    def count(self) -> int:
        """Intruders found so far."""
        return self._count

    def note(self) -> None:
        """Count one that the next put replaces as it is."""
        with self._guard:
            self._count += 1

    def clear(self, directory: Directory, name: str, object_bytes: int) -> None:
        """Take away what stands under a name unless it is an object of that length after all.

        It is moved aside first, so whoever puts the object meanwhile loses nothing: what was moved is looked at again,
        and a whole object goes back.
        """
        self.note()
        disk, aside = self._root.disk, self._root.new_temp()
        try:
            disk.rename(name, aside, src_dir_fd=directory.fd, dst_dir_fd=self._root.writer_fd)
        except OSError:
            return  # It is gone, or it stays: a put says so.
        with suppress(OSError):
            status = disk.stat(aside, dir_fd=self._root.writer_fd, follow_symlinks=False)
            if is_whole(status.st_mode, status.st_size, object_bytes):
                disk.rename(aside, name, src_dir_fd=self._root.writer_fd, dst_dir_fd=directory.fd)
                return
        try:
            disk.unlink(aside, dir_fd=self._root.writer_fd)
        except OSError:
            disk.rmtree(aside, ignore_errors=True, dir_fd=self._root.writer_fd)


def is_whole(mode: int, size_bytes: int, object_bytes: int) -> bool:
    """Tell whether a status is that of an object of a length."""
    return stat.S_ISREG(mode) and size_bytes == object_bytes

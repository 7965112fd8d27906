"""Whether other processes are in the directory of a file store, or were there since this one last looked."""

import os

from unified_cache.storage_backends.directory.descriptors import close_quietly
from unified_cache.storage_backends.directory.root import StoreRoot

__all__ = ["Visits"]

_NAME = "visits"
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Visits:
    """A file that grows by a byte whenever the store is opened, so that one who came and went is noticed.

    Not thread-safe.
    """

    def __init__(self, root: StoreRoot) -> None:
        self._root = root
        self._count = -1
        self.is_alone = False
        """Whether no other process was in the store at the last look."""

    @classmethod
    def enter(cls, root: StoreRoot) -> "Visits":
        """Count this process as a visitor.

        Raises:
            OSError: the file cannot be written.
        """
        fd = root.disk.open(_NAME, _FLAGS, 0o600, dir_fd=root.fd)
        try:
            root.disk.write(fd, b"\n")
        finally:
            close_quietly(root.disk, fd)
        return cls(root)

    def forget(self) -> None:
        """Let the next look find others."""
        self.is_alone = False

    def look(self) -> bool:
        """Return whether no other process has been in the store since the last look.

        Raises:
            OSError: the directory cannot be read.
        """
        before = (self._count, self.is_alone)
        try:
            # The count first: who enters after this is in the store, or counted the next time.
            self._count = self._root.disk.stat(_NAME, dir_fd=self._root.fd, follow_symlinks=False).st_size
        except FileNotFoundError:
            self._count = -1
        self._root.remove_dead()
        self.is_alone = self._root.is_alone()
        return before == (self._count, True) and self.is_alone

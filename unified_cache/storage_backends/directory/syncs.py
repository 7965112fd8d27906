"""Syncs of a batch: all at a time where each waits for a disk, one after the other where there is none to wait for."""

from collections.abc import Sequence

from unified_cache.storage_backends.directory.disk import IN_MEMORY, Disk

__all__ = ["BatchSyncs"]


class BatchSyncs:
    """Syncs files and directories of one store, all on one file system. Thread-safe.

    Those that wait together wait for one commit of the file system's journal, and each needs a thread for it. A file
    system without a disk waits for nothing: there a thread costs several times what a page does.
    """

    __slots__ = ("_disk", "_is_memory")

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._is_memory: bool | None = None
        """Whether the file system is memory; None until it was asked, by the first batch of several."""

    def sync(self, fds: Sequence[int]) -> list[OSError | None]:
        """Sync every one of them; return what went wrong with each."""
        if len(fds) > 1 and self._is_memory is None:
            self._is_memory = self._disk.file_system_of(fds[0]) in IN_MEMORY
        if len(fds) > 1 and not self._is_memory:
            return self._disk.fsync_each(fds)
        return [self._outcome(fd) for fd in fds]

    def _outcome(self, fd: int) -> OSError | None:
        try:
            self._disk.fsync(fd)
        except OSError as error:
            return error
        return None

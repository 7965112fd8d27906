"""The fan-out directories of a file store, kept open between calls."""

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock

from unified_cache.storage_backends.directory.descriptors import (
    DIRECTORY_FLAGS,
    Directory,
    close_quietly,
    distrust,
    sync_or_distrust,
)
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.root import StoreRoot
from unified_cache.storage_backends.directory.syncs import BatchSyncs
from unified_cache.storage_backends.file.layout import FANS

__all__ = ["OpenDirectories"]


class OpenDirectories:
    """The fan-out directories of a store, kept open up to a number, the first opened closed first.

    Thread-safe; a directory in use outlives its place here. Finding an open one takes no guard and moves nothing:
    it is on the path of every read, and digests spread over all directories alike anyway.
    """

    def __init__(self, disk: Disk, root_fd: int, open_max: int) -> None:
        self._disk = disk
        self._root_fd = root_fd
        self._open_max = open_max
        self._syncs = BatchSyncs(disk)
        self._open: dict[tuple[bytes, str], Directory] = {}
        self._guard = Lock()

    def kept(self, identity: bytes, fan: str) -> Directory | None:
        """Return a directory that is open already."""
        return self._open.get((identity, fan))

    def find(self, identity: bytes, fan: str) -> Directory | None:
        """Return a directory, None where there is none."""
        key = (identity, fan)
        found = self._open.get(key)
        if found is not None:
            return found
        try:
            fd = self._disk.open(f"{identity.hex()}/{fan}", DIRECTORY_FLAGS, dir_fd=self._root_fd)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise
        directory = Directory(self._disk, fd)
        with self._guard:
            self._open[key] = directory
            closed = self._open.pop(next(iter(self._open))) if len(self._open) > self._open_max else None
        del closed  # its descriptor is closed here, outside the guard
        return directory

    def make(self, root: StoreRoot, identity: bytes, fan: str) -> Directory:
        """Return a directory, made if absent.

        Raises:
            StorageError: other processes undid it all the time.
            OSError: it cannot be made.
        """
        directory = self.find(identity, fan)
        if directory is not None:
            return directory
        path = f"{identity.hex()}/{fan}"
        try:
            with suppress(FileExistsError):
                self._disk.mkdir(path, 0o700, dir_fd=self._root_fd)
        except FileNotFoundError:
            root.make_directory(identity)
            with suppress(FileExistsError):
                self._disk.mkdir(path, 0o700, dir_fd=self._root_fd)
        directory = self.find(identity, fan)
        if directory is None:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return directory

    def drop_all(self) -> None:
        """Open each directory anew when it is next asked for: those kept may have been removed under their names."""
        with self._guard:
            self._open.clear()

    def sync(self, touched: Mapping[Directory, bytes]) -> None:
        """Make the names in directories survive a crash, and theirs too; each comes with its identity."""
        faults = self._syncs.sync([directory.fd for directory in touched])
        failed = [(directory, fault) for directory, fault in zip(touched, faults, strict=True) if fault is not None]
        for directory, _ in failed:
            distrust(self._disk, directory.fd)
        for _, fault in failed:
            raise fault
        for identity in {identity for directory, identity in touched.items() if not directory.anchored}:
            fd = self._disk.open(identity.hex(), DIRECTORY_FLAGS, dir_fd=self._root_fd)
            try:
                self._disk.fsync(fd)
            finally:
                close_quietly(self._disk, fd)
            self._disk.fsync(self._root_fd)
        for directory in touched:
            directory.anchored = True

    def sync_all(self, identity: bytes) -> None:
        """Make the names in every directory of one identity, and those that are gone from it, survive a crash."""
        for fan in FANS:
            directory = self.find(identity, fan)
            if directory is not None:
                sync_or_distrust(self._disk, directory.fd)

    def close(self) -> None:
        """Close every directory; no call may be in flight."""
        with self._guard:
            # A traceback that somebody keeps may refer to a directory; its descriptor must not live as long.
            for directory in self._open.values():
                directory.close()
            self._open.clear()

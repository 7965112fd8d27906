"""A file store opened to be read alone: by its owner or root, on a mount that cannot be written, beside an engine."""

import os
from collections.abc import Sequence
from pathlib import Path

from unified_cache.seal import Label
from unified_cache.storage_backends.catalog import UsedBetween
from unified_cache.storage_backends.directory.descriptors import Directory
from unified_cache.storage_backends.directory.direct import CALL_BYTES
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.front import DirectoryReader
from unified_cache.storage_backends.directory.root import open_root_to_read
from unified_cache.storage_backends.file.fan_directories import OpenDirectories
from unified_cache.storage_backends.file.page_reader import PageReader
from unified_cache.storage_backends.file.store import DIRECTORIES_OPEN_MAX, FORMAT
from unified_cache.storage_backends.protocol import Answer, Capability, PageIO, Scan

__all__ = ["FileReader"]


class FileReader(DirectoryReader):
    """Reads a file store and changes nothing in it: no temp directory, no visit, no time of use, nothing removed.

    Engines may use the store meanwhile: an object is whole under its name or not there. Thread-safe.
    """

    def __init__(self, disk: Disk, path: Path, root: Directory) -> None:
        super().__init__(disk, path, root.fd, FORMAT, ", opened to be read,")
        self._root = root
        self._directories = OpenDirectories(disk, root.fd, DIRECTORIES_OPEN_MAX)
        self._pages = PageReader(disk, path, root.fd, self._directories, _leave)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, disk: Disk | None = None) -> "FileReader":
        """Open the store in ``path``.

        Raises:
            StorageError: there is none, or the directory cannot be read.
        """
        disk = disk or Disk()
        return cls(disk, Path(path), open_root_to_read(disk, Path(path), FORMAT))

    def capability(self) -> Capability:
        """Say what the store can do; the cap of whoever writes it is not known."""
        with self._calls:
            return Capability("file", durable=True, bytes_max=None, call_bytes=CALL_BYTES)

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Tell for each label whether a file of that name is there."""
        with self._calls:
            return self._pages.exists(labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Read each page straight into its buffers; what lies in its place and is no object stays, and is FLAWED."""
        with self._calls:
            return self._pages.read(pages)

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of one identity in the order of their names.

        Raises:
            InputError: the cursor is not one that a scan returned, or the identity is not a digest.
        """
        with self._calls:
            return self._pages.scan(identity, cursor)

    def used_between(self, identity: bytes) -> UsedBetween | None:
        """Compare modification times; None without objects. Linear in objects.

        Raises:
            StorageError: a directory cannot be listed.
        """
        with self._calls:
            return self._pages.used_between(identity)

    def _let_go(self) -> None:
        self._directories.close()
        self._root.close()


def _leave(directory: Directory, name: str, object_bytes: int) -> None:
    """Leave what is no object where it is."""

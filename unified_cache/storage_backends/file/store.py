"""A store in one directory, one file per page: what an embedded cache keeps beyond its process by default.

A page is written into a temp file of this process, made durable if it must be, and only then renamed to its
name, so that a name is either absent or whole, whatever crashes. Reads believe nothing: a link, and what does not
give exactly as many bytes as the page has, is a miss and is cleared away. Bytes that rot in place are not noticed
here; wrap the store in ``VerifiedStorage`` for that.
"""

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from unified_cache.seal import Label
from unified_cache.storage_backends.catalog import UsedBetween
from unified_cache.storage_backends.directory.address import FREE_BYTES_MIN, check_limits, parse_address
from unified_cache.storage_backends.directory.descriptors import storage_error
from unified_cache.storage_backends.directory.direct import CALL_BYTES
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.foreign import ForeignFiles
from unified_cache.storage_backends.directory.front import DirectoryStorage
from unified_cache.storage_backends.directory.root import StoreFormat, StoreRoot, open_root
from unified_cache.storage_backends.directory.stamps import Clock, Stamps
from unified_cache.storage_backends.file.fan_directories import OpenDirectories
from unified_cache.storage_backends.file.layout import place_of
from unified_cache.storage_backends.file.page_reader import PageReader
from unified_cache.storage_backends.file.page_writer import PageWriter
from unified_cache.storage_backends.file.quota import FileQuota
from unified_cache.storage_backends.file.visits import Visits
from unified_cache.storage_backends.memory_reads import RowsTarget
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, Scan

__all__ = ["FileCounts", "FileStorage", "open_url"]

FORMAT = StoreFormat("file store", 2)
"""Format of the layout in ``file.layout``."""

DIRECTORIES_OPEN_MAX = 512
"""Fan-out directories kept open: 32 identities in full, and half of the usual limit of 1024 descriptors."""


@dataclass(frozen=True, slots=True)
class FileCounts:
    """Counts of what one process met since it opened the store."""

    evicted_count: int
    """Objects removed to make room."""
    declined_count: int
    """Pages not stored because there was no room under the cap or on the file system."""
    unremovable_count: int
    """Objects that should have been removed, but could not be."""
    foreign_count: int
    """Links, FIFOs, directories, files of another length and other pages found in the place of an object."""
    unreadable_count: int
    """Objects that were there and could not be read: misses until they are put again."""


class FileStorage(DirectoryStorage):
    """Keep sealed pages in files under one directory, with an optional cap and the least recently used going first.

    Several processes may open one directory; each finds what the others stored, and a page that another
    removed is a miss. The cap binds them all together, see ``FileQuota`` for by how much they may exceed it,
    and counts lengths of objects, not blocks. A batch never evicts its own pages, nor an object that another one
    needs before that one: of a chain longer than the cap the first pages are stored, the rest declined.
    Recency is kept in modification times and survives a restart; a crash forgets when pages were last read, of at
    most ``PAGES_WAITING_MAX`` of them, no further back than ``STAMP_GRAIN_NS`` before the last call. Where somebody
    removes the directory, its pages are misses, and the next put or register makes it anew. Local file systems
    only: locks on a network are not what they are here.

    Thread-safe. Objects are read and written outside the guards.
    """

    def __init__(self, root: StoreRoot, directories: OpenDirectories, quota: FileQuota, stamps: Stamps) -> None:
        super().__init__(root, quota, stamps)
        self._directories = directories
        self._foreign = ForeignFiles(root)
        self._quota = quota
        self._page_reader = PageReader(root.disk, root.path, root.fd, directories, self._foreign.clear)
        self._page_writer = PageWriter(root, directories, quota, self._foreign)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        bytes_max: int | None = None,
        free_bytes_min: int = FREE_BYTES_MIN,
        clock: Clock = time.time_ns,
        notes_reads: bool = True,
        new_writer: Callable[[], str] = partial(secrets.token_hex, 8),
        disk: Disk | None = None,
    ) -> "FileStorage":
        """Open the store in ``path``, made with mode 0700 if absent; evict what exceeds the cap.

        With a cap it lists every object, and keeps some 400 bytes of memory for each; without one it does neither.

        A put is declined that would leave less than ``free_bytes_min`` free on the file system. ``clock`` gives
        nanoseconds for modification times; without ``notes_reads`` a page that is read is none that is used.
        ``new_writer`` gives a name that no other process uses, ``disk`` the calls of the operating system.

        Raises:
            ConfigError: bytes_max or free_bytes_min is negative, or no system takes the path.
            StorageError: the directory cannot be used or is not ours, see its message. It was not changed.
        """
        check_limits(bytes_max, free_bytes_min)
        root = open_root(disk or Disk(), Path(path), FORMAT, new_writer, is_remade=True)
        try:
            visits = Visits.enter(root)
            if root.is_alone():
                # Earlier versions kept one, for a count that all processes shared.
                root.disk.rmtree("journal", ignore_errors=True, dir_fd=root.fd)
        except OSError as error:
            root.close()
            raise storage_error(error, f"cannot enter the file store in {path}") from error
        directories = OpenDirectories(root.disk, root.fd, DIRECTORIES_OPEN_MAX)
        stamps = Stamps(clock, notes_reads=notes_reads)
        quota = FileQuota(root, bytes_max, directories, stamps, visits, free_bytes_min)
        storage = cls(root, directories, quota, stamps)
        try:
            if bytes_max is not None:
                stamps.outrun(quota.fill())
        except OSError as error:
            storage.close()
            raise storage_error(error, f"cannot list the file store in {path}") from error
        return storage

    @property
    def bytes_used(self) -> int:
        """Bytes of the objects in the store, whoever stored them, summed up now. Linear in objects.

        Raises:
            StorageError: a directory cannot be listed.
        """
        with self._calls:
            try:
                return self._quota.bytes_used()
            except OSError as error:
                raise storage_error(error, f"cannot list the file store in {self._path}") from error

    @property
    def counts(self) -> FileCounts:
        """Counts since the store was opened; a copy."""
        quota = self._quota
        return FileCounts(
            evicted_count=quota.evicted_count,
            declined_count=quota.declined_count,
            unremovable_count=quota.unremovable_count,
            foreign_count=self._foreign.count,
            unreadable_count=self._page_reader.unreadable_count,
        )

    def capability(self) -> Capability:
        """Say what this backend can do."""
        with self._calls:
            return Capability("file", durable=True, bytes_max=self._quota.bytes_max, call_bytes=CALL_BYTES)

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Tell for each label whether a file of that name is there. No access; one stat each."""
        with self._calls:
            return self._page_reader.exists(labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Read each page straight into its buffers; a hit makes it recent."""
        with self._calls:
            hits = self._page_reader.read(pages)
            if Answer.FLAWED in hits:
                self._quota.removed.note(
                    page.label for page, hit in zip(pages, hits, strict=True) if hit is Answer.FLAWED
                )
            self._quota.record(pages, hits)
            self._stamp(self._stamps.note(pages, hits))
            return hits

    def knows(self, labels: Sequence[Label]) -> list[bool]:
        """Tell for each label whether a file has its name, where the system has that name in memory."""
        with self._calls:
            return self._page_reader.know(labels)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Write pages in their order, as far as there is room under the cap and on the file system.

        DURABLE syncs each file before its name appears, and each directory once at the end of the batch. An object
        that is there already is read and verified, then synced; it is written anew where either fails, and where its
        directory has failed to sync before. CACHED believes its length and its header.

        Raises:
            StorageFullError: the file system has no room, or a limit on file sizes was met.
            StorageError: another fault. Files of pages before the one that failed may be there.
        """
        with self._calls:
            stored = self._page_writer.store(pages, self._stamps.new(len(pages)), durable=level is Level.DURABLE)
            return Answer.of_puts(stored)

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects; return how many there were. Not synced: a crash may bring them back."""
        with self._calls:
            there = [label for label, found in zip(labels, self.exists(labels), strict=True) if found]
            self._quota.forget(there)
            removed_count = 0
            for label in there:
                fan, name = place_of(label)
                try:
                    directory = self._directories.find(label.identity, fan)
                    if directory is not None:
                        self._disk.unlink(name, dir_fd=directory.fd)
                        removed_count += 1
                except FileNotFoundError:
                    pass
                except OSError as error:
                    raise self._cannot("remove", label, error) from error
            return removed_count

    def clear(self, identity: bytes) -> int:
        """Remove every object of one identity, a page of the listing at a time. No crash undoes it.

        Raises:
            InputError: the identity is not a digest.
            StorageError: a directory cannot be listed or synced, or an object cannot be removed.
        """
        with self._calls:
            removed_count, cursor, is_over = 0, "", False
            while not is_over:
                found = self.scan(identity, cursor)
                removed_count += self.remove([each.label for each in found.objects])
                cursor, is_over = found.cursor, not found.cursor
            try:
                self._directories.sync_all(identity)
            except OSError as error:
                raise storage_error(error, f"cannot sync {self._path}/{identity.hex()}") from error
            return removed_count

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of one identity in the order of their names; the cursor is the last name listed.

        Raises:
            InputError: the cursor is not one that a scan returned, or the identity is not a digest.
        """
        with self._calls:
            return self._page_reader.scan(identity, cursor)

    def used_between(self, identity: bytes) -> UsedBetween | None:
        """Compare modification times, which are the recency of this store; None without objects. Linear in objects.

        Raises:
            StorageError: a directory cannot be listed.
        """
        with self._calls:
            return self._page_reader.used_between(identity)

    def _read_memory(self, targets: Sequence[RowsTarget]) -> list[bool]:
        return self._page_reader.read_memory(targets)

    def _let_go(self) -> None:
        self._directories.close()

    def _stamp(self, stamps: Mapping[Label, int]) -> None:
        for label, stamp in stamps.items():
            fan, name = place_of(label)
            with suppress(OSError):
                directory = self._directories.find(label.identity, fan)
                if directory is None:
                    continue
                status = self._disk.stat(name, dir_fd=directory.fd, follow_symlinks=False)
                if status.st_mtime_ns < stamp:
                    self._disk.utime(name, ns=(stamp, stamp), dir_fd=directory.fd, follow_symlinks=False)


def open_url(rest: str, bytes_max: int | None) -> FileStorage:
    """Open ``file:DIR`` or ``file:DIR?free=SIZE``, see ``file_address``."""
    address = parse_address(rest)
    return FileStorage.open(address.path, bytes_max=bytes_max, free_bytes_min=address.free_bytes_min)

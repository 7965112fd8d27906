"""Writes of pages into a file store: a draft under a temp name, synced if it must be durable, then renamed."""

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from unified_cache.errors import StorageError
from unified_cache.seal import Label, verify_buffers
from unified_cache.storage_backends.common.lru import page_bytes
from unified_cache.storage_backends.directory.descriptors import (
    READ_FLAGS,
    WRITE_FLAGS,
    Directory,
    close_quietly,
    is_distrusted,
    read_at,
    storage_error,
    sync_or_distrust,
    write_at,
)
from unified_cache.storage_backends.directory.direct import DIRECT_WRITE_BYTES_MIN, DirectWrites, is_block_aligned
from unified_cache.storage_backends.directory.foreign import NOT_A_FILE, UNREADABLE, ForeignFiles, is_whole
from unified_cache.storage_backends.directory.root import StoreRoot
from unified_cache.storage_backends.directory.syncs import BatchSyncs
from unified_cache.storage_backends.file.fan_directories import OpenDirectories
from unified_cache.storage_backends.file.layout import place_of
from unified_cache.storage_backends.file.page_reader import FILES_OPEN_MAX
from unified_cache.storage_backends.file.quota import FileQuota
from unified_cache.storage_backends.protocol import PageIO, StoredObject

__all__ = ["PageWriter"]

_SAME_BYTES = 112
"""At the start of a sealed page: what its label and its length alone decide, see ``unified_cache.seal``."""


@dataclass(slots=True)
class _Draft:
    """A page that is not in the store yet, and for which there is room."""

    page: PageIO
    stored: StoredObject
    """The object that this is to be."""
    directory: Directory
    name: str
    stamp: int
    temp: str = ""
    fd: int = -1
    is_named: bool = False


@dataclass(slots=True)
class _WriteBatch:
    """Pages of one put, and the outcome of each."""

    pages: Sequence[PageIO]
    stamp: int
    durable: bool
    stored: set[Label] = field(default_factory=set)
    touched: dict[Directory, bytes] = field(default_factory=dict)
    """Directories to make durable before the put answers, with the identity each belongs to."""


class PageWriter:
    """Writes pages into the store of one process. Thread-safe."""

    def __init__(self, root: StoreRoot, directories: OpenDirectories, quota: FileQuota, foreign: ForeignFiles) -> None:
        self._root = root
        self._disk = root.disk
        self._directories = directories
        self._quota = quota
        self._foreign = foreign
        self._direct = DirectWrites(root.disk)
        self._syncs = BatchSyncs(root.disk)

    def store(self, pages: Sequence[PageIO], stamp: int, *, durable: bool) -> list[bool]:
        """Store pages, the first with the modification time ``stamp``, each other one a nanosecond earlier.

        Raises:
            StorageError: a fault. Pages that were whole by then are stored, the others have left nothing.
        """
        try:
            return self._store(pages, stamp, durable=durable)
        except StorageError as error:
            if not self._has_mended(error.__cause__, pages):
                raise
        return self._store(pages, stamp, durable=durable)

    def _has_mended(self, cause: BaseException | None, batch: Sequence[PageIO]) -> bool:
        """Mend what made a put fail, where it can be: make anew what somebody removed, evict where inodes are out."""
        match cause:
            case FileNotFoundError():
                try:
                    self._root.restore()
                except OSError as error:
                    raise storage_error(error, f"cannot make anew what was removed from {self._root.path}") from error
                self._directories.drop_all()
                return True
            case OSError(errno=errno.ENOSPC):
                return self._quota.evict_for_inodes(batch)
        return False

    def _store(self, pages: Sequence[PageIO], stamp: int, *, durable: bool) -> list[bool]:
        batch = _WriteBatch(pages, stamp, durable)
        drafts = self._begin(batch)
        granted = self._quota.reserve([draft.stored for draft in drafts], pages)
        drafts = [draft for draft in drafts if draft.page.label in granted]
        try:
            for start in range(0, len(drafts), FILES_OPEN_MAX):
                self._write(drafts[start : start + FILES_OPEN_MAX], batch)
        finally:
            named = [draft.stored for draft in drafts if draft.is_named]
            self._quota.end_grant(named, [draft.stored for draft in drafts if not draft.is_named])
        try:
            self._directories.sync(batch.touched)
        except OSError as error:
            raise storage_error(error, f"cannot sync the directories of {self._root.path}") from error
        stored = [page.label in batch.stored for page in pages]
        self._quota.record(pages, stored)
        return stored

    def _begin(self, batch: _WriteBatch) -> list[_Draft]:
        """Refresh the pages that are there; return a draft for each of the others, none of it made yet."""
        drafts: dict[Label, _Draft] = {}
        for number, page in enumerate(batch.pages):
            label = page.label
            if label in drafts:
                continue
            fan, name = place_of(label)
            try:
                directory = self._directories.make(self._root, label.identity, fan)
                stored = StoredObject(label, page_bytes(page))
                draft = _Draft(page, stored, directory, name, batch.stamp - number)
                is_there = self._refresh(draft, durable=batch.durable)
            except OSError as error:
                raise self._cannot_store(label, error) from error
            if is_there:
                self._note(draft, batch)
            else:
                drafts[label] = draft
        return list(drafts.values())

    def _refresh(self, draft: _Draft, *, durable: bool) -> bool:
        """Make an object that is there as durable as asked for, and recent; False where it is to be written."""
        disk, directory, name = self._disk, draft.directory, draft.name
        # Most puts are of new pages, and asking so costs half of what an exception does.
        if not disk.access(name, os.F_OK, dir_fd=directory.fd):
            return False
        try:
            fd = disk.open(name, READ_FLAGS, dir_fd=directory.fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in NOT_A_FILE | UNREADABLE:
                raise
            self._foreign.note()
            return False
        try:
            status = disk.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                self._foreign.clear(directory, name, draft.stored.object_bytes)
                return False
            is_sound = self._is_sound if durable else self._is_same
            if is_whole(status.st_mode, status.st_size, draft.stored.object_bytes) and is_sound(fd, draft.page):
                if durable and not self._make_durable(fd, status, directory):
                    return False
                disk.utime(fd, ns=(draft.stamp, draft.stamp))
                return True
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
        finally:
            close_quietly(disk, fd)
        # The rename will replace it.
        self._foreign.note()
        return False

    def _make_durable(self, fd: int, status: os.stat_result, directory: Directory) -> bool:
        """Sync a page that is there: it may have been stored CACHED. False where it is to be written anew.

        That is where its file or its directory has failed to sync, now or before.
        """
        if is_distrusted(status) or is_distrusted(self._disk.fstat(directory.fd)):
            return False
        try:
            sync_or_distrust(self._disk, fd)
        except OSError:
            return False
        return True

    def _is_sound(self, fd: int, page: PageIO) -> bool:
        """Tell whether a file is this page to the last byte, by its seal."""
        content = memoryview(bytearray(page_bytes(page)))
        return read_at(self._disk, fd, [content], len(content), 0) and verify_buffers((content,), page.label) is None

    def _is_same(self, fd: int, page: PageIO) -> bool:
        """Tell whether a file says that it is this page; whether its payload is right only a reader finds out."""
        ours = b"".join([buffer[:_SAME_BYTES] for buffer in page.buffers])[:_SAME_BYTES]
        return self._disk.pread(fd, len(ours), 0) == ours

    def _write(self, drafts: Sequence[_Draft], batch: _WriteBatch) -> None:
        """Store a few pages: open all drafts, then move all bytes, then name all.

        At a fault the drafts that are whole are still named, the others go.
        """
        disk = self._disk
        written_count = 0
        draft = drafts[0]
        try:
            try:
                for draft in drafts:
                    draft.temp = self._root.new_temp()
                    draft.fd = disk.open(draft.temp, WRITE_FLAGS, 0o600, dir_fd=self._root.writer_fd)
                for draft in drafts:
                    self._write_content(draft, durable=batch.durable)
                    written_count += 1
            except OSError as error:
                raise self._cannot_store(draft.page.label, error) from error
            finally:
                self._finish(drafts[:written_count], batch)
        finally:
            for left in drafts:
                self._abandon(left)

    def _write_content(self, draft: _Draft, *, durable: bool) -> None:
        """Write the bytes of a page, those of a large one that must be durable straight to the disk."""
        buffers, done_bytes = draft.page.buffers, 0
        if durable and draft.stored.object_bytes >= DIRECT_WRITE_BYTES_MIN and len(buffers) == 1:
            page = buffers[0]
            done_bytes = self._direct.write_front(draft.fd, page) if is_block_aligned(page) else 0
            buffers = (page[done_bytes:],)
        write_at(self._disk, draft.fd, buffers, done_bytes)

    def _finish(self, drafts: Sequence[_Draft], batch: _WriteBatch) -> None:
        """Make drafts durable where asked for, together, then give each its name, up to the first that failed."""
        faults: Sequence[OSError | None] = [None] * len(drafts)
        draft: _Draft | None = None
        try:
            for draft in drafts:
                self._disk.utime(draft.fd, ns=(draft.stamp, draft.stamp))
            if batch.durable and drafts:
                faults = self._syncs.sync([draft.fd for draft in drafts])
            for draft, fault in zip(drafts, faults, strict=True):
                if fault is not None:
                    raise fault
                self._name(draft)
                self._note(draft, batch)
        except OSError as error:
            assert draft is not None
            raise self._cannot_store(draft.page.label, error) from error

    def _name(self, draft: _Draft) -> None:
        """Close a draft and give it its name."""
        fd, draft.fd = draft.fd, -1
        self._disk.close(fd)
        self._disk.rename(draft.temp, draft.name, src_dir_fd=self._root.writer_fd, dst_dir_fd=draft.directory.fd)
        draft.is_named = True

    def _abandon(self, draft: _Draft) -> None:
        """Leave nothing of a draft that got no name."""
        if draft.fd >= 0:
            close_quietly(self._disk, draft.fd)
        if draft.temp and not draft.is_named:
            with suppress(OSError):
                self._disk.unlink(draft.temp, dir_fd=self._root.writer_fd)

    def _note(self, draft: _Draft, batch: _WriteBatch) -> None:
        batch.stored.add(draft.page.label)
        if batch.durable:
            batch.touched[draft.directory] = draft.page.label.identity

    def _cannot_store(self, label: Label, error: OSError) -> StorageError:
        return storage_error(error, f"cannot store {self._root.path}/{label.object_name}")

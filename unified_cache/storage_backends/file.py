"""A store in one directory, one file per page: what an embedded cache keeps beyond its process by default.

A page is written into a temp file of this process, made durable if it must be, and only then renamed to its
name, so that a name is either absent or whole, whatever crashes. Reads believe nothing: what is not a regular
file of exactly the expected length is a miss and is cleared away. Bytes that rot in place are not noticed here;
wrap the store in ``VerifiedStorage`` for that.
"""

import errno
import itertools
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock

from unified_cache.errors import ConfigError, InputError, StorageError
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.seal import Label
from unified_cache.storage_backends._calls import Calls
from unified_cache.storage_backends._file_io import (
    READ_FLAGS,
    WRITE_FLAGS,
    Directories,
    Directory,
    read_all,
    size_of,
    storage_error,
    write_all,
)
from unified_cache.storage_backends._file_layout import (
    IDENTITY_BYTES,
    Found,
    Root,
    identities_in,
    label_of,
    objects_in,
    open_root,
    place_of,
)
from unified_cache.storage_backends._file_manifest import keep_manifest
from unified_cache.storage_backends._file_room import Room
from unified_cache.storage_backends._recency import SCAN_OBJECTS_MAX, Recency, page_bytes
from unified_cache.storage_backends.protocol import Capability, Level, PageIO, Scan, StoredObject

__all__ = ["FileCounts", "FileStorage", "open_url"]

DIRECTORIES_OPEN_MAX = 512
"""Fan-out directories kept open: two identities in full, and half of the usual limit of 1024 descriptors."""

FILES_OPEN_MAX = 16
"""Objects of one call open at a time. Taking 16 through each step together, not one through all steps, makes 1 MiB
pages 10 % faster: between two copies the caches would lose the code of every other step."""

STAMP_GRAIN_NS = 60_000_000_000
"""A read stamps a file only once in so long, as relatime does: hot pages cost no metadata writes."""

_NOT_A_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR})
"""What open says of a link, a socket or a device without driver in the place of an object."""


@dataclass(frozen=True, slots=True)
class FileCounts:
    """What happened in one process since it opened the store."""

    evicted_count: int
    """Objects removed to make room."""
    unremovable_count: int
    """Objects that should have been, but could not be removed."""
    intruders_count: int
    """Links, FIFOs, directories and files of another length found in the place of an object."""


@dataclass(slots=True)
class _Batch:
    """What the pages of one put have in common."""

    durable: bool
    keep: Container[Label]
    begun: set[Label] = field(default_factory=set)
    """Pages that this put writes; one asked for twice is written once."""
    touched: dict[Directory, bytes] = field(default_factory=dict)
    """Directories to make durable before the put answers, with the identity each belongs to."""


@dataclass(slots=True)
class _Draft:
    """A page on its way into the store, under a temp name, with room reserved for it."""

    page: PageIO
    directory: Directory
    name: str
    object_bytes: int
    stamp: int
    temp: str
    fd: int
    """-1 once closed."""


class FileStorage:
    """Keep sealed pages in files under one directory, with an optional cap and the least recently used going first.

    Several processes may open one directory; each finds what the others stored, and a page that another
    removed is a miss. The cap binds what this process knows: what was there when it opened, what it stored,
    and what it read since; so with several writers the directory may exceed it until they read or reopen.
    It counts lengths of objects, not blocks. A batch never evicts its own pages: of a chain longer than the cap the
    first pages are stored, the rest declined. Recency is kept in modification times and survives a
    restart, to within ``STAMP_GRAIN_NS`` for pages that were only read.

    Thread-safe. File I/O runs outside the guard.
    """

    def __init__(self, root: Root, recency: Recency, clock: Callable[[], int]) -> None:
        self._root = root
        self._clock = clock
        self._directories = Directories(root.fd, DIRECTORIES_OPEN_MAX)
        self._room = Room(recency, self._directories)
        self._temp_numbers = itertools.count()
        self._stamp_last = 0
        self._intruders_count = 0
        self._guard = Lock()
        self._calls = Calls(f"the file store in {root.path}")

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        bytes_max: int | None = None,
        clock: Callable[[], int] = time.time_ns,
        new_writer: Callable[[], str] = partial(secrets.token_hex, 8),
    ) -> "FileStorage":
        """Open the store in ``path``, made with mode 0700 if absent; evict what exceeds the cap. Linear in objects.

        ``clock`` gives nanoseconds for modification times, ``new_writer`` a name that no other process uses.

        Raises:
            ConfigError: bytes_max is negative.
            StorageError: the directory cannot be used or is not ours, see its message. It was not changed.
        """
        recency = Recency(bytes_max)
        root = open_root(Path(path), new_writer)
        try:
            found = [known for identity in identities_in(root.fd) for known in objects_in(root.fd, identity)]
        except OSError as error:
            root.close()
            raise storage_error(error, f"cannot list the file store in {path}") from error
        found.sort(key=_age)
        for known in found:
            recency.add(known.label, known.object_bytes)
        storage = cls(root, recency, clock)
        storage._room.reserve(0, ())
        return storage

    @property
    def path(self) -> Path:
        """Directory of the store."""
        return self._root.path

    @property
    def bytes_used(self) -> int:
        """Bytes of the objects this process knows of."""
        return self._room.bytes_used

    @property
    def counts(self) -> FileCounts:
        """What happened since the store was opened; a copy."""
        evicted_count, unremovable_count = self._room.counts
        return FileCounts(evicted_count, unremovable_count, self._intruders_count)

    def capability(self) -> Capability:
        """Say what this backend can do."""
        with self._calls:
            return Capability("file", durable=True, bytes_max=self._room.bytes_max)

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Write the manifest beside the pages, durably, unless it is there already. The slabs are not needed.

        Raises:
            InputError: the identity in the manifest is not a digest.
            StorageError: the manifest that is there says something else under the same digest, or a fault.
        """
        with self._calls:
            if len(manifest.identity) != IDENTITY_BYTES:
                raise InputError(f"an identity has {IDENTITY_BYTES} bytes, found {len(manifest.identity)}")
            keep_manifest(self._root, manifest, self._new_temp())

    def exists(self, labels: Sequence[Label]) -> list[bool]:
        """Tell for each label whether a file of that name is there. No access; one stat each."""
        with self._calls:
            found: list[bool] = []
            for label in labels:
                fan, name = place_of(label)
                try:
                    directory = self._directories.find(label.identity, fan)
                    found.append(directory is not None and size_of(directory, name) is not None)
                except OSError as error:
                    raise self._cannot("look for", label, error) from error
            return found

    def get(self, pages: Sequence[PageIO]) -> list[bool]:
        """Read each page straight into its buffers; a hit makes it recent."""
        with self._calls:
            stamp = self._stamps(len(pages))
            hits: list[bool] = []
            for start in range(0, len(pages), FILES_OPEN_MAX):
                hits += self._read(pages[start : start + FILES_OPEN_MAX], stamp - start)
            self._room.record(pages, hits)
            return hits

    def put(self, pages: Sequence[PageIO], level: Level) -> list[bool]:
        """Write pages in their order; False for those that have no room under the cap.

        DURABLE syncs each file before its name appears, and each directory once at the end of the batch.
        An object that is there already is not written again, only synced.

        Raises:
            StorageFullError: the file system has no room, or a limit on file sizes was met.
            StorageError: another fault. Files of pages before the one that failed may be there.
        """
        with self._calls:
            stamp = self._stamps(len(pages))
            keep = () if self._room.bytes_max is None else {page.label for page in pages}
            batch = _Batch(level is Level.DURABLE, keep)
            stored: list[bool] = []
            for start in range(0, len(pages), FILES_OPEN_MAX):
                stored += self._store(pages[start : start + FILES_OPEN_MAX], stamp - start, batch)
            try:
                self._sync_directories(batch)
            except OSError as error:
                raise storage_error(error, f"cannot sync the directories of {self._root.path}") from error
            self._room.touch(pages)
            return stored

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects; return how many there were. Not synced: a crash may bring them back."""
        with self._calls:
            removed_count = 0
            for label in labels:
                fan, name = place_of(label)
                try:
                    directory = self._directories.find(label.identity, fan)
                    if directory is not None and size_of(directory, name) is not None:
                        os.unlink(name, dir_fd=directory.fd)
                        removed_count += 1
                except FileNotFoundError:
                    pass
                except OSError as error:
                    raise self._cannot("remove", label, error) from error
                self._room.forget(label)
            return removed_count

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of one identity in the order of their names; the cursor is the last name listed.

        Raises:
            InputError: the cursor is not one that a scan returned, or the identity is not a digest.
        """
        with self._calls:
            if len(identity) != IDENTITY_BYTES:
                raise InputError(f"an identity has {IDENTITY_BYTES} bytes, found {len(identity)}")
            if cursor and label_of(identity, cursor) is None:
                raise InputError(f"a cursor is what the last scan returned, found {cursor!r}")
            try:
                found = list(itertools.islice(objects_in(self._root.fd, identity, cursor), SCAN_OBJECTS_MAX))
            except OSError as error:
                raise storage_error(error, f"cannot list {self._root.path}/{identity.hex()}") from error
            objects = [StoredObject(known.label, known.object_bytes) for known in found]
            return Scan(objects, found[-1].name if len(found) == SCAN_OBJECTS_MAX else "")

    def close(self) -> None:
        """Wait for calls in flight, remove this process's temp directory, let go of every descriptor."""
        if self._calls.close():
            self._directories.close()
            self._root.close()

    def _cannot(self, do: str, label: Label, error: OSError) -> StorageError:
        return storage_error(error, f"cannot {do} {self._root.path}/{label.object_name}")

    def _new_temp(self) -> str:
        return f"{next(self._temp_numbers):x}"

    def _stamps(self, count: int) -> int:
        """Take ``count`` modification times that are later than all before, and return the last of them."""
        with self._guard:
            self._stamp_last = max(self._clock(), self._stamp_last + 1) + count
            return self._stamp_last

    def _read(self, pages: Sequence[PageIO], stamp: int) -> list[bool]:
        """Read a few pages: open all, then move all bytes, then close all, which keeps the copying loop hot."""
        fds: list[int] = []
        hits: list[bool] = []
        at = 0
        try:
            for at, page in enumerate(pages):
                fds.append(self._open_object(page, stamp - at))
            for at, page in enumerate(pages):
                hits.append(fds[at] >= 0 and read_all(fds[at], page.buffers, page_bytes(page)))
        except OSError as error:
            raise self._cannot("read", pages[at].label, error) from error
        finally:
            for fd in fds:
                if fd >= 0:
                    os.close(fd)
        return hits

    def _open_object(self, page: PageIO, stamp: int) -> int:
        """Open a file that has exactly the page's length; -1 where there is none, and then nothing in its place."""
        fan, name = place_of(page.label)
        directory = self._directories.find(page.label.identity, fan)
        if directory is None:
            return -1
        try:
            fd = os.open(name, READ_FLAGS, dir_fd=directory.fd)
        except FileNotFoundError:
            return -1
        except OSError as error:
            if error.errno not in _NOT_A_FILE:
                raise
            self._dislodge(directory, name)
            return -1
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != page_bytes(page):
            os.close(fd)
            self._dislodge(directory, name)
            return -1
        if stamp - status.st_mtime_ns > STAMP_GRAIN_NS:
            # A time that cannot be set costs recency after a restart, never the hit.
            with suppress(OSError):
                os.utime(fd, ns=(stamp, stamp))
        return fd

    def _store(self, pages: Sequence[PageIO], stamp: int, batch: _Batch) -> list[bool]:
        """Store a few pages: open all drafts, then move all bytes, then name all.

        At a fault the drafts that are whole are still named, the others go.
        """
        drafts: list[_Draft] = []
        stored: list[bool] = []
        written_count = named_count = 0
        try:
            try:
                for i, page in enumerate(pages):
                    stored.append(self._begin(page, stamp - i, batch, drafts))
                for draft in drafts:
                    self._write(draft)
                    written_count += 1
            finally:
                for draft in drafts[:written_count]:
                    self._finish(draft, batch)
                    named_count += 1
        finally:
            for draft in drafts[named_count:]:
                self._abandon(draft)
        return stored

    def _begin(self, page: PageIO, stamp: int, batch: _Batch, drafts: list[_Draft]) -> bool:
        """Refresh a page that is there, or make room and open a draft for it; False where there is no room."""
        label = page.label
        if label in batch.begun:
            return True
        fan, name = place_of(label)
        object_bytes = page_bytes(page)
        try:
            directory = self._directories.make(label.identity, fan)
            if self._refresh(directory, name, object_bytes, stamp, batch):
                self._room.release(0, label, object_bytes)
                if batch.durable:
                    batch.touched[directory] = label.identity
                return True
            if not self._room.reserve(object_bytes, batch.keep):
                return False
            temp = self._new_temp()
            try:
                fd = os.open(temp, WRITE_FLAGS, 0o600, dir_fd=self._root.writer_fd)
            except OSError:
                self._room.release(object_bytes)
                raise
        except OSError as error:
            raise self._cannot("store", label, error) from error
        batch.begun.add(label)
        drafts.append(_Draft(page, directory, name, object_bytes, stamp, temp, fd))
        return True

    def _write(self, draft: _Draft) -> None:
        try:
            write_all(draft.fd, draft.page.buffers)
        except OSError as error:
            raise self._cannot("store", draft.page.label, error) from error

    def _finish(self, draft: _Draft, batch: _Batch) -> None:
        """Make a draft durable where asked for, then give it its name."""
        label = draft.page.label
        try:
            os.utime(draft.fd, ns=(draft.stamp, draft.stamp))
            if batch.durable:
                os.fsync(draft.fd)
            fd, draft.fd = draft.fd, -1
            os.close(fd)
            try:
                os.rename(draft.temp, draft.name, src_dir_fd=self._root.writer_fd, dst_dir_fd=draft.directory.fd)
            except FileNotFoundError:
                # Somebody removed the directory that we keep open; make it anew, once.
                self._directories.drop(label.identity, draft.name[:2])
                draft.directory = self._directories.make(label.identity, draft.name[:2])
                os.rename(draft.temp, draft.name, src_dir_fd=self._root.writer_fd, dst_dir_fd=draft.directory.fd)
        except OSError as error:
            raise self._cannot("store", label, error) from error
        if batch.durable:
            batch.touched[draft.directory] = label.identity
        self._room.release(draft.object_bytes, label, draft.object_bytes)

    def _abandon(self, draft: _Draft) -> None:
        if draft.fd >= 0:
            os.close(draft.fd)
        with suppress(OSError):
            os.unlink(draft.temp, dir_fd=self._root.writer_fd)
        self._room.release(draft.object_bytes)

    def _refresh(self, directory: Directory, name: str, object_bytes: int, stamp: int, batch: _Batch) -> bool:
        """Make an object that is there as durable as asked for, and recent; False where it is not there whole."""
        # Most puts are of new pages, and asking so costs half of what an exception does. What a dangling link
        # hides here, the rename replaces.
        if not os.access(name, os.F_OK, dir_fd=directory.fd):
            return False
        try:
            status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_size != object_bytes:
                self._dislodge(directory, name)
                return False
            if batch.durable:
                # Whoever stored it may have stored it CACHED; only the file system knows.
                fd = os.open(name, READ_FLAGS, dir_fd=directory.fd)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            os.utime(name, ns=(stamp, stamp), dir_fd=directory.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _sync_directories(self, batch: _Batch) -> None:
        identities: set[bytes] = set()
        for directory, identity in batch.touched.items():
            os.fsync(directory.fd)
            if not directory.anchored:
                identities.add(identity)
        for identity in identities:
            self._directories.sync_parents(identity)
        for directory in batch.touched:
            directory.anchored = True

    def _dislodge(self, directory: Directory, name: str) -> None:
        """Clear away what stands in the place of an object, so that it blocks no later put."""
        with self._guard:
            self._intruders_count += 1
        with suppress(OSError):
            try:
                os.unlink(name, dir_fd=directory.fd)
            except (IsADirectoryError, PermissionError):
                aside = self._new_temp()
                os.rename(name, aside, src_dir_fd=directory.fd, dst_dir_fd=self._root.writer_fd)
                shutil.rmtree(aside, ignore_errors=True, dir_fd=self._root.writer_fd)


def _age(known: Found) -> int:
    return known.mtime_ns


def open_url(rest: str, bytes_max: int | None) -> FileStorage:
    """Open ``file:DIR``; the directory may be relative or absolute."""
    if not rest:
        raise ConfigError("file: needs a directory after the colon, as in file:/var/cache/pages")
    return FileStorage.open(rest, bytes_max=bytes_max)

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

from unified_cache.errors import ConfigError, InputError
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
from unified_cache.storage_backends._recency import SCAN_OBJECTS_MAX, Recency, page_bytes
from unified_cache.storage_backends.protocol import Capability, Level, PageIO, Scan, StoredObject

__all__ = ["FileCounts", "FileStorage", "open_url"]

DIRECTORIES_OPEN_MAX = 512
"""Fan-out directories kept open: two identities in full, and half of the usual limit of 1024 descriptors."""

UNREMOVABLE_MAX = 16
"""Objects that cannot be removed in one eviction before it gives up and the put is declined."""

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
    touched: dict[Directory, bytes] = field(default_factory=dict)
    """Directories to make durable before the put answers, with the identity each belongs to."""


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
        self._recency = recency
        self._clock = clock
        self._directories = Directories(root.fd, DIRECTORIES_OPEN_MAX)
        self._temp_numbers = itertools.count()
        self._reserved_bytes = 0
        self._stamp_last = 0
        self._evicted_count = 0
        self._unremovable_count = 0
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
        if storage._make_room(0, ()):
            storage._release(0)
        return storage

    @property
    def path(self) -> Path:
        """Directory of the store."""
        return self._root.path

    @property
    def bytes_used(self) -> int:
        """Bytes of the objects this process knows of."""
        return self._recency.bytes_used

    @property
    def counts(self) -> FileCounts:
        """What happened since the store was opened; a copy."""
        with self._guard:
            return FileCounts(self._evicted_count, self._unremovable_count, self._intruders_count)

    def capability(self) -> Capability:
        """Say what this backend can do."""
        with self._calls:
            return Capability("file", durable=True, bytes_max=self._recency.bytes_max)

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
                    raise storage_error(error, f"cannot look for {self._root.path}/{label.object_name}") from error
            return found

    def get(self, pages: Sequence[PageIO]) -> list[bool]:
        """Read each page straight into its buffers; a hit makes it recent."""
        with self._calls:
            stamp = self._stamps(len(pages))
            hits: list[bool] = []
            for i, page in enumerate(pages):
                try:
                    hits.append(self._read(page, stamp - i))
                except OSError as error:
                    raise storage_error(error, f"cannot read {self._root.path}/{page.label.object_name}") from error
            with self._guard:
                for page, hit in zip(reversed(pages), reversed(hits), strict=True):
                    if hit:
                        self._recency.add(page.label, page_bytes(page))
                    else:
                        self._recency.forget(page.label)
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
            keep = () if self._recency.bytes_max is None else {page.label for page in pages}
            batch = _Batch(level is Level.DURABLE, keep)
            stored: list[bool] = []
            for i, page in enumerate(pages):
                try:
                    stored.append(self._store(page, stamp - i, batch))
                except OSError as error:
                    raise storage_error(error, f"cannot store {self._root.path}/{page.label.object_name}") from error
            try:
                self._sync_directories(batch)
            except OSError as error:
                raise storage_error(error, f"cannot sync the directories of {self._root.path}") from error
            with self._guard:
                self._recency.touch(page.label for page in reversed(pages))
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
                    raise storage_error(error, f"cannot remove {self._root.path}/{label.object_name}") from error
                with self._guard:
                    self._recency.forget(label)
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

    def _new_temp(self) -> str:
        return f"{next(self._temp_numbers):x}"

    def _stamps(self, count: int) -> int:
        """Take ``count`` modification times that are later than all before, and return the last of them."""
        with self._guard:
            self._stamp_last = max(self._clock(), self._stamp_last + 1) + count
            return self._stamp_last

    def _read(self, page: PageIO, stamp: int) -> bool:
        fan, name = place_of(page.label)
        directory = self._directories.find(page.label.identity, fan)
        if directory is None:
            return False
        try:
            fd = os.open(name, READ_FLAGS, dir_fd=directory.fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in _NOT_A_FILE:
                raise
            self._dislodge(directory, name)
            return False
        try:
            status = os.fstat(fd)
            wanted_bytes = page_bytes(page)
            whole = stat.S_ISREG(status.st_mode) and status.st_size == wanted_bytes
            if whole and read_all(fd, page.buffers, wanted_bytes):
                if stamp - status.st_mtime_ns > STAMP_GRAIN_NS:
                    # A time that cannot be set costs recency after a restart, never the hit.
                    with suppress(OSError):
                        os.utime(fd, ns=(stamp, stamp))
                return True
        finally:
            os.close(fd)
        self._dislodge(directory, name)
        return False

    def _store(self, page: PageIO, stamp: int, batch: _Batch) -> bool:
        label = page.label
        fan, name = place_of(label)
        object_bytes = page_bytes(page)
        directory = self._directories.make(label.identity, fan)
        if self._refresh(directory, name, object_bytes, stamp, batch):
            self._release(0, label, object_bytes)
        else:
            if not self._make_room(object_bytes, batch.keep):
                return False
            try:
                directory = self._write(label, directory, name, page.buffers, stamp, batch)
            except BaseException:
                self._release(object_bytes)
                raise
            self._release(object_bytes, label, object_bytes)
        if batch.durable:
            batch.touched[directory] = label.identity
        return True

    def _refresh(self, directory: Directory, name: str, object_bytes: int, stamp: int, batch: _Batch) -> bool:
        """Make an object that is there as durable as asked for, and recent; False where it is not there whole."""
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

    def _write(
        self,
        label: Label,
        directory: Directory,
        name: str,
        buffers: Sequence[memoryview],
        stamp: int,
        batch: _Batch,
    ) -> Directory:
        """Write one file whole under a temp name, then give it its own; on any failure nothing is left.

        Return the directory that it is in: another one than given where that was removed under us.
        """
        temp = self._new_temp()
        placed = False
        try:
            fd = os.open(temp, WRITE_FLAGS, 0o600, dir_fd=self._root.writer_fd)
            try:
                write_all(fd, buffers)
                os.utime(fd, ns=(stamp, stamp))
                if batch.durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            try:
                os.rename(temp, name, src_dir_fd=self._root.writer_fd, dst_dir_fd=directory.fd)
            except FileNotFoundError:
                # Somebody removed the directory that we keep open; make it anew, once.
                self._directories.drop(label.identity, name[:2])
                directory = self._directories.make(label.identity, name[:2])
                os.rename(temp, name, src_dir_fd=self._root.writer_fd, dst_dir_fd=directory.fd)
            placed = True
        finally:
            if not placed:
                with suppress(OSError):
                    os.unlink(temp, dir_fd=self._root.writer_fd)
        return directory

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

    def _make_room(self, needed_bytes: int, keep: Container[Label]) -> bool:
        """Evict until ``needed_bytes`` fit and reserve them; False, nothing reserved, where they cannot."""
        unremovable_count = 0
        with self._guard:
            victims = self._recency.victims(needed_bytes + self._reserved_bytes, keep)
            if victims is None:
                return False
            self._reserved_bytes += needed_bytes
            evicted = [(victim, self._recency.forget(victim)) for victim in victims]
        while evicted:
            stuck = [(victim, object_bytes) for victim, object_bytes in evicted if not self._evict(victim)]
            unremovable_count += len(stuck)
            with self._guard:
                self._evicted_count += len(evicted) - len(stuck)
                self._unremovable_count += len(stuck)
                for victim, object_bytes in stuck:
                    self._recency.add(victim, object_bytes)
                victims = self._recency.victims(self._reserved_bytes, keep) if stuck else []
                if victims is None or unremovable_count > UNREMOVABLE_MAX:
                    self._reserved_bytes -= needed_bytes
                    return False
                evicted = [(victim, self._recency.forget(victim)) for victim in victims]
        return True

    def _release(self, reserved_bytes: int, stored: Label | None = None, object_bytes: int = 0) -> None:
        """Give up a reservation; an object that is stored counts from now on."""
        with self._guard:
            self._reserved_bytes -= reserved_bytes
            if stored is not None:
                self._recency.add(stored, object_bytes)

    def _evict(self, label: Label) -> bool:
        fan, name = place_of(label)
        try:
            directory = self._directories.find(label.identity, fan)
            if directory is not None:
                os.unlink(name, dir_fd=directory.fd)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

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

"""A store in one directory, one file per page: what an embedded cache keeps beyond its process by default.

A page is written into a temp file of this process, made durable if it must be, and only then renamed to its
name, so that a name is either absent or whole, whatever crashes. Reads believe nothing: a link to a file, and what
does not give exactly as many bytes as the page has, is a miss and is cleared away.
"""

import os
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path

from unified_cache.core.errors import StorageError
from unified_cache.core.seal import Label, is_sealed
from unified_cache.storage_backends.directory.disk import (
    DIRECTORY_FLAGS,
    READ_FLAGS,
    WRITE_FLAGS,
    Disk,
    StorageFaults,
    anchor,
    block_bytes,
    close_quietly,
    distrust,
    in_blocks,
    is_distrusted,
    opened,
    read_at,
    storage_error,
    sync_or_distrust,
    write_at,
)
from unified_cache.storage_backends.directory.front import (
    ENTRY_FILES,
    FREE_BYTES_MIN,
    SPARE_BYTES,
    Clock,
    DirectoryStorage,
    Stamps,
    check_limits,
    entered,
    open_address,
)
from unified_cache.storage_backends.directory.page_reads import CALL_BYTES
from unified_cache.storage_backends.directory.root import (
    MARKER_NAME,
    NOT_A_FILE,
    UNREADABLE,
    StoreRoot,
    foreign_in,
    identities_in,
    is_whole,
    open_root,
    open_root_to_read,
)
from unified_cache.storage_backends.file.page_reader import (
    FANS,
    FILES_OPEN_MAX,
    FORMAT,
    FilePages,
    FileReader,
    objects_in,
    path_of,
    unlink_object,
)
from unified_cache.storage_backends.file.quota import FileQuota, OpenCounter
from unified_cache.storage_backends.protocol import Answer, Capability, PageIO, StoredObject, page_bytes

DIRECTORIES_KNOWN_MAX = 1 << 14
"""Directories of which a process remembers that they are there: 1,024 identities in full, some 2 MiB."""


class FileStorage(FilePages, DirectoryStorage):
    """Keep sealed pages in files under one directory, with an optional cap and the least recently used going first.

    Several processes may open one directory; each finds what the others stored, and a page that another removed is a
    miss. The cap binds them all together, see ``FileQuota``, and counts whole blocks of the file system, as ``du``. A
    full file system evicts as the cap does. A batch never evicts its own pages: of a chain longer than the cap the
    first pages are stored, the rest declined. Recency is kept
    in modification times; a crash forgets when pages were last read, of ``PAGES_WAITING_MAX`` at most,
    ``STAMP_GRAIN_NS`` back at most. Where somebody removes the directory, the next put or register makes it again.
    Local file systems only: locks on a network are not what they are here. Thread-safe; objects are read and written
    outside the guards.
    """

    def __init__(self, root: StoreRoot, quota: FileQuota, stamps: Stamps) -> None:
        super().__init__(root, quota.removed, stamps)
        self._quota = quota
        self._page_writer = PageWriter(root, quota)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        bytes_max: int | None = None,
        free_bytes_min: int = FREE_BYTES_MIN,
        clock: Clock = time.time_ns,
        records_reads: bool = True,
        new_writer: Callable[[], str] = partial(secrets.token_hex, 8),
        disk: Disk | None = None,
    ) -> "FileStorage":
        """Open the store in ``path``, made with mode 0700 if absent; evict what exceeds the cap.

        With a cap it lists every object, and keeps 60 bytes of memory for each; without one only once the file
        system is short. A put leaves ``free_bytes_min`` free on the file system, or evicts for it, or is declined.
        ``clock`` gives nanoseconds; without ``records_reads`` a page that is read is none that is used. ``new_writer``
        gives a name that no other process uses. Where there is no room to enter, the least recent objects go first.

        Raises:
            ConfigError: bytes_max or free_bytes_min is negative or more than there can be, or no system takes the path.
            StorageError: the directory cannot be used or is not ours, see its message. It was not changed.
        """
        disk, place = disk or Disk(), Path(path)
        check_limits(disk, place, FORMAT, bytes_max, free_bytes_min)
        root, open_counter = entered(
            partial(_enter, disk, place, new_writer), partial(_remove_oldest, disk, place), place
        )
        stamps = Stamps(clock, records_reads=records_reads)
        quota = FileQuota(root, bytes_max, stamps, open_counter, free_bytes_min)
        storage = cls(root, quota, stamps)
        try:
            with opened(root.disk, MARKER_NAME, READ_FLAGS, dir_fd=root.fd) as fd:
                storage._reads.memory.learn(fd)
            if bytes_max is not None:
                quota.fill()
        except OSError as error:
            storage.close()
            raise storage_error(error, f"cannot list the file store in {path}") from error
        return storage

    @property
    def bytes_used(self) -> int:
        """Bytes that the objects of all processes take of the file system, summed up now. Linear in objects."""
        with self._calls, StorageFaults(f"cannot list the file store in {self._path}"):
            return self._quota.bytes_used()

    def capability(self) -> Capability:
        """Return the abilities of this backend."""
        with self._calls:
            return Capability(
                "file",
                durable=True,
                bytes_max=self._quota.bytes_max,
                call_bytes=CALL_BYTES,
                taken_bytes=self._quota.taken_bytes,
            )

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Read each page straight into its buffers; a hit makes it recent."""
        with self._calls:
            answers = self._read(pages)
            flawed, hit = Answer.FLAWED, Answer.HIT
            if flawed in answers:
                self._removed.record(
                    page.label for page, answer in zip(pages, answers, strict=True) if answer is flawed
                )
            self._record_use([page.label for page, answer in zip(pages, answers, strict=True) if answer is hit], pages)
            return answers

    def _put(self, pages: Sequence[PageIO], *, durable: bool) -> list[Answer]:
        """Write pages once.

        DURABLE syncs each file before its name appears, and each directory once at the end of the batch. An object that
        is there already is read and verified, then synced; it is written again where one fails, or its directory has
        failed to sync before. CACHED believes its length and its header. After an error pages before the one that
        failed may be there.
        """
        return Answer.of_puts(self._page_writer.store(pages, self._stamps.new(len(pages)), durable=durable))

    def _mend(self, fault: OSError, pages: Sequence[PageIO]) -> bool:
        if isinstance(fault, FileNotFoundError | NotADirectoryError):
            self._page_writer.restore()
            return True
        return super()._mend(fault, pages)

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects; return how many there were. Not synced: a crash may bring them back."""
        with self._calls:
            there = [label for label, found in zip(labels, self.exists(labels), strict=True) if found]
            with StorageFaults(f"cannot remove objects from {self._path}"):
                return self._quota.remove(there)

    def clear(self, identity: bytes) -> int:
        """Remove every object of one identity, a page of the listing at a time. No crash undoes it."""
        with self._calls:
            removed_count = super().clear(identity)
            with StorageFaults(f"cannot sync {self._path}/{identity.hex()}"):
                self._page_writer.sync_all(identity)
            return removed_count

    def _use(self, labels: Sequence[Label], pages: Sequence[PageIO] = ()) -> None:
        self._quota.use(labels, pages)

    def _clear_foreign(self, path: str, object_bytes: int) -> None:
        self._root.clear_foreign(path, object_bytes)

    def _evicted_count(self) -> int:
        return self._quota.evicted_count

    def _evict_for_fault(self, pages: Sequence[PageIO]) -> bool:
        return self._quota.evict_for_fault(pages)

    def _let_go(self) -> None:
        """No file is kept open."""

    def _stamp(self, stamps: Mapping[Label, int]) -> None:
        for label, stamp in stamps.items():
            path = path_of(label)
            with suppress(OSError):
                status = self._disk.stat(path, dir_fd=self._root_fd, follow_symlinks=False)
                if status.st_mtime_ns < stamp:
                    self._disk.utime(path, ns=(stamp, stamp), dir_fd=self._root_fd, follow_symlinks=False)


def _enter(disk: Disk, path: Path, new_writer: Callable[[], str]) -> tuple[StoreRoot, OpenCounter]:
    root = open_root(disk, path, FORMAT, new_writer, is_remade=True)
    try:
        return root, OpenCounter.enter(root)
    except OSError as error:
        root.close()
        raise storage_error(error, f"cannot enter the file store in {path}") from error


def _remove_oldest(disk: Disk, path: Path) -> int:
    """Remove the least recent objects of a store that nobody finds room to enter; return how many."""
    root_fd = open_root_to_read(disk, path, FORMAT)
    try:
        found = [known for each in identities_in(disk, root_fd) for known in objects_in(disk, root_fd, each)]
        found.sort(key=attrgetter("mtime_ns"))
        removed_count, left_bytes = 0, SPARE_BYTES
        for known in found:
            if left_bytes <= 0 and removed_count >= ENTRY_FILES:
                break
            removed_count += unlink_object(disk, root_fd, known.label)
            left_bytes -= in_blocks(block_bytes(disk, root_fd), known.object_bytes)
        return removed_count
    finally:
        close_quietly(disk, root_fd)


open_url = partial(open_address, "file", FileReader, FileStorage.open)


_SAME_BYTES = 112
"""At the start of a sealed page: what its label and its length alone decide, see ``unified_cache.core.seal``."""


@dataclass(slots=True)
class _Draft:
    """A page that is not in the store yet, and for which there is room."""

    page: PageIO
    stored: StoredObject
    path: str
    stamp: int
    temp: str = ""
    fd: int = -1
    is_named: bool = False


@dataclass(slots=True)
class _WriteBatch:
    pages: Sequence[PageIO]
    stamp: int
    durable: bool
    stored: set[Label] = field(default_factory=set)
    touched: dict[str, None] = field(default_factory=dict)
    """Directories to make durable before the put answers."""


class PageWriter:
    """Writes pages into the store of one process. Thread-safe."""

    def __init__(self, root: StoreRoot, quota: FileQuota) -> None:
        self._root = root
        self._disk = root.disk
        self._made: dict[str, int] = {}
        """Directories that objects may be named in, with the inode of each whose own name survives a crash, or 0."""
        self._quota = quota

    def store(self, pages: Sequence[PageIO], stamp: int, *, durable: bool) -> list[bool]:
        """Store pages, the first stamped ``stamp``, each other one a nanosecond earlier; a fault leaves whole ones."""
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
        if durable:
            with StorageFaults(f"cannot sync the directories of {self._root.path}"):
                self._sync(batch.touched)
        self._quota.use([page.label for page in pages if page.label in batch.stored], pages)
        return [page.label in batch.stored for page in pages]

    def restore(self) -> None:
        """Make again what somebody removed, and believe of no directory that it is there."""
        with StorageFaults(f"cannot make again the directories removed from {self._root.path}"):
            self._root.restore()
        self._made = {}

    def sync_all(self, identity: bytes) -> None:
        """Make the names in every directory of one identity, and those that are gone from it, survive a crash."""
        for fan in FANS:
            with (
                suppress(FileNotFoundError, NotADirectoryError),
                opened(self._disk, f"{identity.hex()}/{fan}", DIRECTORY_FLAGS, dir_fd=self._root.fd) as fd,
            ):
                sync_or_distrust(self._disk, fd)

    def _make_directory(self, path: str, identity: bytes) -> str:
        """Make the directory of an object if absent; return what stands in its place, empty where nothing does."""
        directory = _directory_of(path)
        if directory in self._made:
            return ""
        for foreign in foreign_in(self._disk, self._root.fd, (identity.hex(), directory)):
            return foreign
        try:
            with suppress(FileExistsError):
                self._disk.mkdir(directory, 0o700, dir_fd=self._root.fd)
        except FileNotFoundError:
            self._root.make_directory(identity)
            with suppress(FileExistsError):
                self._disk.mkdir(directory, 0o700, dir_fd=self._root.fd)
        if len(self._made) >= DIRECTORIES_KNOWN_MAX:
            self._made = {}
        self._made.setdefault(directory, 0)
        return ""

    def _sync(self, directories: Collection[str]) -> None:
        """Make the names in directories survive a crash, and theirs too."""
        with ExitStack() as opened_files:
            fds = [
                opened_files.enter_context(opened(self._disk, each, DIRECTORY_FLAGS, dir_fd=self._root.fd))
                for each in directories
            ]
            faults = self._disk.fsync_each(fds)
            failed = [(fd, fault) for fd, fault in zip(fds, faults, strict=True) if fault is not None]
            for fd, _ in failed:
                distrust(self._disk, fd)
            for _, fault in failed:
                raise fault
            inodes = dict(zip(directories, [self._disk.fstat(fd).st_ino for fd in fds], strict=True))
        made = self._made
        for name in {_directory_of(each) for each, inode in inodes.items() if made.get(each) != inode}:
            anchor(self._disk, self._root.fd, name)
        made.update(inodes)

    def _begin(self, batch: _WriteBatch) -> list[_Draft]:
        """Refresh the pages that are there; return a draft for each of the others, none of it made yet."""
        drafts: dict[Label, _Draft] = {}
        declined: Counter[str] = Counter()
        for number, page in enumerate(batch.pages):
            label = page.label
            if label in drafts:
                continue
            path = path_of(label)
            try:
                if foreign := self._make_directory(path, label.identity):
                    declined[foreign] += 1
                    continue
                draft = _Draft(page, StoredObject(label, page_bytes(page)), path, batch.stamp - number)
                is_there = self._refresh(draft, durable=batch.durable)
            except OSError as error:
                raise self._cannot_store(label, error) from error
            if is_there:
                self._record(draft, batch)
            else:
                drafts[label] = draft
        for foreign, count in declined.items():
            self._root.declines.record(count, self._root.foreign_text(foreign), foreign)
        return list(drafts.values())

    def _refresh(self, draft: _Draft, *, durable: bool) -> bool:
        """Make an object that is there as durable as asked for, and recent; False where it is to be written."""
        disk, path = self._disk, draft.path
        # Most puts are of new pages, and asking so costs half of what an exception does.
        if not disk.access(path, os.F_OK, dir_fd=self._root.fd):
            return False
        try:
            fd = disk.open(path, READ_FLAGS, dir_fd=self._root.fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in NOT_A_FILE | UNREADABLE:
                raise
            self._root.record_foreign()
            return False
        try:
            status = disk.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                self._root.clear_foreign(path, draft.stored.object_bytes)
                return False
            is_sound = self._is_sound if durable else self._is_same
            if is_whole(status.st_mode, status.st_size, draft.stored.object_bytes) and is_sound(fd, draft.page):
                if durable and not self._make_durable(fd, status, _directory_of(path)):
                    return False
                disk.utime(fd, ns=(draft.stamp, draft.stamp))
                return True
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
        finally:
            close_quietly(disk, fd)
        # The rename will replace it.
        self._root.record_foreign()
        return False

    def _make_durable(self, fd: int, status: os.stat_result, directory: str) -> bool:
        """Sync a page that is there; False where that fails, or a sync of its file or directory once has."""
        if is_distrusted(status) or is_distrusted(self._disk.stat(directory, dir_fd=self._root.fd)):
            return False
        try:
            sync_or_distrust(self._disk, fd)
        except OSError:
            return False
        return True

    def _is_sound(self, fd: int, page: PageIO) -> bool:
        content = memoryview(bytearray(page_bytes(page)))
        return read_at(self._disk.preadv, fd, [content], len(content)) and is_sealed(content, page.label)

    def _is_same(self, fd: int, page: PageIO) -> bool:
        """Return whether a file says that it is this page; whether its payload is right only a reader finds out."""
        ours = b"".join([buffer[:_SAME_BYTES] for buffer in page.buffers])[:_SAME_BYTES]
        return self._disk.pread(fd, len(ours), 0) == ours

    def _write(self, drafts: Sequence[_Draft], batch: _WriteBatch) -> None:
        """Open all drafts, write all, name all; at a fault those that are whole are still named, the others go."""
        disk = self._disk
        written_count = 0
        draft = drafts[0]
        try:
            try:
                for draft in drafts:
                    draft.temp = self._root.new_temp()
                    draft.fd = disk.open(draft.temp, WRITE_FLAGS, 0o600, dir_fd=self._root.writer_fd)
                for draft in drafts:
                    write_at(disk, draft.fd, draft.page.buffers, 0)
                    written_count += 1
            except OSError as error:
                raise self._cannot_store(draft.page.label, error) from error
            finally:
                self._finish(drafts[:written_count], batch)
        finally:
            for left in drafts:
                self._abandon(left)

    def _finish(self, drafts: Sequence[_Draft], batch: _WriteBatch) -> None:
        """Make drafts durable where asked for, together, then give each its name, up to the first that failed."""
        faults: Sequence[OSError | None] = [None] * len(drafts)
        draft: _Draft | None = None
        try:
            for draft in drafts:
                self._disk.utime(draft.fd, ns=(draft.stamp, draft.stamp))
            if batch.durable and drafts:
                faults = self._disk.fsync_each([draft.fd for draft in drafts])
            for draft, fault in zip(drafts, faults, strict=True):
                if fault is not None:
                    raise fault
                self._name(draft)
                self._record(draft, batch)
        except OSError as error:
            assert draft is not None
            raise self._cannot_store(draft.page.label, error) from error

    def _name(self, draft: _Draft) -> None:
        fd, draft.fd = draft.fd, -1
        self._disk.close(fd)
        self._disk.rename(draft.temp, draft.path, src_dir_fd=self._root.writer_fd, dst_dir_fd=self._root.fd)
        draft.is_named = True

    def _abandon(self, draft: _Draft) -> None:
        """Leave nothing of a draft that got no name."""
        if draft.fd >= 0:
            close_quietly(self._disk, draft.fd)
        if draft.temp and not draft.is_named:
            with suppress(OSError):
                self._disk.unlink(draft.temp, dir_fd=self._root.writer_fd)

    def _record(self, draft: _Draft, batch: _WriteBatch) -> None:
        batch.stored.add(draft.page.label)
        if batch.durable:
            batch.touched[_directory_of(draft.path)] = None

    def _cannot_store(self, label: Label, error: OSError) -> StorageError:
        return storage_error(error, f"cannot store {self._root.path}/{label.object_name}")


def _directory_of(path: str) -> str:
    return path.rpartition("/")[0]

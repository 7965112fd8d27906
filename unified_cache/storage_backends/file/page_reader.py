"""Read side of a file store: pages straight into the buffers of who asks, and the listing of those there are.

docs/format.md has the names. Sixteen directories for one identity keep each of them short enough, and a durable batch
of any size has no more than these to sync.
"""

import errno
import itertools
import os
import re
import stat
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from unified_cache.core.errors import StorageError
from unified_cache.core.seal import HEADER_BYTES, Label, may_be_coded
from unified_cache.storage_backends.common.lru import page_bytes
from unified_cache.storage_backends.common.names import check_label, check_scan, parse_page_name
from unified_cache.storage_backends.directory.disk import (
    DIRECTORY_FLAGS,
    READ_FLAGS,
    Directory,
    Disk,
    anchor,
    close_quietly,
    distrust,
    opened,
    read_at,
    size_of,
    storage_error,
    sync_or_distrust,
)
from unified_cache.storage_backends.directory.page_reads import DirectReads, PageReads, Place
from unified_cache.storage_backends.directory.root import NOT_A_FILE, UNREADABLE, StoreRoot, is_whole
from unified_cache.storage_backends.protocol import NAMES_MAX, Answer, PageIO, Scan, StoredObject, UsedBetween

_FAN_DIGITS = 1
"""Leading digits of a key that name its directory."""

FANS = tuple(f"{number:0{_FAN_DIGITS}x}" for number in range(16**_FAN_DIGITS))

_FAN_NAME = re.compile(rf"[0-9a-f]{{{_FAN_DIGITS}}}")


_PRESENT, _ABSENT = Answer.HIT, Answer.MISS
"""Looked up once: a member of an Enum costs 0.3 us each time in Python 3.11, a sixteenth of a look-up of one page."""


class ListedObject(NamedTuple):
    """One object as a listing of its directory shows it."""

    label: Label
    name: str
    object_bytes: int
    mtime_ns: int


def place_of(label: Label) -> tuple[str, str]:
    """Return the fan-out directory and the file of an object; raise InputError where the label names none."""
    check_label(label)
    name = label.page_name
    return name[:_FAN_DIGITS], name


def objects_in(disk: Disk, root_fd: int, identity: bytes, after: str = "") -> Generator[ListedObject, None, None]:
    """List one identity's objects in the order of names, after one name, lazily; foreign names are passed over."""
    for fan in _names_in(disk, root_fd, identity.hex()):
        if _FAN_NAME.fullmatch(fan) and fan >= after[:_FAN_DIGITS]:
            yield from _objects_in_fan(disk, root_fd, identity, fan, after)


def _objects_in_fan(disk: Disk, root_fd: int, identity: bytes, fan: str, after: str) -> Iterator[ListedObject]:
    path = f"{identity.hex()}/{fan}"
    for name in _names_in(disk, root_fd, path):
        label = parse_page_name(identity, name) if name > after and name.startswith(fan) else None
        if label is None:
            continue
        with suppress(FileNotFoundError, NotADirectoryError):
            status = disk.stat(f"{path}/{name}", dir_fd=root_fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield ListedObject(label, name, status.st_size, status.st_mtime_ns)


def _names_in(disk: Disk, root_fd: int, path: str) -> list[str]:
    """List a directory in the order of names; nothing where there is none."""
    try:
        with opened(disk, path, DIRECTORY_FLAGS, dir_fd=root_fd) as fd:
            return sorted(disk.listdir(fd))
    except (FileNotFoundError, NotADirectoryError):
        return []


class OpenDirectories:
    """Fan-out directories of a store, some kept open. Thread-safe: no guard is taken to find one that is open."""

    def __init__(self, disk: Disk, root_fd: int, open_max: int) -> None:
        self._disk = disk
        self._root_fd = root_fd
        self._open_max = open_max
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
        """Return a directory, made if absent."""
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

    def unlink(self, label: Label) -> bool:
        """Remove the file of an object; False where there is none."""
        fan, name = place_of(label)
        directory = self.find(label.identity, fan)
        if directory is None:
            return False
        try:
            self._disk.unlink(name, dir_fd=directory.fd)
        except FileNotFoundError:
            return False
        return True

    def drop_all(self) -> None:
        """Open each directory again when it is next asked for: those kept may have been removed under their names."""
        with self._guard:
            self._open.clear()

    def sync(self, touched: Mapping[Directory, bytes]) -> None:
        """Make the names in directories survive a crash, and theirs too; each comes with its identity."""
        faults = self._disk.fsync_each([directory.fd for directory in touched])
        failed = [(directory, fault) for directory, fault in zip(touched, faults, strict=True) if fault is not None]
        for directory, _ in failed:
            distrust(self._disk, directory.fd)
        for _, fault in failed:
            raise fault
        for identity in {identity for directory, identity in touched.items() if not directory.anchored}:
            anchor(self._disk, self._root_fd, identity.hex())
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


FILES_OPEN_MAX = 16
"""Objects of one call open at a time. Taking 16 through each step together, not one through all steps, makes 1 MiB
pages 10 % faster: between two copies the caches would lose the code of every other step."""


class PageReader:
    """Finds, reads and lists pages of a file store, opened to read or to write. Thread-safe."""

    def __init__(
        self,
        disk: Disk,
        path: Path,
        root_fd: int,
        directories: OpenDirectories,
        clear_foreign: Callable[[Directory, str, int], None],
    ) -> None:
        """``clear_foreign`` is called for what is no object: directory, name, bytes of the one that belongs there."""
        self._disk = disk
        self._path = path
        self._root_fd = root_fd
        self._directories = directories
        self._clear_foreign = clear_foreign
        self._reads = PageReads(disk)

    def learn_memory(self, fd: int) -> None:
        """Find out by a file whether the system says what it has in memory, before anybody asks who must not wait."""
        self._reads.memory.read(fd, (memoryview(bytearray(1)),), 0)

    def lengths(self, labels: Sequence[Label]) -> list[int | None]:
        """Return the bytes of each file of that name, None where there is none; one stat each."""
        found: list[int | None] = []
        for label in labels:
            fan, name = place_of(label)
            try:
                directory = self._directories.find(label.identity, fan)
                found.append(None if directory is None else size_of(self._disk, directory, name))
            except OSError as error:
                raise self._cannot("look for", label, error) from error
        return found

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Return for each label whether a file of that name is there; one stat each."""
        return [_ABSENT if length is None else _PRESENT for length in self.lengths(labels)]

    def scan(self, identity: bytes, cursor: str) -> Scan:
        """List objects of one identity in the order of their names; the cursor is the last name listed."""
        check_scan(identity, cursor)
        try:
            with closing(objects_in(self._disk, self._root_fd, identity, cursor)) as objects:
                found = list(itertools.islice(objects, NAMES_MAX))
        except OSError as error:
            raise self._cannot_list(identity, error) from error
        listed = [StoredObject(known.label, known.object_bytes) for known in found]
        cursor_next = found[-1].name if len(found) == NAMES_MAX else ""
        return Scan(listed, cursor_next, [known.mtime_ns for known in found])

    def used_between(self, identity: bytes) -> UsedBetween | None:
        """Compare modification times, which are the recency of this store; None without objects. Linear in objects."""
        try:
            times = [known.mtime_ns for known in objects_in(self._disk, self._root_fd, identity)]
        except OSError as error:
            raise self._cannot_list(identity, error) from error
        return UsedBetween(min(times), max(times)) if times else None

    def read(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers; HIT where it was there at that length. Raise for a fault that is not one page's."""
        may_be_direct = self._reads.may_be_direct(pages)
        if len(pages) == 1 and not may_be_direct:
            opened_alone = self._open_object(pages[0])
            if isinstance(opened_alone, Answer):
                return [opened_alone]
            try:
                return [self._read_file(pages[0], opened_alone)]
            finally:
                close_quietly(self._disk, opened_alone)
        answers = [Answer.MISS] * len(pages)
        files = _OpenFiles(self._disk, partial(self._opened, pages, answers))
        came = self._reads.read_directly(pages, files) if may_be_direct else ()
        for start in range(0, len(pages), FILES_OPEN_MAX):
            few = range(start, min(start + FILES_OPEN_MAX, len(pages)))
            try:
                # Taken through each step together, which keeps the copying loop hot.
                opened = {n: place for n in few if n not in came and (place := files.open(n)) is not None}
                self._begin_reading(opened.values())
                for number, (fd, _) in opened.items():
                    answers[number] = self._read_file(pages[number], fd)
            finally:
                files.close(few)
        for number in came:
            answers[number] = Answer.HIT
        return answers

    def read_memory(self, pages: Sequence[PageIO]) -> list[bool]:
        """Fill pages that the system has in memory, their names included; see ``PageReads``."""
        files = _OpenFiles(self._disk, partial(self._open_cached, [page.label for page in pages]))
        return self._reads.read_memory(pages, files)

    def know(self, labels: Sequence[Label]) -> list[bool]:
        """Return for each object whether its name, and what it names, is in memory."""
        known: list[bool] = []
        for number in range(len(labels)):
            fd = self._open_cached(labels, number)
            if fd >= 0:
                close_quietly(self._disk, fd)
            known.append(fd >= 0)
        return known

    def _opened(self, pages: Sequence[PageIO], answers: list[Answer], number: int) -> int:
        """Return the descriptor of an object's file; -1, and the answer, where it cannot be read."""
        opened = self._open_object(pages[number])
        if isinstance(opened, Answer):
            answers[number] = opened
            return -1
        return opened

    def _begin_reading(self, opened: Collection[Place]) -> None:
        """Ask the system to read all of these files, unless it has the first in memory."""
        if opened and self._reads.memory.may_lack(*next(iter(opened))):
            with suppress(OSError):
                for fd, _ in opened:
                    self._disk.begin_reading(fd)

    def _read_file(self, page: PageIO, fd: int) -> Answer:
        """Read a file and a byte further, which shows another length."""
        try:
            if read_at(self._disk.preadv, fd, page.buffers, page_bytes(page), 0, page.checksum, is_file=True):
                return Answer.HIT
        except OSError as error:
            return self._look_at(page, fd, error)
        return self._look_at(page, fd)

    def _look_at(self, page: PageIO, fd: int, fault: OSError | None = None) -> Answer:
        """Clear away what proved not to be a file of exactly that length; any other ``fault`` is one of the object."""
        try:
            status = self._disk.fstat(fd)
        except OSError as error:
            return self._unreadable(page, fault or error)
        object_bytes = page_bytes(page)
        if stat.S_ISREG(status.st_mode) and may_be_coded(object_bytes - HEADER_BYTES, status.st_size):
            return Answer.MISS  # it is the page, but compressed or encrypted: see ``wrappers.coded``
        if not is_whole(status.st_mode, status.st_size, object_bytes):
            fan, name = place_of(page.label)
            directory = self._directories.find(page.label.identity, fan)
            if directory is not None:
                self._clear_foreign(directory, name, object_bytes)
            return Answer.FLAWED
        return Answer.MISS if fault is None else self._unreadable(page, fault)

    def _unreadable(self, page: PageIO, error: OSError) -> Answer:
        """Return the answer for an object that cannot be read; raise where it is not the object's fault."""
        if error.errno not in UNREADABLE:
            raise self._cannot("read", page.label, error) from error
        return Answer.UNAVAILABLE

    def _open_object(self, page: PageIO) -> int | Answer:
        """Open what stands in the place of an object; the answer where there is nothing, or nothing to be read."""
        label = page.label
        fan, name = place_of(label)
        try:
            directory = self._directories.find(label.identity, fan)
            if directory is None:
                return Answer.MISS
            try:
                return self._disk.open(name, READ_FLAGS, dir_fd=directory.fd)
            except FileNotFoundError:
                return Answer.MISS
            except OSError as error:
                if error.errno not in NOT_A_FILE:
                    raise
                self._clear_foreign(directory, name, page_bytes(page))
                return Answer.FLAWED
        except OSError as error:
            return self._unreadable(page, error)

    def _open_cached(self, labels: Sequence[Label], number: int) -> int:
        """Return a descriptor of an object's file; -1 where its name, or what it names, is not in memory."""
        label = labels[number]
        fan, name = place_of(label)
        directory = self._directories.kept(label.identity, fan)
        if directory is None or not self._reads.memory.is_readable:
            return -1
        try:
            return self._disk.open_cached(name, READ_FLAGS, dir_fd=directory.fd)
        except OSError:
            return -1

    def _cannot(self, do: str, label: Label, error: OSError) -> StorageError:
        return storage_error(error, f"cannot {do} {self._path}/{label.object_name}")

    def _cannot_list(self, identity: bytes, error: OSError) -> StorageError:
        return storage_error(error, f"cannot list {self._path}/{identity.hex()}")


class _OpenFiles:
    """Files of the pages of one call, a few of them open at a time; ``PlacedPages``."""

    open_max = FILES_OPEN_MAX

    def __init__(self, disk: Disk, opened: Callable[[int], int]) -> None:
        """``opened`` opens the file of a page by its number; it returns -1 where there is none to be read."""
        self._disk = disk
        self._opened = opened
        self._fds: dict[int, int] = {}

    def open(self, number: int) -> Place | None:
        """Return the place of a page: the start of its file, which is opened unless it is open."""
        fd = self._fds.get(number)
        if fd is None:
            fd = self._fds[number] = self._opened(number)
        return (fd, 0) if fd >= 0 else None

    def stride_bytes(self, number: int) -> int:
        return 0

    def direct_fd(self, number: int, direct: DirectReads) -> int:
        fd = self._fds[number]
        return fd if direct.begin(fd) else -1

    def close(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            fd = self._fds.get(number, -1)
            if fd >= 0:
                del self._fds[number]
                close_quietly(self._disk, fd)

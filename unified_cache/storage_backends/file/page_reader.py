"""Read side of a file store: pages straight into the buffers of who asks, and the listing of those there are."""

import errno
import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import closing
from pathlib import Path
from threading import Lock

from unified_cache.errors import StorageError
from unified_cache.seal import Label
from unified_cache.storage_backends.catalog import UsedBetween
from unified_cache.storage_backends.common.lru import SCAN_OBJECTS_MAX, page_bytes
from unified_cache.storage_backends.common.names import check_scan
from unified_cache.storage_backends.directory.descriptors import (
    LED_BYTES_MIN,
    READ_FLAGS,
    Directory,
    close_quietly,
    read_all,
    read_cached,
    size_of,
    storage_error,
)
from unified_cache.storage_backends.directory.direct import DIRECT_BLOCK_BYTES, DirectReads, DirectRun
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.foreign import NOT_A_FILE, UNREADABLE, is_whole
from unified_cache.storage_backends.file.fan_directories import OpenDirectories
from unified_cache.storage_backends.file.layout import objects_in, place_of
from unified_cache.storage_backends.protocol import Answer, PageIO, Scan, StoredObject

__all__ = ["FILES_OPEN_MAX", "PageReader"]

FILES_OPEN_MAX = 16
"""Objects of one call open at a time. Taking 16 through each step together, not one through all steps, makes 1 MiB
pages 10 % faster: between two copies the caches would lose the code of every other step."""


DIRECT_BYTES_MIN = 32 << 10
"""Smaller objects are left to the system's memory, where the next reader finds them: what is copied is little."""

_NONE: Set[int] = frozenset()


class PageReader:
    """Finds, reads and lists pages of a file store, whoever opened it. Thread-safe."""

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
        self._direct = DirectReads(disk)
        self._unreadable_count = 0
        self._reads_cached = True
        """Whether the file system is believed to tell what it has in memory."""
        self._guard = Lock()

    @property
    def unreadable_count(self) -> int:
        """Objects that were there and could not be read, so far."""
        return self._unreadable_count

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Tell for each label whether a file of that name is there; one stat each."""
        found: list[Answer] = []
        for label in labels:
            fan, name = place_of(label)
            try:
                directory = self._directories.find(label.identity, fan)
                is_there = directory is not None and size_of(self._disk, directory, name) is not None
            except OSError as error:
                raise self._cannot("look for", label, error) from error
            found.append(Answer.HIT if is_there else Answer.MISS)
        return found

    def scan(self, identity: bytes, cursor: str) -> Scan:
        """List objects of one identity in the order of their names; the cursor is the last name listed.

        Raises:
            InputError: the cursor is not one that a scan returned, or the identity is not a digest.
        """
        check_scan(identity, cursor)
        try:
            with closing(objects_in(self._disk, self._root_fd, identity, cursor)) as objects:
                found = list(itertools.islice(objects, SCAN_OBJECTS_MAX))
        except OSError as error:
            raise self._cannot_list(identity, error) from error
        listed = [StoredObject(known.label, known.object_bytes) for known in found]
        return Scan(listed, found[-1].name if len(found) == SCAN_OBJECTS_MAX else "")

    def used_between(self, identity: bytes) -> UsedBetween | None:
        """Compare modification times, which are the recency of this store; None without objects. Linear in objects."""
        try:
            times = [known.mtime_ns for known in objects_in(self._disk, self._root_fd, identity)]
        except OSError as error:
            raise self._cannot_list(identity, error) from error
        return UsedBetween(min(times), max(times)) if times else None

    def read(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill the buffers of each page; HIT where it was there at that length.

        They are looked at few by few: where the system lacks the first of some, all from there on are read together,
        but for those few of which it has the first.

        Raises:
            StorageError: what has nothing to do with a single object.
        """
        is_asked = bool(pages) and self._direct.is_worth_asking(pages)
        if len(pages) == 1 and not is_asked:
            return [self._read_one(pages[0])]
        answers = [Answer.MISS] * len(pages)
        numbers: Sequence[int] = range(len(pages))
        while numbers:
            few = numbers[:FILES_OPEN_MAX]
            fds: list[int] = []
            try:
                fds.extend(self._opened(pages, number, answers) for number in few)
                if is_asked and self._is_first_cold(pages, few, fds):
                    numbers, is_asked = self._read_cold(pages, numbers, fds, answers), False
                else:
                    self._read_few(pages, few, fds, answers)
                    numbers = numbers[FILES_OPEN_MAX:]
            finally:
                for fd in fds:
                    if fd >= 0:
                        close_quietly(self._disk, fd)
        return answers

    def _read_one(self, page: PageIO) -> Answer:
        """Read a page that comes alone."""
        try:
            opened = self._open_object(page)
        except OSError as error:
            return self._unreadable(page, error)
        if isinstance(opened, Answer):
            return opened
        try:
            return self._read_file(page, opened)
        finally:
            close_quietly(self._disk, opened)

    def _read_few(
        self, pages: Sequence[PageIO], numbers: Sequence[int], fds: Sequence[int], answers: list[Answer]
    ) -> None:
        """Read a few pages whose files are open: taken through each step together, which keeps the copying loop hot."""
        came = self._read_cached(pages, numbers, fds) if len(numbers) > 1 else _NONE
        for number, fd in zip(numbers, fds, strict=True):
            if number in came:
                answers[number] = Answer.HIT
            elif fd >= 0:
                answers[number] = self._read_file(pages[number], fd)

    def _read_file(self, page: PageIO, fd: int) -> Answer:
        """Read a page whose file is open, through the system's memory."""
        try:
            if read_all(self._disk, fd, page.buffers, page_bytes(page), page.checksum):
                return Answer.HIT
        except OSError as error:
            return self._look_at(page, fd, error)
        return self._look_at(page, fd)

    def _is_first_cold(self, pages: Sequence[PageIO], numbers: Sequence[int], fds: Sequence[int]) -> bool:
        """Tell whether the system lacks the first of a few pages that is read directly: it has all of them or none."""
        for number, fd in zip(numbers, fds, strict=True):
            if fd >= 0 and page_bytes(pages[number]) >= DIRECT_BYTES_MIN:
                return self._direct.is_due(fd, 0)
        return False

    def _read_cold(
        self, pages: Sequence[PageIO], numbers: Sequence[int], fds: Sequence[int], answers: list[Answer]
    ) -> list[int]:
        """Read pages that the system does not have in memory, many at a time; return those that are left to be read.

        The files of the first ones are open, and stay so; the others are opened as they can be read.
        """
        own_fds: dict[int, int] = {}
        left: list[int] = []

        def runs() -> Iterator[DirectRun]:
            is_cold = True
            for place, number in enumerate(numbers):
                if place < len(fds):
                    fd = fds[place]
                else:
                    fd = own_fds[number] = self._opened(pages, number, answers)
                if fd < 0:
                    continue
                if not place % FILES_OPEN_MAX:
                    is_cold = self._direct.is_due(fd, 0)
                page = pages[number]
                object_bytes = page_bytes(page)
                if is_cold and object_bytes >= DIRECT_BYTES_MIN and self._begins_directly(fd):
                    stride_bytes = (object_bytes // DIRECT_BLOCK_BYTES + 1) * DIRECT_BLOCK_BYTES
                    yield DirectRun(number, fd, 0, object_bytes, stride_bytes, (page,), is_file=True)
                else:
                    left.append(number)
                    self._close(own_fds, number)

        try:
            with closing(self._direct.read(runs())) as ended:
                for run, is_whole in ended:
                    self._close(own_fds, run.number)
                    if is_whole:
                        answers[run.number] = Answer.HIT
                    else:
                        left.append(run.number)
        finally:
            for number in list(own_fds):
                self._close(own_fds, number)
        return sorted(left)

    def _close(self, fds: dict[int, int], number: int) -> None:
        fd = fds.pop(number, -1)
        if fd >= 0:
            close_quietly(self._disk, fd)

    def _begins_directly(self, fd: int) -> bool:
        """Have reads of a file pass by the system's memory; False where they do not."""
        if self._direct.is_refused:
            return False
        try:
            self._disk.begin_direct(fd)
        except OSError:
            self._direct.refuse()
            return False
        return True

    def _read_cached(self, pages: Sequence[PageIO], numbers: Sequence[int], fds: Sequence[int]) -> Set[int]:
        """Read the small pages that the system has in memory, and let it begin to read all others; return which came.

        So pages that are not cached come from the disk several at a time, and not each after the one before it. Of a
        page that did not come, for whatever reason, the read that follows tells what is wrong.
        """
        cached: set[int] = set()
        if not self._reads_cached:
            return cached
        for number, fd in zip(numbers, fds, strict=True):
            page = pages[number]
            wanted_bytes = page_bytes(page)
            if fd >= 0 and wanted_bytes < LED_BYTES_MIN:
                try:
                    if read_cached(self._disk, fd, page.buffers) == wanted_bytes:
                        cached.add(number)
                        if page.checksum is not None:
                            page.checksum.add_all(page.buffers)
                except OSError as error:
                    if error.errno == errno.EOPNOTSUPP:
                        self._reads_cached = False
                        break
        return cached

    def _look_at(self, page: PageIO, fd: int, fault: OSError | None = None) -> Answer:
        """Clear away what proved not to be a file of exactly that length; any other ``fault`` is one of the object."""
        try:
            status = self._disk.fstat(fd)
        except OSError as error:
            return self._unreadable(page, fault or error)
        object_bytes = page_bytes(page)
        if not is_whole(status.st_mode, status.st_size, object_bytes):
            fan, name = place_of(page.label)
            directory = self._directories.find(page.label.identity, fan)
            if directory is not None:
                self._clear_foreign(directory, name, object_bytes)
            return Answer.FLAWED
        return Answer.MISS if fault is None else self._unreadable(page, fault)

    def _unreadable(self, page: PageIO, error: OSError) -> Answer:
        """Count one object that cannot be read; raise where it is not the object's fault."""
        if error.errno not in UNREADABLE:
            raise self._cannot("read", page.label, error) from error
        with self._guard:
            self._unreadable_count += 1
        return Answer.UNAVAILABLE

    def _opened(self, pages: Sequence[PageIO], number: int, answers: list[Answer]) -> int:
        """Return a descriptor of what stands in the place of an object; -1, and the answer, where it cannot be read."""
        page = pages[number]
        try:
            opened = self._open_object(page)
        except OSError as error:
            opened = self._unreadable(page, error)
        if isinstance(opened, Answer):
            answers[number] = opened
            return -1
        return opened

    def _open_object(self, page: PageIO) -> int | Answer:
        """Open what stands in the place of an object; the answer where there is nothing, or nothing to be read."""
        label = page.label
        fan, name = place_of(label)
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

    def _cannot(self, do: str, label: Label, error: OSError) -> StorageError:
        return storage_error(error, f"cannot {do} {self._path}/{label.object_name}")

    def _cannot_list(self, identity: bytes, error: OSError) -> StorageError:
        return storage_error(error, f"cannot list {self._path}/{identity.hex()}")

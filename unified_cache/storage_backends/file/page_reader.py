"""Read side of a file store: pages straight into the buffers of who asks, and the listing of those there are.

docs/format.md has the names. Sixteen directories for one identity keep each of them short enough, and a durable batch
of any size has no more than these to sync.
"""

import itertools
import re
import stat
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from unified_cache.core.page import PAGE_KEY_BYTES
from unified_cache.core.seal import HEADER_BYTES, Label, may_be_coded
from unified_cache.storage_backends.common.lru import SCANS_MAX
from unified_cache.storage_backends.common.names import (
    IDENTITY_BYTES,
    check_label,
    check_pool,
    check_scan,
    parse_page_name,
)
from unified_cache.storage_backends.directory.disk import (
    DIRECTORY_FLAGS,
    READ_FLAGS,
    Disk,
    StorageFaults,
    block_bytes,
    close_quietly,
    in_blocks,
    opened,
    read_at,
)
from unified_cache.storage_backends.directory.front import DirectoryReader, ReadOnlyStore
from unified_cache.storage_backends.directory.page_reads import DirectReads, Place
from unified_cache.storage_backends.directory.root import NOT_A_FILE, UNREADABLE, StoreFormat, foreign_in, is_whole
from unified_cache.storage_backends.protocol import (
    NAMES_MAX,
    Answer,
    PageIO,
    Scan,
    StoredObject,
    page_bytes,
)

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


def path_of(label: Label) -> str:
    """Return where an object lies in the directory of the store; raise InputError where the label names none."""
    identity, key, pool = label
    if len(identity) != IDENTITY_BYTES or len(key) != PAGE_KEY_BYTES:
        check_label(label)
    check_pool(pool)
    digits = key.hex()
    return f"{identity.hex()}/{digits[:_FAN_DIGITS]}/{digits}.{pool}"


def unlink_object(disk: Disk, root_fd: int, label: Label) -> bool:
    """Remove the file of an object; False where there is none."""
    try:
        disk.unlink(path_of(label), dir_fd=root_fd)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


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


FILES_OPEN_MAX = 16
"""Objects of one call open at a time. Taking 16 through each step together, not one through all steps, makes 1 MiB
pages 10 % faster: between two copies the caches would lose the code of every other step."""


FORMAT = StoreFormat("file store", 2)
"""See docs/format.md."""


class FilePages(DirectoryReader):
    """The pages of a file store, opened to read or to write: finds, reads and lists them. Thread-safe."""

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Return for each label whether a file of that name is there. No access; one stat each."""
        return [_ABSENT if length is None else _PRESENT for length in self.lengths(labels)]

    def lengths(self, labels: Sequence[Label]) -> list[int | None]:
        """Return the bytes of each object, None where there is none; one stat each."""
        with self._calls:
            found: list[int | None] = []
            for label in labels:
                path = path_of(label)
                try:
                    status = self._disk.stat(path, dir_fd=self._root_fd, follow_symlinks=False)
                except (FileNotFoundError, NotADirectoryError):
                    found.append(None)
                except OSError as error:
                    raise self._cannot("look for", label, error) from error
                else:
                    found.append(status.st_size if stat.S_ISREG(status.st_mode) else None)
            return found

    def knows(self, labels: Sequence[Label]) -> list[bool]:
        """Return for each label whether a file has its name, where the system has that name in memory."""
        with self._calls:
            known = [False] * len(labels)
            for number, label in enumerate(labels if self._reads.memory.is_readable else ()):
                try:
                    fd = self._disk.open_cached(path_of(label), READ_FLAGS, dir_fd=self._root_fd)
                except OSError:
                    continue
                known[number] = True
                close_quietly(self._disk, fd)
            return known

    @cached_property
    def _listings(self) -> dict[tuple[bytes, str], Iterator[ListedObject]]:
        """The last scans that have not ended: what comes, by identity and cursor."""
        return {}

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of one identity in the order of their names; the cursor is the last name listed.

        A call that goes on with the last one lists no directory again: what is put there meanwhile may not be listed.
        """
        check_scan(identity, cursor)
        with self._calls, StorageFaults(f"cannot list {self._path}/{identity.hex()}"):
            # Popped, so that no other thread goes on with it.
            objects = self._listings.pop((identity, cursor), None) if cursor else None
            objects = objects or objects_in(self._disk, self._root_fd, identity, cursor)
            found = list(itertools.islice(objects, NAMES_MAX))
            listed = [StoredObject(known.label, known.object_bytes) for known in found]
            cursor_next = found[-1].name if len(found) == NAMES_MAX else ""
            if cursor_next:
                self._listings[identity, cursor_next] = objects
                if len(self._listings) > SCANS_MAX:
                    self._listings.pop(next(iter(self._listings)), None)
            return Scan(listed, cursor_next, [known.mtime_ns for known in found], is_timed=True)

    def _read(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Fill each page's buffers; HIT where it was there at that length. Raise for a fault that is not one page's."""
        sizes = [page_bytes(page) for page in pages]
        came: Set[int] = frozenset()
        if self._reads.may_be_direct(sizes):
            came = self._reads.read_directly(
                pages, sizes, _OpenFiles(self._disk, self._disk.open, self._root_fd, pages)
            )
        elif len(pages) == 1:
            opened = self._open(pages[0].label, sizes[0])
            if not isinstance(opened, int):
                return [opened]
            try:
                return [self._read_file(pages[0], sizes[0], opened)]
            finally:
                close_quietly(self._disk, opened)
        answers = [Answer.HIT] * len(pages)
        for start in range(0, len(pages), FILES_OPEN_MAX):
            fds: dict[int, int] = {}
            try:
                # Taken through each step together, which keeps the copying loop hot.
                for number in range(start, min(start + FILES_OPEN_MAX, len(pages))):
                    if number not in came:
                        opened = self._open(pages[number].label, sizes[number])
                        if isinstance(opened, int):
                            fds[number] = opened
                        else:
                            answers[number] = opened
                if fds:
                    self._begin_reading(fds.values())
                for number, fd in fds.items():
                    answers[number] = self._read_file(pages[number], sizes[number], fd)
            finally:
                for fd in fds.values():
                    close_quietly(self._disk, fd)
        return answers

    def _read_memory(self, pages: Sequence[PageIO]) -> list[bool]:
        """Fill pages that the system has in memory, their names included; see ``PageReads``."""
        if not self._reads.memory.is_readable:
            return [False] * len(pages)
        return self._reads.read_memory(pages, _OpenFiles(self._disk, self._disk.open_cached, self._root_fd, pages))

    def _begin_reading(self, fds: Collection[int]) -> None:
        """Ask the system to read all of these files, unless it has the first in memory."""
        if self._reads.memory.may_lack(next(iter(fds)), 0):
            with suppress(OSError):
                for fd in fds:
                    self._disk.begin_reading(fd)

    def _read_file(self, page: PageIO, object_bytes: int, fd: int) -> Answer:
        """Read a file and a byte further, which shows another length."""
        try:
            if read_at(self._disk.preadv, fd, page.buffers, object_bytes, 0, page.checksum, is_file=True):
                return _PRESENT
        except OSError as error:
            return self._look_at(page.label, object_bytes, fd, error)
        return self._look_at(page.label, object_bytes, fd)

    def _look_at(self, label: Label, object_bytes: int, fd: int, fault: OSError | None = None) -> Answer:
        """Clear away what proved not to be a file of exactly that length; any other ``fault`` is one of the object."""
        try:
            status = self._disk.fstat(fd)
        except OSError as error:
            return self._unreadable(label, fault or error)
        if stat.S_ISREG(status.st_mode) and may_be_coded(object_bytes - HEADER_BYTES, status.st_size):
            return Answer.MISS  # it is the page, but compressed or encrypted: see ``wrappers.coded``
        if not is_whole(status.st_mode, status.st_size, object_bytes):
            self._clear_foreign(path_of(label), object_bytes)
            return Answer.FLAWED
        return Answer.MISS if fault is None else self._unreadable(label, fault)

    def _unreadable(self, label: Label, error: OSError) -> Answer:
        """Return the answer for an object that cannot be read; raise where it is not the object's fault."""
        if error.errno not in UNREADABLE:
            raise self._cannot("read", label, error) from error
        return Answer.UNAVAILABLE

    def _open(self, label: Label, object_bytes: int) -> int | Answer:
        """Open what stands in the place of an object; the answer where there is nothing, or nothing to be read."""
        path = path_of(label)
        try:
            return self._disk.open(path, READ_FLAGS, dir_fd=self._root_fd)
        except (FileNotFoundError, NotADirectoryError):
            return Answer.MISS
        except OSError as error:
            if error.errno not in NOT_A_FILE:
                return self._unreadable(label, error)
        self._clear_foreign(path, object_bytes)
        return Answer.FLAWED

    def _places_in(self, identity: str) -> Iterable[str]:
        # Where the identity's own directory is a link, what it leads to is none of ours.
        return () if foreign_in(self._disk, self._root_fd, (identity,)) else [f"{identity}/{fan}" for fan in FANS]

    def _clear_foreign(self, path: str, object_bytes: int) -> None:
        """Clear away what stands in the place of an object of that length and is none; who only reads leaves it."""


class FileReader(FilePages, ReadOnlyStore):
    """Reads a file store and changes nothing in it: no temp directory, no visit, no time of use, nothing removed.

    Engines may use the store meanwhile: an object is whole under its name or not there. Thread-safe.
    """

    FORMAT = FORMAT

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Read each page straight into its buffers; what lies in its place and is no object stays, and is FLAWED."""
        with self._calls:
            return self._read(pages)

    def taken_bytes(self, object_bytes: int) -> int:
        """Return the blocks of an object, as the writer counts them."""
        return in_blocks(block_bytes(self._disk, self._root_fd), object_bytes)


_Open = Callable[..., int]
"""Opens a file by its path, flags and ``dir_fd``, maybe from memory alone."""


class _OpenFiles:
    """Files of the pages of one call, a few of them open at a time; ``PlacedPages``."""

    open_max = FILES_OPEN_MAX

    def __init__(self, disk: Disk, open_file: _Open, root_fd: int, pages: Sequence[PageIO]) -> None:
        self._disk = disk
        self._open = open_file
        self._root_fd = root_fd
        self._pages = pages
        self._fds: dict[int, int] = {}

    def open(self, number: int) -> Place | None:
        """Return the place of a page: the start of its file, which is opened unless it is open."""
        fd = self._fds.get(number)
        if fd is None:
            try:
                fd = self._open(path_of(self._pages[number].label), READ_FLAGS, dir_fd=self._root_fd)
            except OSError:
                return None
            self._fds[number] = fd
        return fd, 0

    def stride_bytes(self, number: int) -> int:
        return 0

    def direct_fd(self, number: int, direct: DirectReads) -> int:
        fd = self._fds[number]
        return fd if direct.begin(fd) else -1

    def close(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            fd = self._fds.pop(number, -1)
            if fd >= 0:
                close_quietly(self._disk, fd)

"""Front of the stores in a directory: what ``file:`` and ``packed:`` do alike, whatever lies where in it.

The text of an address::

    DIR                  a directory, relative or absolute
    DIR?free=SIZE        the same, and the store leaves that much free on the file system: it evicts, or declines a put

``~`` and ``$NAME`` are replaced as by a shell. A size is written as in ``free=1GiB``, ``free=0``. What stands after the
last question mark are options; a directory with one in its name is written with another one behind it.
"""

import errno
import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import ClassVar, NamedTuple, Self, TypeVar

from unified_cache.core.errors import ConfigError, StorageError, StorageFullError
from unified_cache.core.files import expanded
from unified_cache.core.seal import Label
from unified_cache.core.sizes import bytes_text, parse_bytes
from unified_cache.proto.manifest_pb2 import Manifest
from unified_cache.storage_backends.common.bounded_call import CallsInFlight
from unified_cache.storage_backends.common.names import check_label
from unified_cache.storage_backends.directory.disk import (
    Disk,
    StorageFaults,
    close_quietly,
    disk_bytes,
    missing_bytes,
    storage_error,
)
from unified_cache.storage_backends.directory.page_reads import CALL_BYTES, PageReads
from unified_cache.storage_backends.directory.root import (
    MARKER_NAME,
    StoreFormat,
    StoreRoot,
    check_path,
    foreign_in,
    identities_in,
    open_root_to_read,
    read_manifests,
    write_manifest,
)
from unified_cache.storage_backends.protocol import Answer, Capability, Level, PageIO, Store
from unified_cache.storage_backends.removals import RemovalBuffer, RemovalFeed

logger = logging.getLogger(__name__)

FREE_BYTES_MIN = 64 << 20
"""Free space that a store leaves on the file system, unless the caller says otherwise."""


SPARE_BYTES = 64 << 10
"""Room that an eviction after a fault makes beyond the pages: directories, tables, a manifest, one who enters."""

ROOM_TRIES_MAX = 8
"""Evictions for one put that the system had no room for: other writers take what each has freed."""

ENTRY_FILES = 8
"""Files that a process may have to make before it can evict: directories, a lock, the counter of openings."""


class DirectoryAddress(NamedTuple):
    """Directory of a store, and the free space that it leaves."""

    path: Path
    free_bytes_min: int


def parse_address(rest: str, scheme: str = "file") -> DirectoryAddress:
    """Read the text after ``file:``, or after another scheme with the same forms; raise ConfigError."""
    directory, mark, options = rest.rpartition("?")
    if not mark:
        directory, options = rest, ""
    if not directory:
        raise ConfigError(f"{scheme}: needs a directory after the colon, as in {scheme}:/var/cache/pages")
    if directory.startswith("//") and not directory.startswith("///"):
        bare = directory.lstrip("/")
        raise ConfigError(
            f"{scheme}: names no host: expected {scheme}:{bare} or, from the root, {scheme}:/{bare}, "
            f"found {scheme}:{directory}"
        )
    return DirectoryAddress(expanded(directory), _free_bytes_in(options, scheme) if options else FREE_BYTES_MIN)


def is_read_alone(path: Path) -> bool:
    """Return whether a store is there and this process may read it, but not write it: by its rights or its mount's."""
    may = partial(os.access, effective_ids=os.access in os.supports_effective_ids)
    try:
        return may(path / MARKER_NAME, os.R_OK) and not may(path, os.W_OK)
    except ValueError:  # no system has such a path
        return False


def open_address(
    scheme: str, reader: type["ReadOnlyStore"], storage: Callable[..., Store], rest: str, bytes_max: int | None
) -> Store:
    """Open the store that an address names, see ``parse_address``; to be read where it cannot be written."""
    address = parse_address(rest, scheme)
    if is_read_alone(address.path):
        return reader.open(address.path)
    return storage(address.path, bytes_max=bytes_max, free_bytes_min=address.free_bytes_min)


def _free_bytes_in(options: str, scheme: str) -> int:
    name, _, size = options.partition("=")
    if name != "free":
        raise ConfigError(f"{scheme}: knows the option free=SIZE alone after the question mark, found {options!r}")
    return parse_bytes(f"free= of {scheme}:", size)


def check_limits(disk: Disk, path: Path, expected: StoreFormat, bytes_max: int | None, free_bytes_min: int) -> None:
    """Raise ConfigError for a negative cap or floor, and for a floor above the size of the disk; make nothing."""
    for name, value in (("bytes_max", bytes_max), ("free_bytes_min", free_bytes_min)):
        if value is not None and value < 0:
            raise ConfigError(f"{name} must not be negative, found {value}")
    check_path(path)
    with StorageFaults(f"cannot open a {expected.name} in {path}"):
        if disk.missing_mount(path) is not None:
            return
    sizes = (disk_bytes(disk, each) for each in (path, *path.absolute().parents))
    total_bytes = next((each for each in sizes if each is not None), None)
    if total_bytes is not None and free_bytes_min > total_bytes:
        raise ConfigError(
            f"free= of {expected.scheme}:{path} must be less than its file system, {bytes_text(total_bytes)}, "
            f"found {bytes_text(free_bytes_min)}; name less, as in {expected.scheme}:{path}?free=0"
        )


_Entered = TypeVar("_Entered")


def entered(enter: Callable[[], _Entered], remove_oldest: Callable[[], int], path: Path) -> _Entered:
    """Enter a store; where its file system has no room even for that, its least recent pages go first."""
    try:
        return enter()
    except StorageFullError:
        removed_count = 0
        with suppress(OSError, StorageError):  # the second try says what is wrong
            removed_count = remove_oldest()
    if removed_count:
        logger.warning("%s had no room to be opened: its %d least recent pages were removed", path, removed_count)
    return enter()


def space_text(root: StoreRoot, free_bytes_min: int) -> str:
    """Return what the file system of a store has free, and how much of it the store must leave."""
    free_bytes = -missing_bytes(root.disk, root.fd, 0)
    return f"its file system has {bytes_text(free_bytes)} free, and free= leaves {bytes_text(free_bytes_min)} of it"


Clock = Callable[[], int]
"""Gives nanoseconds since the epoch."""

STAMP_GRAIN_NS = 60_000_000_000
"""A page is stamped for its reads once in so long, as relatime does: hot pages cost no metadata writes."""

STAMP_MAX_NS = 1 << 62
"""In the year 2116; what says a later time is damaged."""

PAGES_WAITING_MAX = 512
"""Pages read and not yet stamped, whose use a crash forgets; writing them takes 3 ms."""


class Stamps:
    """Times of use. A read costs no call on the disk for its time, only every so many do. Thread-safe."""

    def __init__(self, clock: Clock, *, records_reads: bool = True) -> None:
        """Record no reads for a tool that only looks."""
        self._clock = clock
        self._records_reads = records_reads
        self._last_ns = clock()
        self._written_ns = self._last_ns
        self._waiting: dict[Label, int] = {}
        self._guard = Lock()

    def outrun(self, newest_ns: int) -> None:
        """Make each time from now on later than ``newest_ns``, whatever the clock says."""
        with self._guard:
            self._last_ns = self._written_ns = max(self._last_ns, min(newest_ns, STAMP_MAX_NS))

    def new(self, count: int) -> int:
        """Take ``count`` times that are later than all before, and return the last of them."""
        with self._guard:
            return self._new(count)

    def are_due(self) -> bool:
        """Return whether times are to be written now."""
        return len(self._waiting) > PAGES_WAITING_MAX or self._clock() - self._written_ns > STAMP_GRAIN_NS

    def use(self, labels: Sequence[Label], stamp: int | None = None) -> bool:
        """Record that objects are used, the first one at ``stamp``, or now, each other one a nanosecond earlier.

        Return whether times are to be written now.
        """
        if not self._records_reads:
            return False
        with self._guard:
            latest, waiting = self._new(len(labels)) if stamp is None else stamp, self._waiting
            for number in range(len(labels) - 1, -1, -1):
                waiting.pop(labels[number], None)
                waiting[labels[number]] = latest - number
            return len(waiting) > PAGES_WAITING_MAX or latest - self._written_ns > STAMP_GRAIN_NS

    def unwritten(self) -> dict[Label, int]:
        """Return the times that wait to be written; a copy."""
        with self._guard:
            return dict(self._waiting)

    def take(self) -> dict[Label, int]:
        """Return all that waits to be written, the least recent first."""
        with self._guard:
            taken, self._waiting, self._written_ns = self._waiting, {}, self._last_ns
            return taken

    def _new(self, count: int) -> int:
        self._last_ns = max(self._clock(), self._last_ns + 1) + count
        return self._last_ns


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Counts of what one process met since it opened a store."""

    evicted_count: int
    """Objects removed to make room."""
    declined_count: int
    """Pages not stored because there was no room under the cap or on the file system."""
    foreign_count: int
    """Links, FIFOs, directories and other files found in the place of ours."""


class DirectoryReader(Store):
    """A store in a directory, as one who changes nothing sees it. Thread-safe."""

    def __init__(self, disk: Disk, path: Path, root_fd: int, store_format: StoreFormat, opened: str = "") -> None:
        """``root_fd`` stays the caller's; ``opened`` says of a closed store how it was opened."""
        self._disk = disk
        self._path = path
        self._root_fd = root_fd
        self._reads = PageReads(disk)
        self._calls = CallsInFlight(f"the {store_format.name} in {path}{opened}")

    @property
    def path(self) -> Path:
        """Directory of the store."""
        return self._path

    def manifests(self) -> dict[bytes, Manifest | None]:
        """Return the manifest of every identity, by its digest; None where there is none that can be read."""
        with self._calls:
            return read_manifests(self._disk, self._path, self._root_fd)

    def foreign_paths(self) -> list[str]:
        """Return what stands in the place of a directory of pages, links included; linear in identities."""
        with self._calls, StorageFaults(f"cannot list the identities in {self._path}"):
            identities = [each.hex() for each in identities_in(self._disk, self._root_fd)]
            places = [place for identity in identities for place in (identity, *self._places_in(identity))]
            return [str(self._path / each) for each in foreign_in(self._disk, self._root_fd, places)]

    def _places_in(self, identity: str) -> Iterable[str]:
        """Return where the directories of an identity are, beside its own."""
        return ()

    def close(self) -> None:
        """Wait for calls in flight and release every descriptor."""
        if self._calls.close():
            self._let_go()

    @abstractmethod
    def _let_go(self) -> None:
        """Close every descriptor; no call is in flight, and none will be."""

    def _cannot(self, do: str, label: Label, error: OSError) -> StorageError:
        return storage_error(error, f"cannot {do} {self._path}/{label.object_name}")


class ReadOnlyStore(DirectoryReader):
    """A store in a directory that was opened to be read alone, and that its writer may have open. Thread-safe."""

    FORMAT: ClassVar[StoreFormat]

    def __init__(self, disk: Disk, path: Path, root_fd: int) -> None:
        """Own the descriptor from now on."""
        super().__init__(disk, path, root_fd, self.FORMAT, ", opened to be read,")

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, disk: Disk | None = None) -> Self:
        """Open the store in ``path``.

        Raises:
            StorageError: there is none, or the directory cannot be read.
        """
        disk = disk or Disk()
        return cls(disk, Path(path), open_root_to_read(disk, Path(path), cls.FORMAT))

    def capability(self) -> Capability:
        """Return the abilities of the store; the cap of its writer is not known."""
        with self._calls:
            return Capability(
                self.FORMAT.scheme,
                durable=True,
                bytes_max=None,
                call_bytes=CALL_BYTES,
                taken_bytes=self.taken_bytes,
            )

    @property
    def is_read_only(self) -> bool:
        """True."""
        return True

    @property
    def decline_reason(self) -> str:
        """That nothing can be put."""
        return "this process may not write the store"

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Decline every page."""
        return [Answer.DECLINED] * len(pages)

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove nothing: a damaged page stays, and is refused again."""
        return 0

    def clear(self, identity: bytes) -> int:
        """Raise StorageError."""
        raise StorageError(f"{self._path} may not be written by this process", retryable=False)

    @abstractmethod
    def taken_bytes(self, object_bytes: int) -> int:
        """Return what an object of a length takes of its writer's cap."""

    def _let_go(self) -> None:
        close_quietly(self._disk, self._root_fd)


class DirectoryStorage(DirectoryReader):
    """A store in a directory that is written. Thread-safe."""

    def __init__(self, root: StoreRoot, removed: RemovalBuffer, stamps: Stamps) -> None:
        super().__init__(root.disk, root.path, root.fd, root.format)
        self._root = root
        self._removed = removed
        """Objects that have gone, for subscribers."""
        self._stamps = stamps

    @property
    def disk_bytes(self) -> int | None:
        """Size of the file system that the store lies in; None where it does not say."""
        with self._calls:
            return disk_bytes(self._disk, self._root_fd)

    @property
    def counts(self) -> StoreCounts:
        """Counts since the store was opened; a copy."""
        return StoreCounts(self._evicted_count(), self._root.declines.count, self._root.foreign_count)

    @property
    def decline_reason(self) -> str:
        """Reason of the last decline; empty if there was none."""
        return self._root.declines.reason

    def register(self, manifest: Manifest, slabs: Mapping[str, memoryview]) -> None:
        """Write the manifest beside the pages, see ``write_manifest``. The slabs are not needed."""
        with self._calls:
            try:
                write_manifest(self._root, manifest)
            except StorageFullError:
                if not self._evict_for_fault(()):
                    raise
                write_manifest(self._root, manifest)

    def put(self, pages: Sequence[PageIO], level: Level) -> list[Answer]:
        """Write pages in their order, as far as there is room under the cap and on the file system.

        A fault that can be mended is, and the pages are tried again.
        """
        with self._calls:
            for _ in range(ROOM_TRIES_MAX):
                try:
                    return self._put(pages, durable=level is Level.DURABLE)
                except StorageError as error:
                    if not (isinstance(error.__cause__, OSError) and self._mend(error.__cause__, pages)):
                        raise
            return self._put(pages, durable=level is Level.DURABLE)

    @abstractmethod
    def _put(self, pages: Sequence[PageIO], *, durable: bool) -> list[Answer]:
        """Write pages once."""

    def _mend(self, fault: OSError, pages: Sequence[PageIO]) -> bool:
        """Do something about what a put failed by; return whether another try may succeed."""
        return fault.errno in (errno.ENOSPC, errno.EDQUOT) and self._evict_for_fault(pages)

    def memory_reader(self) -> "DirectoryStorage":
        """Return itself: what the system has in memory is read without a wait."""
        return self

    def read_memory(self, pages: Sequence[PageIO]) -> list[bool]:
        """Fill pages that the system has in memory; a page that came becomes recent.

        A call at which times of use are due is left to ``get``, which writes them.
        """
        with self._calls:
            if self._stamps.are_due():
                return [False] * len(pages)
            came = self._read_memory(pages)
            # One that went while it was read may be another page by now; its seal says which it was, and that counts.
            used = [page for page, is_there in zip(pages, came, strict=True) if is_there]
            labels = [page.label for page in used]
            self._use(labels, used)
            self._stamps.use(labels)
            return came

    def touch(self, labels: Sequence[Label]) -> None:
        """Make pages recent, in memory; their times of use are written as those of reads are, many together."""
        with self._calls:
            for label in labels:
                check_label(label)
            self._record_use(labels)

    def removals(self) -> RemovalFeed:
        """Begin to tell a subscriber what goes."""
        with self._calls:
            return self._removed.subscribe()

    def close(self) -> None:
        """Wait for calls in flight, write times of use, release every descriptor and of what is this process's."""
        if self._calls.close():
            self._stamp(self._stamps.take())
            self._let_go()
            self._root.close()

    @abstractmethod
    def _evicted_count(self) -> int:
        """Return how many objects were removed to make room."""

    @abstractmethod
    def _evict_for_fault(self, pages: Sequence[PageIO]) -> bool:
        """Evict for pages that the system had no room for, and ``SPARE_BYTES``; return whether there was something.

        It may be short of bytes that others took meanwhile, of inodes, or of a quota of which ``statvfs`` says nothing.
        """

    def _record_use(self, labels: Sequence[Label], pages: Sequence[PageIO] = ()) -> None:
        """Record that objects are used now, the first one last; write times of use where that is due."""
        self._use(labels, pages)
        if self._stamps.use(labels):
            self._stamp(self._stamps.take())

    @abstractmethod
    def _use(self, labels: Sequence[Label], pages: Sequence[PageIO] = ()) -> None:
        """Make objects recent, the first one most of all. Of what is in ``pages`` no file is asked."""

    @abstractmethod
    def _read_memory(self, pages: Sequence[PageIO]) -> list[bool]:
        """Fill pages that the system has in memory; return which came and are verified."""

    @abstractmethod
    def _stamp(self, stamps: Mapping[Label, int]) -> None:
        """Write times of use; where that fails, the LRU order after a restart is wrong, and no page is lost."""

"""Read side of a packed store, beside the process that has it open: pages by the tables of its files, part by part."""

import stat
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unified_cache.core.seal import HEADER_BYTES, Label, may_be_coded
from unified_cache.storage_backends.common.names import check_label, check_scan
from unified_cache.storage_backends.directory.disk import (
    DIRECTORY_FLAGS,
    READ_FLAGS,
    Disk,
    StorageFaults,
    opened,
)
from unified_cache.storage_backends.directory.front import ReadOnlyStore
from unified_cache.storage_backends.directory.records import PageSlot, Table
from unified_cache.storage_backends.directory.root import NOT_A_FILE, UNREADABLE, StoreFormat
from unified_cache.storage_backends.packed.segment import (
    Segment,
    SegmentSlot,
    contents_of,
    parse_file_name,
    taken_bytes,
)
from unified_cache.storage_backends.protocol import (
    NAMES_MAX,
    Answer,
    Contents,
    PageIO,
    Scan,
    StoredObject,
    page_bytes,
)

FORMAT = StoreFormat("packed store", 1)
"""See docs/format.md."""

PART_PAGES = 1 << 16
"""Pages of an identity whose places are known at a time, about: 40 MB. Each part of a larger one reads its tables."""

PREFIXES = 1 << 16
"""First two bytes of a key, by which an identity is cut into parts: keys are digests."""

_page_name = attrgetter("page_name")


class _Part(NamedTuple):
    """Places of the pages whose keys begin with a prefix in [start, end), as the tables named them."""

    start: int
    end: int
    slots: dict[Label, SegmentSlot]
    labels: list[Label]
    """In the order of their names."""


class _Listing:
    """Pages of one identity in the files that it had when the listing began. Under the guard of the reader."""

    def __init__(self, identity: bytes, segments: Sequence[Segment]) -> None:
        self._identity = identity
        self.segments = segments
        pages_count = sum(contents_of(segments).counts.values())
        self._prefixes_count = min(max(PREFIXES * PART_PAGES // max(pages_count, 1), 1), PREFIXES)
        """Of a part."""
        self._part = _Part(0, 0, {}, [])
        self._found: dict[Label, SegmentSlot | None] = {}
        """Pages that were asked for and lie in other parts than the last one."""

    def scan(self, cursor: str) -> Scan:
        """Return the next objects in the order of their names, all of one part, so that they are found at once."""
        prefix = int(cursor[:4], 16) if cursor else 0
        while True:
            if not self._part.start <= prefix < self._part.end:
                self._part = self._read_part(prefix)
            part = self._part
            start = bisect_right(part.labels, cursor, key=_page_name)
            labels = part.labels[start : start + NAMES_MAX]
            is_over = start + len(labels) == len(part.labels) and part.end == PREFIXES
            if labels or is_over:
                objects = [StoredObject(label, part.slots[label].segment.object_bytes) for label in labels]
                return Scan(objects, "" if is_over else labels[-1].page_name)
            prefix = part.end

    def find(self, labels: Sequence[Label]) -> list[SegmentSlot | None]:
        """Return the place of each page, None where the tables name none."""
        if not self._part.end:
            self._part = self._read_part(0)
        start, end, slots, _ = self._part
        if len(self._found) > PART_PAGES:
            self._found.clear()
        others = [label for label in labels if not start <= int.from_bytes(label.key[:2]) < end]
        unknown = [label for label in others if label not in self._found]
        if unknown:
            words = np.array([int.from_bytes(label.key[:8], "little") for label in unknown], np.uint64)
            self._found.update(dict.fromkeys(unknown))
            self._found.update(self._places(lambda table: np.isin(table.keys[:, 0], words)))
        return [slots.get(label) or self._found.get(label) for label in labels]

    def _read_part(self, prefix: int) -> _Part:
        start = prefix - prefix % self._prefixes_count
        end = min(start + self._prefixes_count, PREFIXES)

        def lie_in_part(table: Table) -> npt.NDArray[np.bool_]:
            prefixes = table.keys[:, 0].astype(np.uint16).byteswap()
            return (prefixes >= start) & (prefixes <= end - 1)

        slots = self._places(lie_in_part)
        return _Part(start, end, slots, sorted(slots, key=_page_name))

    def _places(self, wanted: Callable[[Table], npt.NDArray[np.bool_]]) -> dict[Label, SegmentSlot]:
        """Read the tables; of a page that two of them name the one used last counts, as for the owner."""
        stamps: dict[Label, int] = {}
        slots: dict[Label, SegmentSlot] = {}
        for segment in self.segments:
            table = segment.table()
            is_wanted = wanted(table)
            keys = [row.tobytes() for row in table.keys[is_wanted]]
            numbers, times = table.slots[is_wanted].tolist(), table.stamps[is_wanted].tolist()
            for key, number, stamp in zip(keys, numbers, times, strict=True):
                label = Label(self._identity, key, segment.key.pool)
                if stamps.get(label, -1) < stamp:
                    stamps[label] = stamp
                    slots[label] = PageSlot(segment, number)
        return slots


class PackedReader(ReadOnlyStore):
    """Reads a packed store and changes nothing in it: no lock, no time of use, no room given back.

    Its owner may have it open meanwhile. The files of an identity are opened when a listing of it begins, and when it
    is first asked for, their tables read then and for each part; a page stored after that may be a miss here until the
    next listing. Thread-safe.
    """

    FORMAT = FORMAT

    def __init__(self, disk: Disk, path: Path, root_fd: int) -> None:
        super().__init__(disk, path, root_fd)
        self._listings: dict[bytes, _Listing] = {}
        self._guard = Lock()

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Return for each label whether the tables named it."""
        with self._calls:
            return Answer.of_reads(slot is not None for slot in self._find(labels))

    def lengths(self, labels: Sequence[Label]) -> list[int | None]:
        """Return the bytes of each object that the tables named, None of others."""
        with self._calls:
            return [None if slot is None else slot.segment.object_bytes for slot in self._find(labels)]

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Read each page straight into its buffers; one that its owner evicted meanwhile is a miss."""
        with self._calls:
            return list(map(self._read, pages, self._find([page.label for page in pages])))

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of one identity in the order of their names; a listing that begins opens the files again."""
        with self._calls:
            check_scan(identity, cursor)
            with self._guard, self._faults(identity):
                return self._listing(identity, is_new=not cursor).scan(cursor)

    def contents(self, identity: bytes) -> Contents:
        """Count the lines of the tables, and when their pages were used."""
        with self._calls, self._faults(identity):
            check_scan(identity, "")
            return contents_of(segments_of(self._disk, self._root_fd, identity))

    def taken_bytes(self, object_bytes: int) -> int:
        """Return the slot and the line of an object, as its owner counts them."""
        return taken_bytes(object_bytes)

    def _let_go(self) -> None:
        for listing in self._listings.values():
            for segment in listing.segments:
                segment.close()
        self._listings.clear()
        super()._let_go()

    def _read(self, page: PageIO, slot: SegmentSlot | None) -> Answer:
        if slot is None:
            return Answer.MISS
        segment, number = slot.segment, slot.number
        if segment.object_bytes != page_bytes(page):
            is_coded = may_be_coded(page_bytes(page) - HEADER_BYTES, segment.object_bytes)
            return Answer.MISS if is_coded else Answer.FLAWED
        try:
            is_whole = segment.read(number, page.buffers, page.checksum)
            entry = segment.entry(number)  # after the page: its owner takes an entry back before it gives the slot away
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise self._cannot("read", page.label, error) from error
            return Answer.UNAVAILABLE
        if entry is None or entry.key != page.label.key:
            return Answer.MISS
        return Answer.HIT if is_whole else Answer.FLAWED

    def _find(self, labels: Sequence[Label]) -> list[SegmentSlot | None]:
        found: list[SegmentSlot | None] = []
        for label in labels:
            check_label(label)
        # Of one identity, as a rule.
        for identity, some in groupby(labels, key=attrgetter("identity")):
            with self._guard, self._faults(identity):
                found += self._listing(identity).find(list(some))
        return found

    def _listing(self, identity: bytes, *, is_new: bool = False) -> _Listing:
        if is_new or identity not in self._listings:
            self._listings[identity] = _Listing(identity, segments_of(self._disk, self._root_fd, identity))
        return self._listings[identity]

    def _faults(self, identity: bytes) -> StorageFaults:
        return StorageFaults(f"cannot read the tables in {self._path}/{identity.hex()}")


def segments_of(disk: Disk, root_fd: int, identity: bytes, flags: int = READ_FLAGS) -> list[Segment]:
    """Open the files of an identity; names that are no files of a packed store are passed over."""
    try:
        with opened(disk, identity.hex(), DIRECTORY_FLAGS, dir_fd=root_fd) as directory_fd:
            names = disk.listdir(directory_fd)
    except (FileNotFoundError, NotADirectoryError):
        return []
    segments: list[Segment] = []
    for name in names:
        parsed = parse_file_name(identity, name)
        if parsed is None:
            continue
        with suppress(FileNotFoundError):  # its last page may have left it meanwhile
            try:
                fd = disk.open(f"{identity.hex()}/{name}", flags, dir_fd=root_fd)
            except OSError as error:
                if error.errno in NOT_A_FILE:
                    continue
                raise
            segment = Segment(disk, fd, *parsed)
            if stat.S_ISREG(disk.fstat(fd).st_mode):
                segments.append(segment)
    return segments

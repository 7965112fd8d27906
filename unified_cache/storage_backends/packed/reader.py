"""A packed store opened to be read alone: by its owner or root, on a mount that cannot be written, beside an engine.

Whoever writes the store empties the entry of a slot before the slot gets another page, and enters a page after its
bytes, at a later time of use than all before. So bytes that were read between two equal looks at an entry are those of
the page that it names: reading needs no lock, and holds up nobody.
"""

import os
import stat
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from unified_cache.seal import Label
from unified_cache.storage_backends.catalog import UsedBetween
from unified_cache.storage_backends.common.lru import SCAN_OBJECTS_MAX, page_bytes
from unified_cache.storage_backends.common.names import check_label, check_scan
from unified_cache.storage_backends.directory.descriptors import (
    DIRECTORY_FLAGS,
    READ_FLAGS,
    Directory,
    storage_error,
)
from unified_cache.storage_backends.directory.direct import CALL_BYTES
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.foreign import NOT_A_FILE, UNREADABLE
from unified_cache.storage_backends.directory.front import DirectoryReader
from unified_cache.storage_backends.directory.root import open_root_to_read
from unified_cache.storage_backends.packed.segment import Segment, SegmentSlot, parse_file_name
from unified_cache.storage_backends.packed.store import FORMAT
from unified_cache.storage_backends.protocol import Answer, Capability, PageIO, Scan, StoredObject

__all__ = ["PackedReader"]

LOOKS_MAX = 4
"""Reads of a page whose entry changes each time; a time of use is written once a minute at most."""


class _Listing(NamedTuple):
    """Pages of one identity as its tables named them."""

    slots: dict[Label, SegmentSlot]
    names: list[str]
    """Of the pages, in order."""
    labels: list[Label]
    """In the order of ``names``."""
    used: UsedBetween | None


class PackedReader(DirectoryReader):
    """Reads a packed store and changes nothing in it: no lock, no time of use, no room given back.

    Its owner may have it open meanwhile. The tables of an identity are read when a listing of it begins, and when it is
    first asked for; a page stored after that is a miss here until the next listing. Thread-safe.
    """

    def __init__(self, disk: Disk, path: Path, root: Directory) -> None:
        super().__init__(disk, path, root.fd, FORMAT, ", opened to be read,")
        self._root = root
        self._listings: dict[bytes, _Listing] = {}
        self._guard = Lock()

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, disk: Disk | None = None) -> "PackedReader":
        """Open the store in ``path``.

        Raises:
            StorageError: there is none, or the directory cannot be read.
        """
        disk = disk or Disk()
        return cls(disk, Path(path), open_root_to_read(disk, Path(path), FORMAT))

    def capability(self) -> Capability:
        """Say what the store can do; the cap of whoever writes it is not known."""
        with self._calls:
            return Capability("packed", durable=True, bytes_max=None, call_bytes=CALL_BYTES)

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Tell for each label whether the tables named it.

        Raises:
            StorageError: a table cannot be read.
        """
        with self._calls:
            return Answer.of_reads(self._find(label) is not None for label in labels)

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Read each page straight into its buffers; one that its owner let go meanwhile is a miss.

        Raises:
            StorageError: a table cannot be read, or a fault that is not one page's.
        """
        with self._calls:
            return [self._read(page) for page in pages]

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of one identity in the order of their names; a listing that begins reads the tables anew.

        Raises:
            InputError: the cursor is not one that a scan returned, or the identity is not a digest.
            StorageError: a table cannot be read.
        """
        with self._calls:
            check_scan(identity, cursor)
            listing = self._listing(identity) if cursor else self._list_anew(identity)
            start = bisect_right(listing.names, cursor)
            labels = listing.labels[start : start + SCAN_OBJECTS_MAX]
            objects = [StoredObject(label, listing.slots[label].segment.object_bytes) for label in labels]
            return Scan(objects, labels[-1].page_name if start + len(labels) < len(listing.names) else "")

    def used_between(self, identity: bytes) -> UsedBetween | None:
        """Compare times of use; None without objects.

        Raises:
            StorageError: a table cannot be read.
        """
        with self._calls:
            return self._listing(identity).used

    def _let_go(self) -> None:
        for listing in self._listings.values():
            for segment in {slot.segment for slot in listing.slots.values()}:
                segment.close()
        self._listings.clear()
        self._root.close()

    def _read(self, page: PageIO) -> Answer:
        slot = self._find(page.label)
        if slot is None:
            return Answer.MISS
        segment, number = slot
        if segment.object_bytes != page_bytes(page):
            return Answer.FLAWED
        try:
            before = segment.entry(number)
            for _ in range(LOOKS_MAX):
                if before is None or before.key != page.label.key:
                    return Answer.MISS
                is_whole = segment.read(number, page.buffers, page.checksum)
                after = segment.entry(number)
                if after == before:
                    return Answer.HIT if is_whole else Answer.UNAVAILABLE
                before = after
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise self._cannot("read", page.label, error) from error
        return Answer.UNAVAILABLE

    def _find(self, label: Label) -> SegmentSlot | None:
        check_label(label)
        return self._listing(label.identity).slots.get(label)

    def _listing(self, identity: bytes) -> _Listing:
        listing = self._listings.get(identity)
        return self._list_anew(identity) if listing is None else listing

    def _list_anew(self, identity: bytes) -> _Listing:
        try:
            listing = _listing_of(self._disk, self._root_fd, identity)
        except OSError as error:
            raise storage_error(error, f"cannot read the tables in {self._path}/{identity.hex()}") from error
        with self._guard:
            self._listings[identity] = listing
        return listing


def _listing_of(disk: Disk, root_fd: int, identity: bytes) -> _Listing:
    """Read every table of an identity. Of a page that two tables name the one used last counts, as for the owner."""
    stamps: dict[Label, int] = {}
    slots: dict[Label, SegmentSlot] = {}
    for segment in _segments_of(disk, root_fd, identity):
        for entry in segment.entries():
            label = Label(identity, entry.key, segment.key.pool)
            if stamps.get(label, -1) < entry.stamp:
                stamps[label] = entry.stamp
                slots[label] = SegmentSlot(segment, entry.slot)
    labels = sorted(slots, key=lambda label: label.page_name)
    used = UsedBetween(min(stamps.values()), max(stamps.values())) if stamps else None
    return _Listing(slots, [label.page_name for label in labels], labels, used)


def _segments_of(disk: Disk, root_fd: int, identity: bytes) -> list[Segment]:
    """Open the files of an identity; names that are no files of a packed store are passed over."""
    try:
        directory = Directory(disk, disk.open(identity.hex(), DIRECTORY_FLAGS, dir_fd=root_fd))
    except (FileNotFoundError, NotADirectoryError):
        return []
    segments: list[Segment] = []
    for name in disk.listdir(directory.fd):
        parsed = parse_file_name(identity, name)
        if parsed is None:
            continue
        with suppress(FileNotFoundError):  # its last page may have left it meanwhile
            try:
                fd = disk.open(name, READ_FLAGS, dir_fd=directory.fd)
            except OSError as error:
                if error.errno in NOT_A_FILE:
                    continue
                raise
            segment = Segment(disk, fd, *parsed)
            if stat.S_ISREG(disk.fstat(fd).st_mode):
                segments.append(segment)
    return segments

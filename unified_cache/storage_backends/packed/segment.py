"""Segment: a file of equal slots; first a table that names the page in each slot, then the pages, see docs/format.md.

Identity, pool and length of the pages are in the name of the file, for they are the same for all. A page is written
before its entry: an entry that proves itself is the commit.
"""

import errno
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from threading import Lock
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from unified_cache.core.page import PAGE_KEY_BYTES, PageKey
from unified_cache.core.seal import PageChecksum
from unified_cache.storage_backends.directory.disk import Disk, close_quietly, distrust, read_at, write_at
from unified_cache.storage_backends.directory.page_reads import DirectReads, Place
from unified_cache.storage_backends.directory.records import KEY_WORDS, PageSlot, Table, key_hashes
from unified_cache.storage_backends.protocol import Contents, UsedBetween

FILE_BYTES = 4 << 30
"""Pages of a file take about as much, so a terabyte of pages of 64 KiB and more has 256 files, all open; one of 4 KiB
pages has 4096, see ``SLOTS_MAX``. What was not written takes no room."""

SLOTS_MAX = 65_536
"""Of one file, whose table is read at once when the store is opened: 3 MiB."""

BLOCK_BYTES = 4096
"""Slots of large pages begin with a block of the file system: nobody writes part of another's, and each can go."""

GRAIN_BYTES = 128
"""Of slots so small that a block for each would waste an eighth and more."""

_ENTRY = struct.Struct(f"<{PAGE_KEY_BYTES}sQQ")
_STAMP = struct.Struct("<Q")
_STAMP_OFFSET = _ENTRY.size - _STAMP.size
ENTRY_BYTES = _ENTRY.size
"""Of the line that names a page in the table of its file."""

_FREE = bytes(ENTRY_BYTES)
_NAME = re.compile(r"([a-z0-9][a-z0-9_]{0,31})\.([0-9]{1,15})\.([0-9]{1,9})\.pack")


class SegmentKey(NamedTuple):
    """Identity, pool and length that all pages of a segment share."""

    identity: bytes
    pool: str
    object_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Distance from one page to the next."""
        return _slot_bytes(self.object_bytes)

    @property
    def slots_count(self) -> int:
        """Pages that a file has room for."""
        return min(max(FILE_BYTES // self.slot_bytes, 1), SLOTS_MAX)

    def file_name(self, number: int) -> str:
        """Name a file in the directory of the identity."""
        return f"{self.pool}.{self.object_bytes}.{number}.pack"


@lru_cache(maxsize=1024)
def taken_bytes(object_bytes: int) -> int:
    """Return what a page of a length takes of the file system: its slot, and its line in the table."""
    return _slot_bytes(object_bytes) + ENTRY_BYTES


def _slot_bytes(object_bytes: int) -> int:
    grain = BLOCK_BYTES if object_bytes >= 8 * BLOCK_BYTES else GRAIN_BYTES
    return max(-(-object_bytes // grain), 1) * grain


def parse_file_name(identity: bytes, name: str) -> tuple[SegmentKey, int] | None:
    """Read the name of a file back into its shape and number; None where it is not one."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    key, number = SegmentKey(identity, match[1], int(match[2])), int(match[3])
    return (key, number) if key.file_name(number) == name else None


class TableEntry(NamedTuple):
    """One line of a table that proves itself."""

    slot: int
    key: PageKey
    stamp: int


class Segment:
    """An open file. Its descriptor is closed when the last thread that uses it lets it go, or by ``close``.

    Thread-safe as long as nobody writes a slot that another one writes.
    """

    def __init__(self, disk: Disk, fd: int, key: SegmentKey, number: int) -> None:
        """Own ``fd``, which is open for reading, and for writing where the store is."""
        self._disk = disk
        self._fd = fd
        self._direct_fd = -1
        """Of the same file, for direct reads; opened with the first of them."""
        self.slot_bytes = key.slot_bytes
        self._pages_offset = -(-key.slots_count * _ENTRY.size // BLOCK_BYTES) * BLOCK_BYTES
        self._syncing = Lock()
        """Of two threads in a sync that fails the system tells one alone, since they share the descriptor."""
        self.is_trusted = True
        """Whether a sync can be believed: no sync has failed, and the file has its name."""
        self.key = key
        self.object_bytes = key.object_bytes
        self.records_count = key.slots_count
        self.number = number
        self.records_start = 0

    def read(self, slot: int, buffers: Sequence[memoryview], checksum: PageChecksum | None = None) -> bool:
        """Fill buffers of ``object_bytes`` in all with a page; False where the file ends before it does."""
        offset = self._pages_offset + slot * self.slot_bytes
        return read_at(self._disk.preadv, self._fd, buffers, self.object_bytes, offset, checksum)

    def place_of(self, slot: int) -> Place:
        """Return the place of a page in this file, which is open as long as somebody refers to the segment."""
        return self._fd, self._pages_offset + slot * self.slot_bytes

    def direct_fd(self, direct: DirectReads) -> int:
        """Return a descriptor of the same file that passes by the system's memory; -1 where there is none to be had."""
        with self._syncing:
            if self._direct_fd < 0 and not direct.is_refused:
                self._direct_fd = self._opened_directly(direct)
            return -1 if direct.is_refused else self._direct_fd

    def write(self, slot: int, buffers: Sequence[memoryview]) -> None:
        """Write a page of ``object_bytes``."""
        write_at(self._disk, self._fd, buffers, self._pages_offset + slot * self.slot_bytes)

    def enter(self, entries: Sequence[TableEntry]) -> None:
        """Record the pages of slots that were written. Slots in ascending order."""
        lines = [_ENTRY.pack(key, xxh3_64_intdigest(key, seed=slot), stamp) for slot, key, stamp in entries]
        self._write_lines([entry.slot for entry in entries], lines)

    def clear(self, slots: Sequence[int]) -> None:
        """Record slots as free. Slots in ascending order."""
        self._write_lines(slots, [_FREE] * len(slots))

    def use(self, slot: int, stamp: int) -> None:
        """Record when the page in a slot was used, unless it was used later."""
        offset = slot * _ENTRY.size + _STAMP_OFFSET
        text = self._disk.pread(self._fd, _STAMP.size, offset)
        if len(text) == _STAMP.size and _STAMP.unpack(text)[0] < stamp:
            self._disk.pwrite(self._fd, _STAMP.pack(stamp), offset)

    def sync(self) -> None:
        """Make everything that was written survive a crash; raise OSError where that fails, or ever has."""
        with self._syncing:
            was_trusted = self.is_trusted
            try:
                if was_trusted:
                    self._disk.fdatasync(self._fd)
                if not self._disk.fstat(self._fd).st_nlink:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.key.file_name(self.number))
            except OSError:
                self.is_trusted = False
                distrust(self._disk, self._fd)
                raise
            if not was_trusted:
                raise OSError(
                    errno.EIO, f"{os.strerror(errno.EIO)} at an earlier sync", self.key.file_name(self.number)
                )

    def punch(self, slots: Sequence[int]) -> None:
        """Give the room of free slots back to the file system, where they have any. Slots in ascending order."""
        for first, count in _runs(slots):
            start = self._pages_offset + first * self.slot_bytes
            end = start + count * self.slot_bytes
            # A hole costs the file system as much again where there is one; a slot that shares its blocks has no room.
            if self._disk.has_data(self._fd, -(-start // BLOCK_BYTES) * BLOCK_BYTES, end // BLOCK_BYTES * BLOCK_BYTES):
                self._disk.punch(self._fd, start, end - start)

    def table(self) -> Table:
        """Read the table: slots that hold pages, as far as the file reaches."""
        text = bytearray(self.key.slots_count * _ENTRY.size)
        read_at(self._disk.preadv, self._fd, [memoryview(text)], len(text))
        lines = np.frombuffer(text, "<u8").reshape(-1, KEY_WORDS + 2)[: self.reach(self.object_bytes)]
        slots = np.flatnonzero(lines[:, KEY_WORDS])
        lines = lines[slots]
        is_proved = key_hashes(lines[:, :KEY_WORDS], slots.astype(np.uint64)) == lines[:, KEY_WORDS]
        slots, lines = slots[is_proved], lines[is_proved]
        return Table(slots, lines[:, :KEY_WORDS], lines[:, KEY_WORDS + 1])

    def entry(self, slot: int) -> TableEntry | None:
        """Read one line of the table; None where the slot is free, or the line does not prove itself."""
        line = self._disk.pread(self._fd, _ENTRY.size, slot * _ENTRY.size)
        if len(line) < _ENTRY.size:
            return None
        key, check, stamp = _ENTRY.unpack(line)
        return TableEntry(slot, key, stamp) if check and check == xxh3_64_intdigest(key, seed=slot) else None

    def reach(self, bytes_min: int) -> int:
        """Return the first slot that the file has less than ``bytes_min`` of, which are not more than a slot."""
        length = self._disk.fstat(self._fd).st_size - self._pages_offset
        reached = (length - bytes_min) // self.slot_bytes + 1 if bytes_min else self.key.slots_count
        return min(max(reached, 0), self.key.slots_count)

    def close(self) -> None:
        """Close the descriptor now; nobody may be using it."""
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                close_quietly(self._disk, fd)
        self._fd = self._direct_fd = -1

    def __del__(self) -> None:
        self.close()

    def _opened_directly(self, direct: DirectReads) -> int:
        try:
            # By the descriptor: whatever is under its name now, this is the file that is meant.
            fd = self._disk.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1
        if direct.begin(fd):
            return fd
        close_quietly(self._disk, fd)
        return -1

    def _write_lines(self, slots: Sequence[int], lines: Sequence[bytes]) -> None:
        done = 0
        for first, count in _runs(slots):
            text = memoryview(b"".join(lines[done : done + count]))
            write_at(self._disk, self._fd, [text], first * _ENTRY.size)
            done += count


SegmentSlot = PageSlot[Segment]


class PlacedSlots:
    """The pages of one call by their slots, None where there is none; ``PlacedPages``."""

    def __init__(self, slots: Sequence[SegmentSlot | None]) -> None:
        self.open_max = max(len(slots), 1)
        self._slots = slots

    def open(self, number: int) -> Place | None:
        """Return the place of a page, whose file is open anyway."""
        slot = self._slots[number]
        return None if slot is None else slot.segment.place_of(slot.number)

    def stride_bytes(self, number: int) -> int:
        """Return the bytes from slot to slot."""
        slot = self._slots[number]
        return 0 if slot is None else slot.segment.slot_bytes

    def direct_fd(self, number: int, direct: DirectReads) -> int:
        """Return the descriptor of the page's file that reads directly."""
        slot = self._slots[number]
        return -1 if slot is None else slot.segment.direct_fd(direct)

    def close(self, numbers: Iterable[int]) -> None:
        """Leave the files open."""


def by_segment(slots: Iterable[SegmentSlot]) -> dict[Segment, list[SegmentSlot]]:
    """Sort slots into their files, in ascending order."""
    segments: dict[Segment, list[SegmentSlot]] = {}
    for slot in slots:
        segments.setdefault(slot.segment, []).append(slot)
    for inside in segments.values():
        inside.sort(key=lambda slot: slot.number)
    return segments


def contents_of(segments: Iterable[Segment]) -> Contents:
    """Count the pages of one identity by the tables of its files."""
    counts: Counter[tuple[str, int]] = Counter()
    oldest_ns, newest_ns = [], []
    for segment in segments:
        stamps = segment.table().stamps
        if stamps.size:
            counts[segment.key.pool, segment.object_bytes] += stamps.size
            oldest_ns.append(int(stamps.min()))
            newest_ns.append(int(stamps.max()))
    return Contents(counts, UsedBetween(min(oldest_ns), max(newest_ns)) if oldest_ns else None)


def _runs(slots: Sequence[int]) -> Sequence[tuple[int, int]]:
    """Return the first slot and the count of each run of neighbours."""
    if slots and slots[-1] - slots[0] == len(slots) - 1:
        return ((slots[0], len(slots)),)
    runs: list[tuple[int, int]] = []
    start = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1:
            runs.append((slots[start], end - start))
            start = end
    return runs

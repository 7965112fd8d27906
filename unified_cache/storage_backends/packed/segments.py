"""Segments of a packed store on the disk: found, made, emptied, and given back to the file system."""

import heapq
import logging
import os
import resource
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from types import MappingProxyType
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from unified_cache.storage_backends.directory.disk import (
    DIRECTORY_FLAGS,
    anchor,
    close_quietly,
    is_distrusted,
)
from unified_cache.storage_backends.directory.records import PageSlot, Table, new_slot
from unified_cache.storage_backends.directory.root import NOT_A_FILE, UNREADABLE, StoreRoot, identities_in
from unified_cache.storage_backends.packed.segment import (
    Segment,
    SegmentKey,
    SegmentSlot,
    by_segment,
    parse_file_name,
)

_PLACES = 1 << 16
"""Not less than ``SLOTS_MAX``."""


class FreeSlots:
    """The free slots of one key's segments. Bookkeeping only. The lowest used ones go first, so last files empty."""

    def __init__(self, key: SegmentKey) -> None:
        self.key = key
        self._slot_bytes = key.slot_bytes
        self._slots_count = key.slots_count
        self._segments: dict[int, Segment] = {}
        self._idle: list[int] = []
        """Heap of free slots that take room, by file and slot: the number of the file times ``_PLACES``, plus it."""
        self._roomless: list[int] = []
        """Heap of those that take none: given back, and the first of each file that was never used."""
        self._unused: dict[int, int] = {}
        """First slot of each file from which on none was ever used."""
        self._free_count: Counter[int] = Counter()
        """Of each file."""
        self._empty: set[int] = set()
        """Files of which no slot is used."""

    @property
    def segments(self) -> list[Segment]:
        """Return the segments."""
        return list(self._segments.values())

    @property
    def empty_count(self) -> int:
        """Files of which no slot is used."""
        return len(self._empty)

    @property
    def free_count(self) -> int:
        """Free slots of all files."""
        return self._free_count.total()

    @property
    def idle_count(self) -> int:
        """Free slots that take room on the disk."""
        return len(self._idle)

    @property
    def idle_bytes(self) -> int:
        """Room on the disk that they take."""
        return len(self._idle) * self._slot_bytes

    def add(self, segment: Segment, used: npt.NDArray[np.int64], reached: int) -> None:
        """Take in a file: the slots in ``used`` hold pages, other ones below ``reached`` may take room."""
        number = segment.number
        self._segments[number] = segment
        reached = max(reached, int(used.max(initial=-1)) + 1)
        is_free = np.ones(reached, np.bool_)
        is_free[used] = False
        self._idle += (np.flatnonzero(is_free) + number * _PLACES).tolist()
        heapq.heapify(self._idle)
        self._count_free(number, self._slots_count - len(used))
        self._begin_unused(number, reached)

    def take(self, count: int) -> list[SegmentSlot]:
        """Take slots that are free, as many as there are up to ``count``; none of a file that is not trusted."""
        taken: list[SegmentSlot] = []
        for free in (self._idle, self._roomless):
            while free and len(taken) < count:
                number, slot = divmod(heapq.heappop(free), _PLACES)
                segment = self._segments[number]
                if segment.is_trusted:
                    self._free_count[number] -= 1
                    self._empty.discard(number)
                    taken.append(new_slot((segment, slot, 0, 0)))
                    if slot == self._unused[number]:
                        self._begin_unused(number, slot + 1)
        return taken

    def give(self, slots: Iterable[SegmentSlot]) -> None:
        """Give slots back that others may have."""
        for slot in slots:
            self._count_free(slot.segment.number, 1)
            heapq.heappush(self._idle, slot.segment.number * _PLACES + slot.number)

    def take_empty_segments(self) -> list[Segment]:
        """Take the segments of which no slot is used."""
        empty, self._empty = self._empty, set()
        if empty:
            for free in (self._idle, self._roomless):
                free[:] = [place for place in free if place // _PLACES not in empty]
                heapq.heapify(free)
        for number in empty:
            del self._free_count[number], self._unused[number]
        return [self._segments.pop(number) for number in empty]

    def take_idle(self, kept_count: int = 0) -> list[SegmentSlot]:
        """Take free slots that take room, but the next so many; each comes back by ``give_emptied``, or by ``give``."""
        places = sorted(self._idle)
        taken = [PageSlot(self._segments[place // _PLACES], place % _PLACES) for place in places[kept_count:]]
        self._idle = places[:kept_count]
        for slot in taken:
            self._free_count[slot.segment.number] -= 1
            self._empty.discard(slot.segment.number)
        return taken

    def give_emptied(self, slots: Iterable[SegmentSlot]) -> None:
        """Take slots back that take no room any more."""
        for slot in slots:
            self._count_free(slot.segment.number, 1)
            heapq.heappush(self._roomless, slot.segment.number * _PLACES + slot.number)

    def _count_free(self, number: int, count: int) -> None:
        self._free_count[number] += count
        if self._free_count[number] == self._slots_count:
            self._empty.add(number)

    def _begin_unused(self, number: int, slot: int) -> None:
        """Set from where on no slot of a file was ever used; the heap has the first of them alone."""
        self._unused[number] = slot
        if slot < self._slots_count:
            heapq.heappush(self._roomless, number * _PLACES + slot)


logger = logging.getLogger(__name__)

IDLE_BYTES_MAX = 64 << 20
"""Room on the disk that free slots keep for the next pages; what is beyond goes back to the file system."""

EMPTY_FILES_MAX = 16
"""Files without a page that are kept for the next pages."""

FILES_MAX = 1 << 12
"""Files with pages: 16 TB of large ones."""

DESCRIPTORS_SHARE = 3
"""At most this part of a process's descriptors are of files with pages; each may need another, to read directly."""

_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class SegmentFiles:
    """Slots for pages, in segments by key. Thread-safe; waits for no file inside its guard."""

    def __init__(self, root: StoreRoot) -> None:
        self._root = root
        self._disk = root.disk
        self._free: dict[SegmentKey, FreeSlots] = {}
        self._idle_bytes_max = IDLE_BYTES_MAX
        self._opened: WeakSet[Segment] = WeakSet()
        """Those too that were removed, as long as somebody refers to them."""
        self._files_max = _files_max()
        self.set_aside: list[tuple[SegmentKey, int]] = []
        """Files that could not be read when the store was opened; nobody touches them until it is opened again."""
        self._uncleared: list[SegmentSlot] = []
        """Slots of no page whose line could not be emptied: nobody's until the store is opened again."""
        self._guard = Lock()

    def find(self) -> Iterator[tuple[Segment, Table]]:
        """Open every file that is there, and yield each with its table. Before any other call."""
        for identity in identities_in(self._disk, self._root.fd):
            try:
                fd = self._disk.open(identity.hex(), DIRECTORY_FLAGS, dir_fd=self._root.fd)
            except NotADirectoryError:
                continue
            try:
                # A process that made a file may have died before its name was sure to stay.
                self._disk.fsync(fd)
                names = self._disk.listdir(fd)
            finally:
                close_quietly(self._disk, fd)
            for parsed in [parse_file_name(identity, name) for name in names]:
                table = None if parsed is None else self._table_of(*parsed)
                if table is not None:
                    yield table
        self._disk.fsync(self._root.fd)
        self.give_back()

    def of_identity(self, identity: bytes) -> list[Segment]:
        """Return the files of an identity."""
        with self._guard:
            return [
                segment for key, free in self._free.items() if key.identity == identity for segment in free.segments
            ]

    def take(self, key: SegmentKey, count: int) -> list[SegmentSlot]:
        """Take free slots, of new files where that is needed; none where an OSError is raised."""
        taken: list[SegmentSlot] = []
        try:
            while True:
                with self._guard:
                    free = self._free.get(key) or self._free.setdefault(key, FreeSlots(key))
                    taken += free.take(count - len(taken))
                if len(taken) == count:
                    return taken
                segment = self._make_segment(free)
                with self._guard:
                    free = self._free.setdefault(key, free)  # without a file it is forgotten
                    free.add(segment, np.zeros(0, np.int64), 0)
                    taken += free.take(count - len(taken))
        except OSError:
            self.give(taken)
            raise

    def clear(self, slots: Iterable[SegmentSlot]) -> None:
        """Record on disk that slots are empty; one that cannot be recorded is tried again by ``remove_all``."""
        _, fault = self._cleared(slots)
        if fault is not None:
            raise fault

    def free(self, slots: Iterable[SegmentSlot]) -> None:
        """Record on disk that slots are empty, then take them back; raise OSError where a table cannot be written."""
        cleared, fault = self._cleared(slots)
        self.give(cleared)
        if fault is not None:
            raise fault

    def remove_all(self, identity: bytes) -> None:
        """Remove the files of an identity, none of whose pages is known any more, so that no crash brings one back.

        Files with a page that was stored meanwhile are synced. Those that were set aside go too.
        """
        with self._guard:
            uncleared = [slot for slot in self._uncleared if slot.segment.key.identity == identity]
            self._uncleared = [slot for slot in self._uncleared if slot.segment.key.identity != identity]
        self.clear(uncleared)
        with self._guard:
            free_slots = [free for key, free in self._free.items() if key.identity == identity]
            removed = [(each.key, each.number) for free in free_slots for each in free.take_empty_segments()]
            aside = [each for each in self.set_aside if each[0].identity == identity]
            self.set_aside = [each for each in self.set_aside if each not in aside]  # what has the name later stays
            left = [segment for free in free_slots for segment in free.segments]
        try:
            for key, number in (*removed, *aside):
                with suppress(FileNotFoundError):
                    self._disk.unlink(_path_of(key, number), dir_fd=self._root.fd)
        except OSError:
            with self._guard:
                self.set_aside += removed + aside  # another clear removes them
            raise
        for segment in left:
            with suppress(FileNotFoundError):  # another call has removed it
                segment.sync()
        with suppress(FileNotFoundError):
            anchor(self._disk, self._root.fd, identity.hex())

    def sync(self, segments: Iterable[Segment]) -> None:
        """Make what is in files survive a crash. One that fails is not trusted, and gets no page any more."""
        for segment in segments:
            segment.sync()

    def give(self, slots: Sequence[SegmentSlot]) -> None:
        """Take slots back that nobody uses any more, and give room on the disk back where too much of it is idle."""
        empty: list[Segment] = []
        with self._guard:
            for slot in slots:
                self._free[slot.segment.key].give((slot,))
            if sum([free.empty_count for free in self._free.values()]) > EMPTY_FILES_MAX:
                empty = self._take_empty_segments(self._free.values())
            is_idle = self._idle_bytes() > self._idle_bytes_max
        self._remove(empty)
        if is_idle:
            self.give_back()
            with self._guard:
                # What cannot be given back, on a file system that has no holes, is not tried again at every put.
                self._idle_bytes_max = self._idle_bytes() + IDLE_BYTES_MAX

    def short_files(self, segment_keys: Iterable[SegmentKey]) -> int:
        """Return how many files have to go before so many slots of each shape are taken: an eighth of those there are.

        0 where the process may have more, or they are in files that are there.
        """
        if len(self._opened) < self._files_max:
            return 0
        self._files_max = _files_max()  # the limit may have been raised
        if len(self._opened) < self._files_max:
            return 0
        wanted = Counter(segment_keys)
        with self._guard:
            has_room = all(key in self._free and self._free[key].free_count >= wanted[key] for key in wanted)
        return 0 if has_room else max(len(self._opened) // 8, 1)

    def new_bytes(self, wanted: Mapping[SegmentKey, int]) -> int:
        """Return how much more room on the disk so many slots of each shape would take."""
        with self._guard:
            idle_count = {key: free.idle_count for key, free in self._free.items()}
        return sum(key.slot_bytes * max(count - idle_count.get(key, 0), 0) for key, count in wanted.items())

    def give_back(self, kept: Mapping[SegmentKey, int] = MappingProxyType({})) -> None:
        """Give the room of free slots, but so many of a shape, back to the system: whole files, holes in the others."""
        with self._guard:
            given = [free for key, free in self._free.items() if not kept.get(key)]
            empty = self._take_empty_segments(given)
            idle = {key: by_segment(free.take_idle(kept.get(key, 0))) for key, free in self._free.items()}
        self._remove(empty)
        for key, segments in idle.items():
            for segment, slots in segments.items():
                try:
                    segment.punch([slot.number for slot in slots])
                except OSError:
                    with self._guard:
                        self._free[key].give(slots)
                else:
                    with self._guard:
                        self._free[key].give_emptied(slots)

    def close(self) -> None:
        """Give back what is idle and close every file; no call may be in flight."""
        self.give_back()
        # A traceback that somebody keeps may refer to a file; its descriptor must not live as long.
        for segment in list(self._opened):
            segment.close()

    def _cleared(self, slots: Iterable[SegmentSlot]) -> tuple[list[SegmentSlot], OSError | None]:
        """Empty the lines of slots; return the slots whose lines are empty, and the last fault.

        Where nothing was entered, as on a disk without room for the first lines of a table, nothing has to be written.
        """
        cleared: list[SegmentSlot] = []
        fault: OSError | None = None
        for segment, inside in by_segment(slots).items():
            try:
                segment.clear([slot.number for slot in inside])
            except OSError as error:
                left = [slot for slot in inside if not _is_empty(slot)]
                cleared += [slot for slot in inside if slot not in left]
                fault = error if left else fault
                with self._guard:
                    self._uncleared += left
            else:
                cleared += inside
        return cleared, fault

    def _remove(self, empty: Iterable[Segment]) -> None:
        for segment in empty:
            with suppress(OSError):  # it stays, and keeps its name, until the store is opened again
                self._disk.unlink(_path_of(segment.key, segment.number), dir_fd=self._root.fd)

    def _take_empty_segments(self, freed: Iterable[FreeSlots]) -> list[Segment]:
        """Take the files in which nothing is; shapes without a file are not remembered."""
        empty = [segment for free in freed for segment in free.take_empty_segments()]
        for key in {segment.key for segment in empty}:
            if not self._free[key].segments:
                del self._free[key]
        return empty

    def _idle_bytes(self) -> int:
        return sum([free.idle_bytes for free in self._free.values()])

    def _table_of(self, key: SegmentKey, number: int) -> tuple[Segment, Table] | None:
        """Take in a file and read its table; clear away what is none, set aside what cannot be read."""
        free = self._free.setdefault(key, FreeSlots(key))
        try:
            fd = self._disk.open(_path_of(key, number), _OPEN_FLAGS, dir_fd=self._root.fd)
            segment = self._adopt(fd, key, number)
            status = self._disk.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                self._root.clear_foreign(_path_of(key, number), -1)
                return None
            table = segment.table()
        except OSError as error:
            if error.errno in NOT_A_FILE:
                self._root.clear_foreign(_path_of(key, number), -1)
            elif error.errno in UNREADABLE:
                logger.warning("a file of pages cannot be read and is set aside: %s: %s", _path_of(key, number), error)
                self.set_aside.append((key, number))
            else:
                raise
            return None
        segment.is_trusted = not is_distrusted(status)
        free.add(segment, table.slots, segment.reach(1))
        return segment, table

    def _make_segment(self, free: FreeSlots) -> Segment:
        """Make a file whose name survives a crash."""
        key = free.key
        self._root.make_directory(key.identity)
        with self._guard:
            known = {segment.number for segment in free.segments}
        number = 0
        while True:
            number += 1
            if number in known:
                continue
            flags = _OPEN_FLAGS | os.O_CREAT | os.O_EXCL
            with suppress(FileExistsError):  # another thread's, somebody else's, or one that could not be read
                fd = self._disk.open(_path_of(key, number), flags, 0o600, dir_fd=self._root.fd)
                break
        segment = self._adopt(fd, key, number)
        try:
            anchor(self._disk, self._root.fd, key.identity.hex())
        except OSError:
            with suppress(OSError):
                self._disk.unlink(_path_of(key, number), dir_fd=self._root.fd)
            raise
        return segment

    def _adopt(self, fd: int, key: SegmentKey, number: int) -> Segment:
        segment = Segment(self._disk, fd, key, number)
        with suppress(OSError):  # somebody else's file: a time of access is then written now and then
            self._disk.leave_access_time(fd)
        with self._guard:
            self._opened.add(segment)
        return segment


def _files_max() -> int:
    return min(FILES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // DESCRIPTORS_SHARE)


def _is_empty(slot: SegmentSlot) -> bool:
    with suppress(OSError):
        return slot.segment.entry(slot.number) is None
    return False


def _path_of(key: SegmentKey, number: int) -> str:
    return f"{key.identity.hex()}/{key.file_name(number)}"

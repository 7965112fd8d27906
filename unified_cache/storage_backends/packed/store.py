"""A store in one directory, pages side by side in files of equal slots: for one process, and for small pages.

A page is written into a free slot, synced if it must be durable, and only then entered in the table of its file, so a
page is either entered or not there, whatever kills the process; docs/format.md says what a loss of power leaves. The
tables are read when the store is opened, ten million lines in two seconds, and known in memory from then on, in 60
bytes a page: a read is one call.
"""

import fcntl
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from unified_cache.core.errors import StorageError
from unified_cache.core.seal import Label, is_sealed
from unified_cache.storage_backends.common.names import check_scan
from unified_cache.storage_backends.directory.disk import (
    READ_FLAGS,
    Disk,
    StorageFaults,
    close_quietly,
    missing_bytes,
    missing_inodes,
    storage_error,
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
    space_text,
)
from unified_cache.storage_backends.directory.page_reads import CALL_BYTES
from unified_cache.storage_backends.directory.root import (
    UNREADABLE,
    StoreRoot,
    identities_in,
    open_root,
    open_root_to_read,
)
from unified_cache.storage_backends.packed.index import PageIndex, PutBatch
from unified_cache.storage_backends.packed.reader import FORMAT, PackedReader, segments_of
from unified_cache.storage_backends.packed.segment import (
    ENTRY_BYTES,
    PlacedSlots,
    Segment,
    SegmentKey,
    SegmentSlot,
    TableEntry,
    by_segment,
    contents_of,
    taken_bytes,
)
from unified_cache.storage_backends.packed.segments import SegmentFiles
from unified_cache.storage_backends.protocol import (
    Answer,
    Capability,
    Contents,
    PageIO,
    Scan,
    page_bytes,
)

logger = logging.getLogger(__name__)


class PackedStorage(DirectoryStorage):
    """Keep sealed pages in slots under one directory, with an optional cap and the least recently used going first.

    One process at a time: the directory is locked, and a second one is refused. The cap counts slots and their lines in
    the tables; beyond it a directory takes ``IDLE_BYTES_MAX`` of free slots at most. Batches, recency and full file
    systems are as those of ``FileStorage``. Thread-safe; pages are read and written outside
    the guards.
    """

    def __init__(
        self, root: StoreRoot, segments: SegmentFiles, index: PageIndex, stamps: Stamps, free_bytes_min: int
    ) -> None:
        """``segments`` are those of ``root``, ``index`` knows what is in them."""
        super().__init__(root, index.removed, stamps)
        self._segments = segments
        self._index = index
        self._free_bytes_min = free_bytes_min

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
    ) -> "PackedStorage":
        """Open the store in ``path``, as ``FileStorage.open``. Linear in objects.

        Raises:
            ConfigError: bytes_max or free_bytes_min is negative or more than there can be, or no system takes the path.
            StorageError: the directory cannot be used, is not ours, or is open already, see its message.
        """
        index = _new_index(bytes_max)
        disk, place = disk or Disk(), Path(path)
        check_limits(disk, place, FORMAT, bytes_max, free_bytes_min)
        enter = partial(open_root, disk, place, FORMAT, new_writer)
        root = entered(enter, partial(_remove_oldest, disk, place), place)
        segments = SegmentFiles(root)
        try:
            root.disk.flock(root.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = index.fill(segments.find())
        except BlockingIOError as error:
            root.close()
            raise StorageError(
                f"{path} must be open once at a time, found another one who has it; "
                f"name another directory, or let them share a file: store or a service",
                retryable=True,
            ) from error
        except OSError as error:
            segments.close()
            root.close()
            raise storage_error(error, f"cannot read the packed store in {path}") from error
        stamps = Stamps(clock, records_reads=records_reads)
        stamps.outrun(index.newest_use)
        storage = cls(root, segments, index, stamps, free_bytes_min)
        storage._free_quietly(gone)
        return storage

    @property
    def bytes_used(self) -> int:
        """Bytes that the objects in the store take, and those that are being written."""
        with self._calls:
            return self._index.bytes_used

    def capability(self) -> Capability:
        """Return the abilities of this backend."""
        with self._calls:
            return Capability(
                "packed",
                durable=True,
                bytes_max=self._index.bytes_max,
                call_bytes=CALL_BYTES,
                exists_costs_io=False,
                taken_bytes=taken_bytes,
            )

    def exists(self, labels: Sequence[Label]) -> list[Answer]:
        """Return for each label whether it has a slot. No access, no call on the disk."""
        with self._calls:
            return Answer.of_reads(self._index.have(labels))

    def lengths(self, labels: Sequence[Label]) -> list[int | None]:
        """Return the bytes of each object, None where it has no slot. No call on the disk."""
        with self._calls:
            return [None if slot is None else slot.segment.object_bytes for slot in self._index.find_all(labels)]

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        """Read each page straight into its buffers; a hit makes it recent. A page of another length is dropped."""
        with self._calls:
            sizes = [page_bytes(page) for page in pages]
            left_count = self._index.left_count
            slots, answers, gone = self._index.look_up(pages, sizes)
            if gone:
                self._free_quietly(gone)
            unreadable: dict[Label, SegmentSlot] = {}
            cut_off: dict[Label, SegmentSlot] = {}
            may_be_direct = self._reads.may_be_direct(sizes)
            came = self._reads.read_directly(pages, sizes, PlacedSlots(slots)) if may_be_direct else ()
            for number, slot in enumerate(slots):
                if slot is None:
                    continue
                label, buffers, checksum = pages[number]
                try:
                    is_whole = number in came or slot.segment.read(slot.number, buffers, checksum)
                except OSError as error:
                    if error.errno not in UNREADABLE:
                        raise self._cannot("read", label, error) from error
                    unreadable[label] = slot
                    answers[number] = Answer.UNAVAILABLE
                    continue
                if not is_whole:
                    cut_off[label] = slot
                    answers[number] = Answer.FLAWED
            if self._index.left_count != left_count:
                self._miss_gone(slots, answers)
            if unreadable:
                self._index.set_aside(unreadable)
            if cut_off:
                self._free_quietly(self._index.drop(cut_off))
            hit = Answer.HIT
            if self._stamps.use([page.label for page, answer in zip(pages, answers, strict=True) if answer is hit]):
                self._stamp(self._stamps.take())
            return answers

    def _miss_gone(self, slots: Sequence[SegmentSlot | None], answers: list[Answer]) -> None:
        """Answer MISS of pages that went while they were read: their slots may have become other pages'."""
        read = {number: slot for number, slot in enumerate(slots) if slot is not None and answers[number]}
        for number, is_there in zip(read, self._index.are_there(read.values()), strict=True):
            if not is_there:
                answers[number] = Answer.MISS

    def knows(self, labels: Sequence[Label]) -> list[bool]:
        """Return for each label whether it has a slot, as ``exists`` does."""
        with self._calls:
            return self._index.have(labels)

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove objects; return how many there were. Not synced: a crash may bring them back.

        Raises:
            StorageError: a table cannot be written; what is in it is gone until the store is opened again.
        """
        with self._calls:
            count, gone, unreadable = self._index.forget(labels)
            with StorageFaults(f"cannot remove objects from {self._path}"):
                self._segments.clear(unreadable)
                self._segments.free(gone)
            return count

    def clear(self, identity: bytes) -> int:
        """Remove every object of one identity, unreadable ones too; what is being put is declined. Crash-safe."""
        with self._calls, StorageFaults(f"cannot clear {self._path}/{identity.hex()}"):
            count = sum(map(self.remove, self._index.drop_identity(identity)))
            self._segments.remove_all(identity)
            return count

    def scan(self, identity: bytes, cursor: str = "") -> Scan:
        """List objects of one identity in the order of their names; the cursor is the last name listed."""
        with self._calls:
            check_scan(identity, cursor)
            return self._index.scan(identity, cursor)

    def contents(self, identity: bytes) -> Contents:
        """Count the lines of the tables, and when their pages were used."""
        with self._calls:
            self._stamp(self._stamps.take())
            with StorageFaults(f"cannot read the tables in {self._path}"):
                return contents_of(self._segments.of_identity(identity))

    def _use(self, labels: Sequence[Label], pages: Sequence[PageIO] = ()) -> None:
        self._index.use(labels)

    def _read_memory(self, pages: Sequence[PageIO]) -> list[bool]:
        slots = self._index.slots_of(pages)
        return self._reads.read_memory(pages, PlacedSlots(slots)) if any(slots) else [False] * len(pages)

    def _let_go(self) -> None:
        self._segments.close()
        with suppress(OSError):
            # A child that was forked has the descriptor too, and would keep the lock.
            self._disk.flock(self._root.fd, fcntl.LOCK_UN)

    def _put(self, pages: Sequence[PageIO], *, durable: bool) -> list[Answer]:
        """Write pages once.

        DURABLE syncs each file twice a batch: once when the pages are in it, once when their entries are. A page that
        is there already is read and verified, and its file synced; where one fails, or has failed before, it is written
        into another slot. CACHED believes its entry. After an error none of the pages that were not there before is
        there.
        """
        untrusted = self._untrusted(pages) if durable else {}
        batch = self._index.begin(pages, self._stamps.new(len(pages)), untrusted)
        self._free_quietly(batch.gone)
        if declined_count := batch.stored.count(False):
            self._root.declines.record(declined_count, f"they exceed the cap of {self._index.bytes_max} bytes")
        self._make_files(batch)
        self._make_space(batch)
        try:
            self._write(batch, durable=durable)
        except BaseException as error:
            self._abandon(batch)
            if isinstance(error, OSError):
                raise storage_error(error, f"cannot store pages in {self._path}") from error
            raise
        spare = self._index.commit(batch)
        try:
            if spare and durable:
                self._sync_others(batch, ())
        except OSError as error:
            raise storage_error(error, f"cannot store pages in {self._path}") from error
        finally:
            self._free_quietly(spare)
        if len(batch.fresh) < len(pages) and self._stamps.use([page.label for page in pages], batch.stamp):
            self._stamp(self._stamps.take())
        return Answer.of_puts(batch.stored)

    def _untrusted(self, pages: Sequence[PageIO]) -> dict[Label, SegmentSlot]:
        """Read the pages that are there; return those that do not verify, or that lie in a file that is not trusted."""
        untrusted: dict[Label, SegmentSlot] = {}
        for label, object_bytes in {page.label: page_bytes(page) for page in pages}.items():
            slot = self._index.find(label)
            if slot is None or slot.segment.object_bytes != object_bytes:
                continue
            try:
                is_sound = slot.segment.is_trusted and _is_sound(slot, label)
            except OSError as error:
                if error.errno not in UNREADABLE:
                    raise self._cannot("read", label, error) from error
                is_sound = False
            if not is_sound:
                untrusted[label] = slot
        return untrusted

    def _make_files(self, batch: PutBatch) -> None:
        """Where the process may not open the files that a batch needs, those with the fewest bytes of pages go."""
        short_count = self._segments.short_files(map(batch.segment_key_of, batch.fresh))
        if not short_count:
            return
        gone = self._index.evict_files(short_count, [page.label for page in batch.pages])
        logger.warning(
            "%s has files for as many models, pools and lengths as this process may open; %d pages in %d of them went; "
            "more need a higher limit of open files (ulimit -n)",
            *(self._path, len(gone), short_count),
        )
        self._free_quietly(gone)
        self._segments.give_back()

    def _make_space(self, batch: PutBatch) -> None:
        """Evict until the file system has room for what is new on it; decline the last pages where it has none."""
        most_bytes = sum([taken_bytes(batch.sizes[number]) for number in batch.fresh.values()])
        left_bytes = self._left_bytes(len(batch.fresh))
        if not most_bytes or missing_bytes(self._disk, self._root.fd, most_bytes + left_bytes) <= 0:
            return
        segment_keys = {label: batch.segment_key_of(label) for label in batch.fresh}
        wanted = Counter(segment_keys.values())
        short_bytes = self._short_bytes(wanted)
        if short_bytes > 0:
            self._segments.give_back(kept=wanted)
            short_bytes = self._short_bytes(wanted)
        reason = space_text(self._root, self._free_bytes_min)
        room_bytes = self._index.bytes_used
        declined: list[Label] = []
        for label in reversed(segment_keys):
            while 0 < short_bytes <= room_bytes:
                before_bytes, is_evicted = short_bytes, self._evict(short_bytes, batch.pages)
                self._segments.give_back(kept=wanted)
                short_bytes = self._short_bytes(wanted)
                if not is_evicted or short_bytes >= before_bytes:  # as of a file: store
                    room_bytes = 0
            if short_bytes <= 0:
                break
            declined.append(label)
            wanted[segment_keys[label]] -= 1
            short_bytes = self._short_bytes(wanted)
        if declined:
            self._root.declines.record(self._index.decline(batch, declined), reason)

    def _short_bytes(self, wanted: Mapping[SegmentKey, int]) -> int:
        """Return what the file system lacks for so many slots of each shape; those that are free take nothing."""
        new_bytes = self._segments.new_bytes(wanted)
        left_bytes = self._left_bytes(sum(wanted.values()))
        return missing_bytes(self._disk, self._root.fd, new_bytes + left_bytes) if new_bytes else 0

    def _left_bytes(self, pages_count: int) -> int:
        """Return what so many pages leave of the file system: the reserve, or what the tables need to enter them."""
        return max(self._free_bytes_min, SPARE_BYTES + pages_count * ENTRY_BYTES)

    def _evict(self, short_bytes: int, pages: Sequence[PageIO]) -> bool:
        """Free the least recent slots of so many bytes, of no page in a batch; return whether there were any."""
        slots = self._index.evict(short_bytes, [page.label for page in pages])
        self._free_quietly(slots)
        return bool(slots)

    def _evicted_count(self) -> int:
        return self._index.evicted_count

    def _evict_for_fault(self, pages: Sequence[PageIO]) -> bool:
        wanted_bytes = SPARE_BYTES + sum([taken_bytes(page_bytes(page)) for page in pages])
        is_evicted = self._evict(wanted_bytes, pages)
        self._segments.give_back()
        return is_evicted

    def _write(self, batch: PutBatch, *, durable: bool) -> None:
        """Write what is not there, then say where it is."""
        segment_keys: dict[SegmentKey, list[Label]] = {}
        for label in batch.fresh:
            segment_keys.setdefault(batch.segment_key_of(label), []).append(label)
        for segment_key, labels in segment_keys.items():
            batch.written.update(zip(labels, self._segments.take(segment_key, len(labels)), strict=True))
        entries: dict[Segment, list[TableEntry]] = {}
        for label, slot in batch.written.items():
            number = batch.fresh[label]
            slot.segment.write(slot.number, batch.pages[number].buffers)
            entries.setdefault(slot.segment, []).append(TableEntry(slot.number, label.key, batch.stamp - number))
        if durable:
            self._segments.sync(entries)
        batch.is_entered = True
        for segment, inside in entries.items():
            segment.enter(sorted(inside))
        if durable:
            self._segments.sync(entries)
            self._sync_others(batch, entries)

    def _sync_others(self, batch: PutBatch, synced: Container[Segment]) -> None:
        """Sync pages that another put stored, before or meanwhile, but in ``synced``: maybe they are CACHED alone."""
        others: dict[Segment, list[SegmentSlot]] = {}
        for page, slot in zip(batch.pages, self._index.find_all([page.label for page in batch.pages]), strict=True):
            if slot is not None and slot.segment not in synced and slot != batch.replaced.get(page.label):
                others.setdefault(slot.segment, []).append(slot)
        for segment, there in others.items():
            try:
                self._segments.sync((segment,))
            except FileNotFoundError:
                # A file that its last page has left is removed; one from under a page that is there is a fault.
                if any(self._index.are_there(there)):
                    raise

    def _abandon(self, batch: PutBatch) -> None:
        """Leave nothing of pages that could not be written."""
        self._index.abandon(batch)
        if batch.is_entered:
            self._free_quietly(list(batch.written.values()))
        else:
            self._segments.give(list(batch.written.values()))

    def _free_quietly(self, slots: Sequence[SegmentSlot]) -> None:
        """Free slots. What the tables do not take stays as it is until the store is opened again."""
        if slots:
            with suppress(OSError):
                self._segments.free(slots)

    def _stamp(self, stamps: Mapping[Label, int]) -> None:
        for slot, stamp in zip(self._index.find_all(list(stamps)), stamps.values(), strict=True):
            if slot is not None:
                with suppress(OSError):
                    slot.segment.use(slot.number, stamp)


def _is_sound(slot: SegmentSlot, label: Label) -> bool:
    content = memoryview(bytearray(slot.segment.object_bytes))
    return slot.segment.read(slot.number, (content,)) and is_sealed(content, label)


def _new_index(bytes_max: int | None = None) -> PageIndex:
    return PageIndex(bytes_max, secrets.randbits(64))


def _remove_oldest(disk: Disk, path: Path) -> int:
    """Remove the least recent pages of a store that nobody finds room to enter; return how many."""
    root_fd = open_root_to_read(disk, path, FORMAT)
    try:
        if missing_inodes(disk, root_fd, ENTRY_FILES) > 0:
            return 0  # no page that goes brings one back
        disk.flock(root_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        index = _new_index()
        for identity in identities_in(disk, root_fd):
            index.fill((each, each.table()) for each in segments_of(disk, root_fd, identity, READ_FLAGS | os.O_RDWR))
        oldest = index.evict(SPARE_BYTES, ())
        for segment, inside in by_segment(oldest).items():
            numbers = [slot.number for slot in inside]
            segment.clear(numbers)
            segment.punch(numbers)
        return len(oldest)
    finally:
        close_quietly(disk, root_fd)


open_url = partial(open_address, "packed", PackedReader, PackedStorage.open)

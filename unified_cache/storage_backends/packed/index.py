"""Index of a packed store: the slot of each page, what a cap makes go, and the pages that are being written."""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from threading import Lock

import numpy as np

from unified_cache.core.seal import HEADER_BYTES, Label, may_be_coded
from unified_cache.storage_backends.common.lru import ScansUnderWay
from unified_cache.storage_backends.common.names import check_label
from unified_cache.storage_backends.directory.records import PageRecords, Records, Table
from unified_cache.storage_backends.packed.segment import Segment, SegmentKey, SegmentSlot, taken_bytes
from unified_cache.storage_backends.protocol import Answer, PageIO, Scan, StoredObject, page_bytes
from unified_cache.storage_backends.removals import RemovalBuffer

_label_of: Callable[[tuple[Label, SegmentSlot, int]], Label] = itemgetter(0)


@dataclass(slots=True)
class PutBatch:
    """Pages of one put, and the outcome of each."""

    pages: Sequence[PageIO]
    sizes: Sequence[int]
    stored: list[bool]
    stamp: int
    """Time of use of the first page; each other one is used a nanosecond earlier."""
    latest_use: int
    """The same for the order in memory."""
    last_birth: int
    """Of the page that had been entered last when the batch began."""
    fresh: dict[Label, int] = field(default_factory=dict)
    """Pages to write, with their place in the batch."""
    gone: list[SegmentSlot] = field(default_factory=list)
    """Slots of pages that were evicted or replaced."""
    replaced: dict[Label, SegmentSlot] = field(default_factory=dict)
    """Of the pages to write, those that are there and not to be trusted: they go when what is written is there."""
    written: dict[Label, SegmentSlot] = field(default_factory=dict)
    is_entered: bool = False
    """Whether a table may say of a written page that it is there."""

    def segment_key_of(self, label: Label) -> SegmentKey:
        """Return the key of the segment files that a fresh page belongs to."""
        return SegmentKey(label.identity, label.pool, self.sizes[self.fresh[label]])

    def decline(self, declined: Iterable[Label]) -> None:
        """Answer of pages that they are not stored."""
        gone = frozenset(declined)
        self.stored = [ok and page.label not in gone for page, ok in zip(self.pages, self.stored, strict=True)]


class PageIndex:
    """Slots and recency under one guard. Thread-safe; it makes no call on the disk."""

    def __init__(self, bytes_max: int | None, seed: int) -> None:
        """``seed`` is secret, see ``PageRecords``."""
        self.removed = RemovalBuffer()
        """What has gone, for subscribers; a page that cannot be read has, until it is put again."""
        self.bytes_max = bytes_max
        self.bytes_used = 0
        """What pages take, those too that are being written."""
        self.evicted_count = 0
        self._records: PageRecords[Segment] = PageRecords(seed, taken_bytes)
        self._writing: dict[Label, int] = {}
        """Lengths of pages that have room and no slot yet, the first to have got it first."""
        self._unreadable: dict[Label, list[SegmentSlot]] = {}
        """Slots of pages that could not be read: misses until the store is opened, or they are put, again."""
        self._scans = ScansUnderWay()
        self._guard = Lock()

    @property
    def newest_use(self) -> int:
        """Time of use of the most recent page; what is used from now on is later."""
        return self._records.new_uses(0)

    def find(self, label: Label) -> SegmentSlot | None:
        """Return the slot of an object, None if it is not there; raise InputError for a label that names no object."""
        return self.find_all((label,))[0]

    def find_all(self, labels: Sequence[Label]) -> list[SegmentSlot | None]:
        """Return the slot of each object, as ``find`` does."""
        with self._guard:
            slots = self._records.find_all(labels)
        _check(labels, slots)
        return slots

    def have(self, labels: Sequence[Label]) -> list[bool]:
        """Return whether each object has a slot; raise InputError as ``find`` does."""
        if self._records.are_recent(labels):
            return [True] * len(labels)
        with self._guard:
            have = self._records.have(labels)
        if not all(have):
            _check(labels, have)
        return have

    @property
    def left_count(self) -> int:
        """Pages that have gone so far: while no more have, all that were looked up are there."""
        return self._records.left_count

    def are_there(self, slots: Iterable[SegmentSlot]) -> list[bool]:
        """Return of each slot whether it has still the page that it had when it was looked up."""
        with self._guard:
            return [self._records.is_there(slot) for slot in slots]

    def segments(self) -> list[Segment]:
        """Return the files that pages are in."""
        with self._guard:
            return self._records.segments()

    def fill(self, tables: Iterable[tuple[Segment, Table]]) -> list[SegmentSlot]:
        """Know the pages of tables; return slots to free: of second copies, and beyond the cap."""
        with self._guard:
            gone = self._records.fill(tables)
            self.bytes_used = self._records.taken_bytes()
            over_bytes = 0 if self.bytes_max is None else self.bytes_used - self.bytes_max
            victims, _ = self._records.oldest(over_bytes, ())
            self.evicted_count += len(victims)
            return gone + self._take_out(victims)

    def begin(self, pages: Sequence[PageIO], stamp: int, untrusted: Mapping[Label, SegmentSlot]) -> PutBatch:
        """Grant room to pages that are not there, or where ``untrusted`` says, evicting for them; touch the others.

        No page of the batch is evicted for another: of a chain longer than the cap the first pages stay.
        """
        labels = [page.label for page in pages]
        sizes = [page_bytes(page) for page in pages]
        wanted = dict(zip(labels, sizes, strict=True))  # of a page that is there at two lengths the last one counts
        with self._guard:
            slots = self._records.find_all(labels)
            _check(labels, slots)
            batch = PutBatch(pages, sizes, [], stamp, self._records.new_uses(len(pages)), self._records.last_birth)
            kept: Container[int] = ()
            if any(slots):
                self._records.use(slots, batch.latest_use)  # so that those which may go are found first
                kept = _kept(slots)
            new: dict[Label, int] = {}
            for label, slot in zip(labels, slots, strict=True):
                size, known = wanted[label], self._writing.get(label) if slot is None else slot.segment.object_bytes
                if known != size:
                    if known is not None:
                        batch.gone += self._forget(label, slot)
                    new[label] = size
            self._grant(new, kept, batch)
            for number, (label, slot, size) in enumerate(zip(labels, slots, sizes, strict=True)):
                if slot is not None and label not in new:
                    batch.stored.append(size == wanted[label])
                    if untrusted.get(label) == slot:
                        batch.replaced[label] = slot
                        batch.fresh.setdefault(label, number)
                else:
                    is_granted = self._writing.get(label) == size
                    batch.stored.append(is_granted)
                    if is_granted:
                        batch.fresh.setdefault(label, number)
        return batch

    def evict(self, short_bytes: int, keep: Sequence[Label]) -> list[SegmentSlot]:
        """Forget the least recent objects that take so many bytes, none in ``keep``; return their slots."""
        with self._guard:
            victims, _ = self._records.oldest(short_bytes, _kept(self._records.find_all(keep)))
            self.evicted_count += len(victims)
            return self._take_out(victims)

    def evict_files(self, count: int, keep: Sequence[Label]) -> list[SegmentSlot]:
        """Forget the pages in so many files, those with the fewest bytes, none in ``keep``; return their slots."""
        with self._guard:
            kept = {slot.segment for slot in self._records.find_all(keep) if slot is not None}
            victims = self._records.in_small_files(count, kept)
            self.evicted_count += len(victims)
            return self._take_out(victims)

    def decline(self, batch: PutBatch, labels: Sequence[Label]) -> int:
        """Take back the room of fresh pages, but of those that another thread has stored; return how many others."""
        with self._guard:
            declined = [label for label in labels if not self._is_others(label, self._records.find(label), batch)]
            self._stop_writing(declined)
        for label in labels:
            del batch.fresh[label]
        batch.decline(declined)
        return len(declined)

    def commit(self, batch: PutBatch) -> list[SegmentSlot]:
        """Publish what was written; return slots: of what it replaced, and what others stored or evicted."""
        spare: list[SegmentSlot] = []
        evicted: list[Label] = []
        entered: list[tuple[Label, SegmentSlot, int]] = []
        with self._guard:
            is_alone = self._records.last_birth == batch.last_birth
            for label, slot in batch.written.items():
                there = batch.replaced.get(label) if is_alone else self._records.find(label)
                if there is not None and not self._records.is_there(there):
                    there = None
                size = self._writing.get(label) if there is None else there.segment.object_bytes
                if size != slot.segment.object_bytes:
                    spare.append(slot)
                    evicted.append(label)
                elif there is None or not self._is_others(label, there, batch):
                    if there is None:
                        del self._writing[label]
                    else:
                        self._records.leave(there)
                        spare.append(there)
                    entered.append((label, slot, batch.latest_use - batch.fresh[label]))
                else:
                    spare.append(slot)
            self._records.enter(entered)
            self.removed.restored(map(_label_of, entered))
        if evicted:
            batch.decline(evicted)
        return spare

    def abandon(self, batch: PutBatch) -> None:
        """Take back the room of all fresh pages: they could not be written."""
        with self._guard:
            self._stop_writing(batch.fresh)

    def look_up(
        self, pages: Sequence[PageIO], sizes: Sequence[int]
    ) -> tuple[list[SegmentSlot | None], list[Answer], list[SegmentSlot]]:
        """Return the slot of each page, which becomes recent, None where it is not there at that length; and answers.

        Objects of another length are forgotten, and their slots returned besides; what may be the page, coded, is left.
        """
        answers: list[Answer] = []
        misfits: dict[Label, SegmentSlot] = {}
        labels = [page.label for page in pages]
        with self._guard:
            slots = self._records.find_all(labels)
            for number, slot in enumerate(slots):
                answer = Answer.HIT
                if slot is None:
                    check_label(labels[number])
                    answer = Answer.MISS
                elif slot.segment.object_bytes != sizes[number]:
                    slots[number] = None
                    answer = Answer.MISS
                    if not may_be_coded(sizes[number] - HEADER_BYTES, slot.segment.object_bytes):
                        answer = Answer.FLAWED
                        misfits[labels[number]] = slot
                answers.append(answer)
            self._records.use(slots, self._records.new_uses(len(slots)))
            return slots, answers, self._take_out(list(misfits.values())) if misfits else []

    def slots_of(self, pages: Sequence[PageIO]) -> list[SegmentSlot | None]:
        """Return the slot of each page, None where it is not there at that length. It changes nothing."""
        with self._guard:
            found = self._records.find_all([page.label for page in pages])
        return [
            slot if slot is not None and slot.segment.object_bytes == page_bytes(page) else None
            for slot, page in zip(found, pages, strict=True)
        ]

    def use(self, labels: Sequence[Label]) -> None:
        """Make objects recent, the first one most of all; one that went meanwhile stays gone."""
        with self._guard:
            self._records.use(self._records.find_all(labels), self._records.new_uses(len(labels)))

    def forget(self, labels: Sequence[Label]) -> tuple[int, list[SegmentSlot], list[SegmentSlot]]:
        """Know objects no more; return how many there were, their slots, and those slots that are unreadable."""
        with self._guard:
            slots = self._records.find_all(labels)
            _check(labels, slots)
            there = dict(zip(labels, slots, strict=True))
            unreadable = {label: self._unreadable.pop(label) for label in there if label in self._unreadable}
            count = sum(slot is not None or label in unreadable for label, slot in there.items())
            gone = self._take_out([slot for slot in there.values() if slot is not None])
            return count, gone, [slot for slots in unreadable.values() for slot in slots]

    def drop_identity(self, identity: bytes) -> Iterator[list[Label]]:
        """Take back the room of pages of one identity that are being written; yield the labels of its objects."""
        with self._guard:
            self._stop_writing([label for label in self._writing if label.identity == identity])
            unreadable = [label for label in self._unreadable if label.identity == identity]
            segments = [each for each in self._records.segments() if each.key.identity == identity]
        yield unreadable
        for segment in segments:
            with self._guard:
                labels = [self._records.label_of(record) for record in self._records.records_of(segment).tolist()]
            yield labels

    def drop(self, flawed: Mapping[Label, SegmentSlot]) -> list[SegmentSlot]:
        """Forget pages that are not what they should be, those of them that are where they were; return their slots."""
        with self._guard:
            return self._take_out([slot for slot in flawed.values() if self._records.is_there(slot)])

    def set_aside(self, unreadable: Mapping[Label, SegmentSlot]) -> None:
        """Record that the disk did not give pages, those of them that are where they were."""
        with self._guard:
            for label, slot in unreadable.items():
                if self._records.is_there(slot):
                    self._take_out([slot])
                    self._unreadable.setdefault(label, []).append(slot)

    def scan(self, identity: bytes, cursor: str) -> Scan:
        """List objects of one identity in the order of their names, after the name in ``cursor``.

        The first call, and one that does not go on with the last, is linear in the objects of the identity.
        """
        with self._guard:
            some, end = self._scans.take(identity, cursor, partial(self._parts_of, identity))
            found = self._records.find_all([label for _, label in some])
            listed = [(label, slot) for (_, label), slot in zip(some, found, strict=True) if slot is not None]
            objects = [StoredObject(label, slot.segment.object_bytes) for label, slot in listed]
            return Scan(objects, end, [self._records.use_of(slot.record) for _, slot in listed])

    def _grant(self, new: Mapping[Label, int], keep: Container[int], batch: PutBatch) -> None:
        """Grant room to pages of such lengths: to all at once, or where that fails to one after the other."""
        new_bytes = sum(map(taken_bytes, new.values()))
        if self._make_room(new_bytes, keep, batch):
            self._writing.update(new)
            self.bytes_used += new_bytes
            return
        unfit_bytes = math.inf  # so large a page found no room: none is sought for it again in all that is kept
        for label, size in new.items():
            needed_bytes = taken_bytes(size)
            if needed_bytes < unfit_bytes and self._make_room(needed_bytes, keep, batch):
                self._writing[label] = size
                self.bytes_used += needed_bytes
            else:
                unfit_bytes = min(unfit_bytes, needed_bytes)

    def _is_others(self, label: Label, slot: SegmentSlot | None, batch: PutBatch) -> bool:
        """Return whether another put has stored a page since this batch began."""
        return slot is not None and slot != batch.replaced.get(label)

    def _make_room(self, needed_bytes: int, keep: Container[int], batch: PutBatch) -> bool:
        """Evict the least recent under the cap, pages that others are writing last; return whether there is room."""
        if not needed_bytes or self.bytes_max is None or self.bytes_used + needed_bytes <= self.bytes_max:
            return True
        if needed_bytes > self.bytes_max:
            return False
        victims, short_bytes = self._records.oldest(self.bytes_used + needed_bytes - self.bytes_max, keep)
        if short_bytes > 0:
            unwritten: list[Label] = []
            own = {page.label for page in batch.pages}
            for label, size in self._writing.items():
                if short_bytes > 0 and label not in own:
                    unwritten.append(label)
                    short_bytes -= taken_bytes(size)
            if short_bytes > 0:
                return False
            self.evicted_count += len(unwritten)
            self._stop_writing(unwritten)
        self.evicted_count += len(victims)
        batch.gone += self._take_out(victims)
        return True

    def _forget(self, label: Label, slot: SegmentSlot | None) -> list[SegmentSlot]:
        """Take out a page that is there, or is being written, at another length; return its slot."""
        if slot is not None and self._records.is_there(slot):
            return self._take_out([slot])
        self._stop_writing((label,))
        return []

    def _stop_writing(self, labels: Iterable[Label]) -> None:
        """Take back the room of those pages that are being written."""
        for label in labels:
            size = self._writing.pop(label, None)
            if size is not None:
                self.bytes_used -= taken_bytes(size)

    def _take_out(self, slots: list[SegmentSlot]) -> list[SegmentSlot]:
        self.removed.record(self._records.label_of(slot.record) for slot in slots)
        for slot in slots:
            self._records.leave(slot)
            self.bytes_used -= taken_bytes(slot.segment.object_bytes)
        return slots

    def _parts_of(self, identity: bytes) -> list[Iterator[tuple[int, Label]]]:
        """Return the pages of an identity by the first byte of their keys, those of the first one last."""
        segments = [each for each in self._records.segments() if each.key.identity == identity]
        if not segments:
            return []
        records = np.concatenate([self._records.records_of(segment) for segment in segments])
        first = self._records.first_bytes(records).astype(np.uint8)
        records = records[np.argsort(first, kind="stable")]
        parts = np.split(records, np.cumsum(np.bincount(first, minlength=256))[:-1])
        return [self._part_of(identity, byte, part) for byte, part in enumerate(parts)][::-1]

    def _part_of(self, identity: bytes, first: int, records: Records) -> Iterator[tuple[int, Label]]:
        """Yield time of use and label of records, but of those that are pages of elsewhere by now."""
        for record in records.tolist():
            if self._records.is_live(record):
                label = self._records.label_of(record)
                if label.identity == identity and label.key[0] == first:
                    yield self._records.use_of(record), label


def _kept(slots: Sequence[SegmentSlot | None]) -> frozenset[int]:
    return frozenset([slot.record for slot in slots if slot is not None])


def _check(labels: Sequence[Label], found: Sequence[object]) -> None:
    """Raise InputError for a label that names no object; one that was found is right."""
    for label, is_found in zip(labels, found, strict=True):
        if not is_found:
            check_label(label)

"""Index of a packed store: the slot of each page, and their LRU order."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

from unified_cache.core.seal import HEADER_BYTES, Label, may_be_coded
from unified_cache.storage_backends.common.lru import StoreLru
from unified_cache.storage_backends.common.names import check_label
from unified_cache.storage_backends.packed.segment import SegmentKey, SegmentSlot
from unified_cache.storage_backends.protocol import Answer, PageIO, Scan, StoredObject, page_bytes
from unified_cache.storage_backends.removals import RemovalBuffer


@dataclass(slots=True)
class PutBatch:
    """Pages of one put, and the outcome of each."""

    pages: Sequence[PageIO]
    stored: list[bool]
    stamp: int
    """Time of use of the first page; each other one is used a nanosecond earlier."""
    fresh: dict[Label, int]
    """Pages to write, with their place in the batch."""
    gone: list[SegmentSlot]
    """Slots of pages that were evicted or replaced."""
    replaced: dict[Label, SegmentSlot] = field(default_factory=dict)
    """Of the pages to write, those that are there and not to be trusted: they go when what is written is there."""
    written: dict[Label, SegmentSlot] = field(default_factory=dict)
    is_entered: bool = False
    """Whether a table may say of a written page that it is there."""

    def segment_key_of(self, label: Label) -> SegmentKey:
        """Return the key of the segment files that a fresh page belongs to."""
        return SegmentKey(label.identity, label.pool, page_bytes(self.pages[self.fresh[label]]))

    def decline(self, declined: Iterable[Label]) -> None:
        """Answer of pages that they are not stored."""
        gone = frozenset(declined)
        self.stored = [ok and page.label not in gone for page, ok in zip(self.pages, self.stored, strict=True)]


class PageIndex:
    """Slots and recency under one guard. Thread-safe; it makes no call on the disk."""

    def __init__(self, lru: StoreLru) -> None:
        self.removed = RemovalBuffer()
        """What has gone, for subscribers; a page that cannot be read has, until it is put again."""
        self.lru = lru
        """Sizes count of pages that are being written too."""
        self._slots: dict[Label, SegmentSlot] = {}
        self._unreadable: dict[Label, list[SegmentSlot]] = {}
        """Slots of pages that could not be read: misses until the store is opened, or they are put, again."""
        self.evicted_count = 0
        self._guard = Lock()

    def find(self, label: Label) -> SegmentSlot | None:
        """Return the slot of an object, None if it is not there; raise InputError for a label that names no object."""
        slot = self._slots.get(label)
        if slot is None:
            check_label(label)
        return slot

    def fill(self, found: Iterable[tuple[Label, SegmentSlot]]) -> list[SegmentSlot]:
        """Know what was found, the least recent first; return slots to free: of second copies, and beyond the cap."""
        gone: list[SegmentSlot] = []
        with self._guard:
            for label, slot in found:
                former = self._slots.pop(label, None)
                if former is not None:
                    gone.append(former)
                self._slots[label] = slot
            self.lru.replace(StoredObject(label, slot.segment.object_bytes) for label, slot in self._slots.items())
            victims, _ = self.lru.victims(0, ())
            self.evicted_count += len(victims)
            return gone + self._take_out([victim.label for victim in victims])

    def begin(self, pages: Sequence[PageIO], stamp: int, untrusted: Mapping[Label, SegmentSlot]) -> PutBatch:
        """Grant room to pages that are not there, or where ``untrusted`` says, evicting for them; touch the others."""
        labels = [page.label for page in pages]
        sizes = [page_bytes(page) for page in pages]
        for label in labels:
            self.find(label)
        with self._guard:
            stored, evicted = self.lru.store(labels, sizes)
            batch = PutBatch(pages, stored, stamp, {}, self._take_out(evicted))
            for number, label in enumerate(labels):
                slot = self._slots.get(label)
                if slot is not None and slot.segment.object_bytes != sizes[number]:
                    batch.gone.append(self._slots.pop(label))
                    self.removed.record((label,))
                    slot = None
                # Of a page that is in the batch at two lengths the last one is stored.
                stored[number] = stored[number] and self.lru.size_of(label) == sizes[number]
                if stored[number] and slot is not None and untrusted.get(label) is slot:
                    batch.replaced[label] = slot
                if stored[number] and (slot is None or label in batch.replaced):
                    batch.fresh.setdefault(label, number)
            self.evicted_count += len(evicted)
        return batch

    def evict(self, short_bytes: int, keep: Container[Label]) -> list[SegmentSlot]:
        """Forget the least recent objects that take so many bytes, none in ``keep``; return their slots."""
        with self._guard:
            victims, _ = self.lru.least_recent(short_bytes, keep)
            slots = self._take_out(victim.label for victim in victims)
            self.evicted_count += len(slots)
            return slots

    def decline(self, batch: PutBatch, labels: Sequence[Label]) -> int:
        """Take back the room of fresh pages, but of those that another thread has stored; return how many others."""
        with self._guard:
            declined = [label for label in labels if not self._is_others(label, batch)]
            for label in declined:
                if label not in batch.replaced:
                    self.lru.forget(label)
        for label in labels:
            del batch.fresh[label]
        batch.decline(declined)
        return len(declined)

    def commit(self, batch: PutBatch) -> list[SegmentSlot]:
        """Publish what was written; return slots: of what it replaced, and what others stored or evicted."""
        spare: list[SegmentSlot] = []
        evicted: list[Label] = []
        with self._guard:
            for label, slot in batch.written.items():
                if self.lru.size_of(label) != slot.segment.object_bytes:
                    spare.append(slot)
                    evicted.append(label)
                elif self._is_others(label, batch):
                    spare.append(slot)
                else:
                    if label in self._slots:
                        spare.append(self._slots[label])
                    self._slots[label] = slot
                    self.removed.restored((label,))
        if evicted:
            batch.decline(evicted)
        return spare

    def abandon(self, batch: PutBatch) -> None:
        """Take back the room of all fresh pages: they could not be written."""
        with self._guard:
            for label in batch.fresh:
                if label not in self._slots:
                    self.lru.forget(label)

    def look_up(self, pages: Sequence[PageIO]) -> tuple[list[SegmentSlot | None], list[Answer], list[SegmentSlot]]:
        """Return the slot of each page, which becomes recent, None where it is not there at that length; and answers.

        Objects of another length are forgotten, and their slots returned besides; what may be the page, coded, is left.
        """
        slots: list[SegmentSlot | None] = []
        answers: list[Answer] = []
        found: list[PageIO] = []
        misfits: list[Label] = []
        with self._guard:
            for page in pages:
                slot = self._slots.get(page.label)
                if slot is None:
                    check_label(page.label)
                    answers.append(Answer.MISS)
                elif slot.segment.object_bytes == page_bytes(page):
                    found.append(page)
                    answers.append(Answer.HIT)
                elif may_be_coded(page_bytes(page) - HEADER_BYTES, slot.segment.object_bytes):
                    answers.append(Answer.MISS)
                    slot = None
                else:
                    misfits.append(page.label)
                    answers.append(Answer.FLAWED)
                    slot = None
                slots.append(slot)
            self.lru.touch([page.label for page in reversed(found)])
            return slots, answers, self._take_out(misfits) if misfits else []

    def slots_of(self, pages: Sequence[PageIO]) -> list[SegmentSlot | None]:
        """Return the slot of each page, None where it is not there at that length. It changes nothing."""
        found = [self._slots.get(page.label) for page in pages]
        return [
            slot if slot is not None and slot.segment.object_bytes == page_bytes(page) else None
            for slot, page in zip(found, pages, strict=True)
        ]

    def use(self, labels: Sequence[Label]) -> None:
        """Make objects recent, the first one most of all; one that went meanwhile stays gone."""
        with self._guard:
            self.lru.touch([label for label in reversed(labels) if label in self._slots])

    def forget(self, labels: Iterable[Label]) -> tuple[int, list[SegmentSlot], list[SegmentSlot]]:
        """Know objects no more; return how many there were, their slots, and those slots that are unreadable."""
        with self._guard:
            there = {label for label in labels if label in self._slots or label in self._unreadable}
            unreadable = [slot for label in there for slot in self._unreadable.pop(label, ())]
            return len(there), self._take_out(there), unreadable

    def drop_identity(self, identity: bytes) -> list[Label]:
        """Take back the room of pages of one identity that are being written; return the labels of its objects."""
        with self._guard:
            for label in self.lru.labels_of(identity):
                if label not in self._slots:
                    self.lru.forget(label)
            return [label for label in {**self._slots, **self._unreadable} if label.identity == identity]

    def drop(self, flawed: Mapping[Label, SegmentSlot]) -> list[SegmentSlot]:
        """Forget pages that are not what they should be, those of them that are where they were; return their slots."""
        with self._guard:
            return self._take_out([label for label, slot in flawed.items() if self._slots.get(label) is slot])

    def set_aside(self, unreadable: Mapping[Label, SegmentSlot]) -> None:
        """Record that the disk did not give pages, those of them that are where they were."""
        with self._guard:
            for label, slot in unreadable.items():
                if self._slots.get(label) is slot:
                    self._take_out((label,))
                    self._unreadable.setdefault(label, []).append(slot)

    def scan(self, identity: bytes, cursor: str) -> Scan:
        """List objects of one identity by name, after the name in ``cursor``, as ``StoreLru.scan`` does."""
        with self._guard:
            found = self.lru.scan(identity, cursor)
            listed = [each for each in zip(found.objects, found.used, strict=True) if each[0].label in self._slots]
            return Scan([each for each, _ in listed], found.cursor, [used for _, used in listed])

    def _is_others(self, label: Label, batch: PutBatch) -> bool:
        """Return whether another put has stored a page since this batch began."""
        slot = self._slots.get(label)
        return slot is not None and slot is not batch.replaced.get(label)

    def _take_out(self, labels: Iterable[Label]) -> list[SegmentSlot]:
        slots: list[SegmentSlot] = []
        for label in labels:
            slot = self._slots.pop(label, None)
            if slot is not None:
                self.lru.forget(label)
                slots.append(slot)
                self.removed.record((label,))
        return slots

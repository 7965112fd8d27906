"""Records of the pages in a store: flat arrays, a hash table over them, and their order of use.

Each file of a packed store, and each shelf of a file store, has a range of records while it has pages, one for each
slot: the key, the time of use, the birth, and the next record of the same hash. A page costs 48 bytes, and 4 to 8 more
for the heads of the chains; a slot that was never used costs nothing, since nobody touches its memory.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from heapq import nsmallest
from itertools import groupby
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from unified_cache.core.page import PAGE_KEY_BYTES, PageKey
from unified_cache.core.seal import Label
from unified_cache.storage_backends.directory.front import STAMP_MAX_NS

KEY_WORDS = PAGE_KEY_BYTES // 8

_LENGTH_TERM = np.uint64(PAGE_KEY_BYTES * 0x9E3779B185EBCA87 & ((1 << 64) - 1))
_SECRET = np.array([0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072], np.uint64)
"""First words of the secret of XXH3."""
_HASHES_AT_ONCE = 4096
"""So that what is between lies in the processor's caches: 15 ns a key, 150 of a million at once."""

Records = npt.NDArray[np.uint32]

RANGE = 256
"""Segments get records by so many. The first range is nobody's: record 0 means none."""

VECTOR_MIN = 160
"""Labels that are worth looking up together: below that one after the other is faster."""

RECENT_MAX = 1 << 15
"""Pages that are found at the cost of a dict's, a third of that of the arrays; they take 10 MB."""

HEADS_MIN = 1024
"""Heads of chains, a power of two; they double where pages are more."""

QUEUE_PARTS = 32
"""The least recent of the records, all by this number, are sorted at once: 12 ms at ten million."""

QUEUE_MIN = 4096
"""The part is about so large at least, or half of all."""

RECORDS_MIN = 1 << 17
"""Records that there is address space for at first."""

_SAMPLE = 1 << 16
"""Records that say where the least recent part ends."""

_CHUNK = 1 << 20
"""Records that are looked through at once, so that little memory is taken besides."""

_LATEST = np.uint64((1 << 64) - 1)

_ITEMS_BYTES = (PAGE_KEY_BYTES, 8, 4, 4)
"""Key, time of use, birth, next record."""


class RecordRange(Protocol):
    """Owner of a range of records: pages of one identity, pool and length."""

    records_start: int
    """The first of them, which ``PageRecords`` says."""

    @property
    def key(self) -> tuple[bytes, str, int]:
        """Identity, pool and length of an object."""
        ...

    @property
    def object_bytes(self) -> int:
        """The length."""
        ...

    @property
    def records_count(self) -> int:
        """Pages at most."""
        ...


RangeT = TypeVar("RangeT", bound=RecordRange)


class PageSlot(NamedTuple, Generic[RangeT]):
    """Slot of one page."""

    segment: RangeT
    number: int
    record: int = 0
    """Of the page in it, where it was looked up, and a number that no other page has, see ``PageRecords``."""
    birth: int = 0


new_slot = partial(tuple.__new__, PageSlot)
"""Makes a slot of its fields in two thirds of the time, which is a fifth of a look-up."""


class Table(NamedTuple):
    """The lines of a table that prove themselves, by columns."""

    slots: npt.NDArray[np.int64]
    keys: npt.NDArray[np.uint64]
    """A row of ``KEY_WORDS`` for each."""
    stamps: npt.NDArray[np.uint64]


def key_hashes(keys: npt.NDArray[np.uint64], seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return ``xxh3_64_intdigest`` of many keys, each with its seed, as xxHash 0.8 computes it of 32 bytes."""
    hashes = np.empty(len(seeds), np.uint64)
    for start in range(0, len(seeds), _HASHES_AT_ONCE):
        some = slice(start, start + _HASHES_AT_ONCE)
        first, second, third, fourth = np.ascontiguousarray(keys[some].T)
        total = _folded_product(first ^ (seeds[some] + _SECRET[0]), second ^ (_SECRET[1] - seeds[some]))
        total += _folded_product(third ^ (seeds[some] + _SECRET[2]), fourth ^ (_SECRET[3] - seeds[some]))
        total += _LENGTH_TERM
        total ^= total >> np.uint64(37)
        total *= np.uint64(0x165667919E3779F9)
        hashes[some] = total ^ (total >> np.uint64(32))
    return hashes


def _folded_product(one: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the lower half of products of 128 bits, xor the upper half."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    one_low, one_high, other_low, other_high = one & low, one >> half, other & low, other >> half
    cross = one_low * other_high
    middle = (one_low * other_low >> half) + (cross & low) + one_high * other_low
    # The sum of a product of two halves and two numbers below 2**32 fits into a word.
    folded: npt.NDArray[np.uint64] = (one * other) ^ (one_high * other_high + (cross >> half) + (middle >> half))
    return folded


class PageRecords(Generic[RangeT]):
    """Labels, slots and order of use of pages. Bookkeeping only; not thread-safe."""

    def __init__(self, seed: int, taken_bytes: Callable[[int], int]) -> None:
        """``seed`` is secret: a client chooses its keys, and must not choose their hashes.

        ``taken_bytes`` says what a page of a length takes of the cap.
        """
        self._seed = seed
        self._taken_bytes = taken_bytes
        self._seeds: dict[tuple[bytes, str], int] = {}
        """Of identities and pools that have pages."""
        self._segments: list[RangeT | None] = [None]
        """Of each range of records."""
        self._idle_firsts: dict[int, list[int]] = {}
        """First ranges of segments that have no page any more, by how many they are."""
        self._live_count: dict[RangeT, int] = {}
        self._recent: dict[Label, PageSlot[RangeT]] = {}
        """Slots of pages that were looked up lately, for speed alone; one of another birth than its record is stale."""
        self._recent_left_count = 0
        """Pages that had been taken out when there were none: while no more have, no slot is stale."""
        self._last_use = 0
        self.last_birth = 0
        """Of the page that was entered last."""
        self.left_count = 0
        """Pages that were taken out."""
        self.count = 0
        self._clear_heads(HEADS_MIN)
        self._queue = np.zeros(0, np.uint32).data
        """The least recent records in their order, those before ``_queue_start`` taken."""
        self._queue_uses = np.zeros(0, np.uint64).data
        """Their times of use when they were sorted; another one now means that they were used."""
        self._queue_start = 0
        self._queue_end_use = 0
        """Whatever was not used later is in the queue, or was."""
        self._memory = [mmap(-1, each, flags=MAP_PRIVATE | MAP_ANONYMOUS) for each in _ITEMS_BYTES]
        """Of keys, uses, births and next records."""
        self._range_seeds = np.zeros(0, np.uint64)
        """Of the hashes of a range's identity and pool."""
        self._allot(RECORDS_MIN)

    def segments(self) -> list[RangeT]:
        """Return the segments that have pages."""
        return list(self._live_count)

    def find(self, label: Label) -> PageSlot[RangeT] | None:
        """Return the slot of a page, None if it is not there."""
        return self.find_all((label,))[0]

    def find_all(self, labels: Sequence[Label]) -> list[PageSlot[RangeT] | None]:
        """Return the slot of each page, None where it is not there."""
        recent = self._recent
        slots = [*map(recent.get, labels)]
        if self.left_count != self._recent_left_count:
            births_at = self._births_at
            slots = [None if slot is None or births_at[slot.record] != slot.birth else slot for slot in slots]
        if all(slots):
            return slots
        if len(slots) >= VECTOR_MIN:
            others = [number for number, slot in enumerate(slots) if slot is None]
            if len(others) >= VECTOR_MIN:
                for number, record in zip(others, self._records_of([labels[number] for number in others]), strict=True):
                    slots[number] = self.slot_of(record) if record else None
                return slots
        key_bytes, heads_at, next_at = self._memory[0], self._heads_at, self._next_at
        seeds_at, mask = self._seeds_at, self._mask
        for number, (identity, key, pool) in enumerate(labels):
            if slots[number] is None:
                seed = self._seeds.get((identity, pool), 0)
                record = heads_at[xxh3_64_intdigest(key, seed) & mask] if seed else 0
                while record:
                    start = record * PAGE_KEY_BYTES
                    if key_bytes[start : start + PAGE_KEY_BYTES] == key and seeds_at[record // RANGE] == seed:
                        if len(recent) >= RECENT_MAX:
                            self.clear_recent()
                        slots[number] = recent[labels[number]] = self.slot_of(record)
                        break
                    record = next_at[record]
        return slots

    def are_recent(self, labels: Sequence[Label]) -> bool:
        """Return whether all pages are known to be there, from lately; nothing has to be guarded for that."""
        return self.left_count == self._recent_left_count and all(map(self._recent.__contains__, labels))

    def have(self, labels: Sequence[Label]) -> list[bool]:
        """Return whether each page is there."""
        if len(labels) >= VECTOR_MIN:
            births_at, slots = self._births_at, [*map(self._recent.get, labels)]
            have = [slot is not None and births_at[slot.record] == slot.birth for slot in slots]
            others = [number for number, is_there in enumerate(have) if not is_there]
            if len(others) >= VECTOR_MIN:
                records = self._records_of([labels[number] for number in others])
                for number, record in zip(others, records, strict=True):
                    have[number] = record != 0
                return have
        return [slot is not None for slot in self.find_all(labels)]

    def label_of(self, record: int) -> Label:
        """Return the label of a page."""
        identity, pool, _ = self._segment_of(record).key
        return Label(identity, self._key_of(record), pool)

    def slot_of(self, record: int) -> PageSlot[RangeT]:
        """Return the slot of a page."""
        segment = self._segment_of(record)
        return new_slot((segment, record - segment.records_start, record, self._births_at[record]))

    def is_there(self, slot: PageSlot[RangeT]) -> bool:
        """Return whether a slot still has the page that it had when it was looked up."""
        return self._births_at[slot.record] == slot.birth

    def is_live(self, record: int) -> bool:
        """Return whether a record is a page's."""
        return self._births_at[record] != 0

    def use_of(self, record: int) -> int:
        """Return when a page was used, larger for later."""
        return self._uses_at[record]

    def new_uses(self, count: int) -> int:
        """Take so many times of use, and return the last."""
        self._last_use += count
        return self._last_use

    def use(self, slots: Sequence[PageSlot[RangeT] | None], latest: int) -> None:
        """Make pages recent, the first one at ``latest``, each other one before."""
        uses_at, births_at = self._uses_at, self._births_at
        for number in range(len(slots) - 1, -1, -1):
            slot = slots[number]
            if slot is not None and births_at[slot.record] == slot.birth:
                uses_at[slot.record] = latest - number

    def clear_recent(self) -> None:
        """Keep no slots of pages that were looked up lately."""
        self._recent.clear()
        self._recent_left_count = self.left_count

    def enter(self, pages: Sequence[tuple[Label, PageSlot[RangeT], int]]) -> None:
        """Add pages that are not there, in slots that no page has, each with its time of use."""
        while self.count + len(pages) > len(self._heads):
            self._clear_heads(2 * len(self._heads))  # what follows takes 0.6 s at ten million
            for segment in self._live_count:
                self._link(*self._hashed(self.records_of(segment)))
        if len(self._recent) + len(pages) > RECENT_MAX:
            self.clear_recent()
        live_count, heads_at, mask, birth = self._live_count, self._heads_at, self._mask, self.last_birth
        for label, slot, use in pages:
            segment, number = slot.segment, slot.number
            if segment not in live_count:
                self._attach(segment)
            live_count[segment] += 1
            record = segment.records_start + number
            start, key = record * PAGE_KEY_BYTES, label.key
            self._memory[0][start : start + PAGE_KEY_BYTES] = key
            head = xxh3_64_intdigest(key, self._seeds_at[record // RANGE]) & mask
            self._next_at[record] = heads_at[head]
            heads_at[head] = record
            self._uses_at[record] = use
            if use <= self._queue_end_use:  # it was put before the queue was filled, and is entered after that
                self._forget_queue()
            birth = self._births_at[record] = _birth_after(birth)
            self._recent[label] = new_slot((segment, number, record, birth))
        self.last_birth = birth
        self.count += len(pages)

    def leave(self, slot: PageSlot[RangeT]) -> PageKey:
        """Take a page out; return its key."""
        segment, _, record, _ = slot
        key = self._memory[0][record * PAGE_KEY_BYTES : (record + 1) * PAGE_KEY_BYTES]
        head = xxh3_64_intdigest(key, self._seeds_at[record // RANGE]) & self._mask
        before, after = self._heads_at[head], self._next_at[record]
        if before == record:
            self._heads_at[head] = after
        else:
            while self._next_at[before] != record:
                before = self._next_at[before]
            self._next_at[before] = after
        self._uses_at[record] = self._births_at[record] = 0
        self.count -= 1
        self._live_count[segment] = left = self._live_count[segment] - 1
        if not left:
            self._detach(segment)
        self.left_count += 1
        return key

    def fill(self, tables: Iterable[tuple[RangeT, Table]]) -> list[PageSlot[RangeT]]:
        """Enter the pages of tables; return slots of second copies: of a page the one that was used last counts."""
        for segment, (slots, keys, stamps) in tables:
            if len(slots):
                places = self._attach(segment) + slots
                self.last_birth = _birth_after(self.last_birth)
                uses = np.clip(stamps, 1, STAMP_MAX_NS)  # 0 is the use of no page
                self._keys[places], self._uses[places], self._births[places] = keys, uses, self.last_birth
                self._live_count[segment] = len(slots)
                self._last_use = max(self._last_use, int(uses.max()))
                self.count += len(slots)
        self._clear_heads(1 << max(self.count - 1, HEADS_MIN - 1).bit_length())
        hashes = np.empty(self.count, np.uint64)
        done = 0
        for segment in self._live_count:
            records, some = self._hashed(self.records_of(segment))
            self._link(records, some)
            hashes[done : done + len(some)] = some
            done += len(some)
        hashes.sort()
        return self._take_copies(hashes[1:][hashes[1:] == hashes[:-1]])

    def taken_bytes(self) -> int:
        """Return what all pages take."""
        return sum(self._taken_bytes(each.object_bytes) * count for each, count in self._live_count.items())

    def oldest(self, short_bytes: int, keep: Container[int], count_min: int = 0) -> tuple[list[PageSlot[RangeT]], int]:
        """Name the least recent pages that take so many bytes, ``count_min`` at least, no record in ``keep``.

        Return what is short after all, too.
        The caller takes them out, unless they are too few.
        """
        named: list[PageSlot[RangeT]] = []
        is_passed_over = False
        while short_bytes > 0 or len(named) < count_min:
            place = self._queue_start
            if place == len(self._queue):
                if not self._fill_queue():
                    break
                continue
            self._queue_start += 1
            record = self._queue[place]
            if self._uses_at[record] != self._queue_uses[place]:
                continue
            if record in keep:
                is_passed_over = True
                continue
            named.append(self.slot_of(record))
            short_bytes -= self._taken_bytes(named[-1].segment.object_bytes)
        if is_passed_over or short_bytes > 0 or len(named) < count_min:
            self._forget_queue()
        return named, max(short_bytes, 0)

    def in_small_files(self, count: int, kept: Container[RangeT]) -> list[PageSlot[RangeT]]:
        """Name the pages in so many files, those with the fewest bytes of pages, of no file in ``kept``."""
        others = [segment for segment in self._live_count if segment not in kept]
        small = nsmallest(count, others, key=lambda each: self._live_count[each] * each.object_bytes)
        return [self.slot_of(record) for segment in small for record in self.records_of(segment).tolist()]

    def records_of(self, segment: RangeT) -> Records:
        """Return the records of the pages in a file."""
        if segment not in self._live_count:
            return np.zeros(0, np.uint32)
        start = segment.records_start
        live = np.flatnonzero(self._uses[start : start + segment.records_count])
        return (live + start).astype(np.uint32)

    def first_bytes(self, records: Records) -> npt.NDArray[np.uint64]:
        """Return the first byte of each key."""
        first: npt.NDArray[np.uint64] = self._keys[records, 0] & np.uint64(0xFF)
        return first

    def _records_of(self, labels: Sequence[Label]) -> Sequence[int]:
        """Return the record of each page, 0 where it is not there."""
        keys = b"".join([label.key for label in labels])
        if len(keys) != len(labels) * PAGE_KEY_BYTES:
            return [0 if (slot := self.find(label)) is None else slot.record for label in labels]
        seed_of = self._seeds.get
        seeds = np.array([seed_of((identity, pool), 0) for identity, _, pool in labels], np.uint64)
        words = np.frombuffer(keys, np.uint64).reshape(-1, KEY_WORDS)
        found: list[int] = self._find_words(words, seeds, key_hashes(words, seeds)).tolist()
        return found

    def _segment_of(self, record: int) -> RangeT:
        found = self._segments[record // RANGE]
        assert found is not None
        return found

    def _key_of(self, record: int) -> PageKey:
        return self._memory[0][record * PAGE_KEY_BYTES : (record + 1) * PAGE_KEY_BYTES]

    def _attach(self, segment: RangeT) -> int:
        """Give a segment records; return the first."""
        identity, pool, _ = segment.key
        seed = self._seeds.get((identity, pool))
        if seed is None:
            seed = self._seeds[identity, pool] = xxh3_64_intdigest(identity + pool.encode(), self._seed) or 1
        ranges_count = -(-segment.records_count // RANGE)
        first = self._take_ranges(ranges_count)
        self._segments[first : first + ranges_count] = [segment] * ranges_count
        self._range_seeds[first : first + ranges_count] = seed
        self._live_count[segment] = 0
        segment.records_start = first * RANGE
        return segment.records_start

    def _take_ranges(self, count: int) -> int:
        """Return the first of so many ranges side by side that are nobody's, and take them."""
        idle = self._idle_firsts
        is_short = not idle.get(count) and (len(self._segments) + count) * RANGE > len(self._uses)
        if is_short and not self._cut_idle(count):
            self._join_idle()
            self._cut_idle(count)
        if idle.get(count):
            return idle[count].pop()
        first = len(self._segments)
        self._segments += [None] * count
        if len(self._segments) * RANGE > len(self._uses):
            self._allot(2 * len(self._segments) * RANGE)
        return first

    def _cut_idle(self, count: int) -> bool:
        """Cut so many ranges off the shortest idle ones that are longer; return whether there are as many now."""
        longer = min((each for each, firsts in self._idle_firsts.items() if firsts and each > count), default=0)
        if longer and not self._idle_firsts.get(count):
            first = self._idle_firsts[longer].pop()
            for length, cut in ((count, first), (longer - count, first + count)):
                self._idle_firsts.setdefault(length, []).append(cut)
        return longer > 0

    def _join_idle(self) -> None:
        """Make one of idle ranges that lie side by side."""
        self._idle_firsts.clear()
        first = 1
        for is_idle, run in groupby(self._segments[1:], key=lambda each: each is None):
            count = len(list(run))
            if is_idle:
                self._idle_firsts.setdefault(count, []).append(first)
            first += count

    def _detach(self, segment: RangeT) -> None:
        del self._live_count[segment]
        identity, pool, _ = segment.key
        if not any(each.key[:2] == (identity, pool) for each in self._live_count):
            del self._seeds[identity, pool]
        self.clear_recent()  # so that nobody refers to the file any more
        first, ranges_count = segment.records_start // RANGE, -(-segment.records_count // RANGE)
        self._segments[first : first + ranges_count] = [None] * ranges_count
        self._idle_firsts.setdefault(ranges_count, []).append(first)

    def _allot(self, count: int) -> None:
        """Make room for so many records, where they are; what was never written takes no memory."""
        # Nobody may look at memory that is moved.
        self._uses_at = self._births_at = self._next_at = memoryview(b"")
        self._keys, self._uses = np.zeros((0, KEY_WORDS), np.uint64), np.zeros(0, np.uint64)
        self._births = self._next = np.zeros(0, np.uint32)
        try:
            for memory, item_bytes in zip(self._memory, _ITEMS_BYTES, strict=True):
                memory.resize(count * item_bytes)
        finally:
            keys, uses, births, after = self._memory
            self._keys = np.frombuffer(keys, np.uint64).reshape(-1, KEY_WORDS)
            self._uses = np.frombuffer(uses, np.uint64)
            self._births, self._next = np.frombuffer(births, np.uint32), np.frombuffer(after, np.uint32)
            self._uses_at, self._births_at, self._next_at = self._uses.data, self._births.data, self._next.data
        seeds = np.zeros(count // RANGE, np.uint64)
        seeds[: len(self._range_seeds)] = self._range_seeds
        self._range_seeds, self._seeds_at = seeds, seeds.data

    def _clear_heads(self, heads_count: int) -> None:
        self._heads = np.zeros(heads_count, np.uint32)
        self._heads_at = self._heads.data
        self._mask = heads_count - 1

    def _take_copies(self, repeated: npt.NDArray[np.uint64]) -> list[PageSlot[RangeT]]:
        """Take out the copies among the pages of these hashes, all but the one used last; return their slots."""
        latest: dict[Label, PageSlot[RangeT]] = {}
        copies: list[PageSlot[RangeT]] = []
        for segment in self.segments() if len(repeated) else ():
            records, hashes = self._hashed(self.records_of(segment))
            for record in records[np.isin(hashes, repeated)].tolist():
                label, slot = self.label_of(record), self.slot_of(record)
                other = latest.get(label, slot)
                latest[label] = max(slot, other, key=lambda each: self.use_of(each.record))
                if other is not slot:
                    copies.append(slot if latest[label] is other else other)
        for slot in copies:
            self.leave(slot)
        return copies

    def _hashed(self, records: Records) -> tuple[Records, npt.NDArray[np.uint64]]:
        """Return records of one segment with their hashes."""
        return records, key_hashes(self._keys[records], self._range_seeds[records // RANGE])

    def _link(self, records: Records, hashes: npt.NDArray[np.uint64]) -> None:
        """Put records before those that have the same hash. Of several with one head a round links the last."""
        heads = hashes & np.uint64(self._mask)
        while len(records):
            former = self._heads[heads]
            self._heads[heads] = records
            is_linked = self._heads[heads] == records
            self._next[records[is_linked]] = former[is_linked]
            records, heads = records[~is_linked], heads[~is_linked]

    def _find_words(
        self, words: npt.NDArray[np.uint64], seeds: npt.NDArray[np.uint64], hashes: npt.NDArray[np.uint64]
    ) -> Records:
        """Return the record of each key, 0 where there is none."""
        found = np.zeros(len(words), np.uint32)
        wanted = np.arange(len(words))
        records = self._heads[hashes & np.uint64(self._mask)]
        while True:
            is_some = records != 0
            wanted, records = wanted[is_some], records[is_some]
            if not len(records):
                return found
            is_it = (self._keys[records] == words[wanted]).all(axis=1)
            is_it &= self._range_seeds[records // RANGE] == seeds[wanted]
            found[wanted[is_it]] = records[is_it]
            wanted, records = wanted[~is_it], self._next[records[~is_it]]

    def _fill_queue(self) -> bool:
        """Sort the next part of the records by use; return whether there are any."""
        end, after = len(self._segments) * RANGE, np.uint64(self._queue_end_use)
        sample = self._uses[: end : max(end // _SAMPLE, 1)]
        sample = sample[sample > after]
        place = len(sample) // min(max(self.count // QUEUE_MIN, 2), QUEUE_PARTS)
        latest = np.partition(sample, place)[place] if len(sample) else _LATEST
        parts: list[Records] = []
        for start in range(0, end, _CHUNK):
            uses = self._uses[start : min(start + _CHUNK, end)]
            parts.append((np.flatnonzero((uses > after) & (uses <= latest)) + start).astype(np.uint32))
        queue = np.concatenate(parts)
        uses = self._uses[queue]
        order = np.argsort(uses, kind="stable")
        self._queue, self._queue_uses, self._queue_start = queue[order].data, uses[order].data, 0
        if not len(queue):
            return False
        self._queue_end_use = self._queue_uses[-1]
        return True

    def _forget_queue(self) -> None:
        self._queue, self._queue_start, self._queue_end_use = self._queue[:0], 0, 0


def _birth_after(birth: int) -> int:
    return (birth + 1) & 0xFFFFFFFF or 1

"""Random histories on the stores of a directory and on a naive model; the two agree after every step."""

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from tests.support.budget import PHASES, examples
from tests.support.files import object_paths, temps
from tests.support.store_kinds import DirectoryStorage, StoreKind
from unified_cache.core.seal import HEADER_BYTES, Label, verify_buffers
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.front import STAMP_GRAIN_NS
from unified_cache.storage_backends.file.quota import LOW_SHARE
from unified_cache.storage_backends.packed.segments import FreeSlots
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, StoredObject
from unified_cache.testing.storage_contract import OTHER_MODEL, blank_page, bytes_of, label, listing, sealed_page

LABELS = [
    *(label(number) for number in range(10)),
    *(label(number, "kv_index") for number in range(2)),
    *(label(number, model=OTHER_MODEL) for number in range(2)),
]
IDENTITIES = (label(0).identity, label(0, model=OTHER_MODEL).identity)
LENGTHS = (1, HEADER_BYTES, HEADER_BYTES + 1, 1000)
SAME_BYTES = 112
"""Of a page that lies there, by which a file: store knows it when it has to be CACHED alone."""
CAPS = st.sampled_from([None, 500, 1500, 4000])

WHICH = st.integers(0, len(LABELS) - 1)
SEED = st.integers(0, 99)
LENGTH = st.sampled_from([*LENGTHS, *[LENGTHS[1]] * 6])
BATCH = st.lists(st.tuples(WHICH, LENGTH), max_size=7)

Wanted = list[tuple[int, int]]
"""Pages of a batch: which label, which length."""
Batch = Sequence[tuple[Label, bytes]]


BLOCK_BYTES = 100
"""What the disk says that it gives a file at a time, so that pages of few lengths take several."""


class UnsyncedDisk(Disk):
    """A disk that waits for no sync, with blocks of its own."""

    fsync = staticmethod(lambda fd: None)
    fdatasync = staticmethod(lambda fd: None)

    def fstatvfs(self, fd: int) -> os.statvfs_result:
        return os.statvfs_result((BLOCK_BYTES, BLOCK_BYTES, 1 << 40, 1 << 40, 1 << 40, 0, 0, 0, 0, 255))


def taken_bytes(kind: StoreKind, length: int) -> int:
    """Return what a page takes of a cap."""
    return kind.taken_bytes(length) if kind is StoreKind.PACKED else -(-length // BLOCK_BYTES) * BLOCK_BYTES


@dataclass
class OpenStore:
    """A store that is open, what it counts under its cap, the least recent first, and what it has done for that."""

    storage: DirectoryStorage
    bytes_max: int | None
    taken: Callable[[int], int]
    """What a page of a length takes of the cap."""
    counted: dict[Label, int] = field(default_factory=dict)
    looked: tuple[int, bool] = (-1, False)
    """How often the directory had been opened when this store looked last, and whether it was alone then."""
    evicted_count: int = 0
    declined_count: int = 0

    def use(self, labels: Sequence[Label]) -> None:
        """Make pages recent, the first of them the most recent."""
        for named in reversed(labels):
            if named in self.counted:
                self.counted[named] = self.counted.pop(named)

    def least_recent(self, short_bytes: int, keep: Container[Label]) -> tuple[list[Label], int]:
        """Name what is evicted for so many bytes, and the bytes that are short after all."""
        victims: list[Label] = []
        for named, length in self.counted.items():
            if short_bytes > 0 and named not in keep:
                victims.append(named)
                short_bytes -= self.taken(length)
        return victims, max(short_bytes, 0)

    def victims(self, needed_bytes: int, keep: Container[Label]) -> tuple[list[Label], int]:
        """Name what is evicted before so many bytes are stored, and the bytes that are short after all."""
        if self.bytes_max is None:
            return [], 0
        if needed_bytes > self.bytes_max:
            return [], needed_bytes - self.bytes_max
        return self.least_recent(self.bytes_counted + needed_bytes - self.bytes_max, keep)

    @property
    def bytes_counted(self) -> int:
        return sum(map(self.taken, self.counted.values()))


class DirectoryModel:
    """Model of a directory: the bytes of every page, and when it was used last."""

    def __init__(self, kind: StoreKind) -> None:
        self.kind = kind
        self.pages: dict[Label, bytes] = {}
        self.used: dict[Label, int] = {}
        self.now = 0
        self.stores: list[OpenStore] = []
        self.opened_count = 0

    def open(self, store: OpenStore) -> None:
        """Count what is there, and evict what is too much."""
        self.stores.append(store)
        self.opened_count += 1
        if self.kind is StoreKind.PACKED or store.bytes_max is not None:
            self.look(store)
            self.learn(store)

    def look(self, store: OpenStore) -> bool:
        """Return whether nobody else has been in the directory since the last look."""
        before, store.looked = store.looked, (self.opened_count, len(self.stores) == 1)
        return before == store.looked == (self.opened_count, True)

    def learn(self, store: OpenStore) -> None:
        """Count what lies in the directory, in the order of use; evict down to the cap, below it for others."""
        store.counted = {named: len(self.pages[named]) for named in sorted(self.pages, key=self.used.__getitem__)}
        if store.bytes_max is not None:
            short_bytes = store.bytes_counted - store.bytes_max
            below_bytes = store.bytes_max // LOW_SHARE if len(self.stores) > 1 else 0
            if short_bytes > 0:
                self.evict(store, store.least_recent(short_bytes + below_bytes, ())[0])

    def evict(self, store: OpenStore, victims: Sequence[Label]) -> None:
        store.evicted_count += len(victims)
        for named in victims:
            del store.counted[named]
            self.pages.pop(named, None)

    def use(self, store: OpenStore, labels: Sequence[Label]) -> None:
        """Make pages recent, the first of them the most recent."""
        self.now += len(labels)
        for number in range(len(labels) - 1, -1, -1):
            self.used[labels[number]] = self.now - number
        for named in reversed(labels):
            if named in self.pages:
                store.counted.setdefault(named, len(self.pages[named]))
        store.use(labels)

    def put(self, store: OpenStore, batch: Batch, level: Level) -> list[bool]:
        """Put pages that are not there, or not as they have to be; of a DURABLE one the bytes must be right."""
        there = {named for named, content in batch if self.is_there(named, content, level)}
        put = self.put_file if self.kind is StoreKind.FILE else self.put_packed
        return put(store, batch, there)

    def is_there(self, named: Label, content: bytes, level: Level) -> bool:
        former = self.pages.get(named)
        if former is None or len(former) != len(content):
            return False
        if level is Level.DURABLE:
            return len(former) >= HEADER_BYTES and verify_buffers((memoryview(former),), named) is None
        return self.kind is StoreKind.PACKED or former[:SAME_BYTES] == content[:SAME_BYTES]

    def put_packed(self, store: OpenStore, batch: Batch, there: set[Label]) -> list[bool]:
        """Make room for one page after the other: what cannot be had for one may be had for the next."""
        stored: list[bool] = []
        labels = [named for named, _ in batch]
        for named, content in batch:
            if store.counted.get(named) == len(content):
                if named not in there:
                    self.pages[named] = content
                stored.append(True)
                continue
            store.counted.pop(named, None)
            self.pages.pop(named, None)
            victims, short_bytes = store.victims(store.taken(len(content)), labels)
            stored.append(not short_bytes)
            if not short_bytes:
                self.evict(store, victims)
                self.pages[named] = content
                store.counted[named] = len(content)
        store.declined_count += stored.count(False)
        self.use(store, [named for named in labels if named in self.pages])
        return stored

    def put_file(self, store: OpenStore, batch: Batch, there: set[Label]) -> list[bool]:
        """Make room for all pages together; where that cannot be had, the last ones are declined and stay as they are.

        Of what is there, the time is written at once, and of one that is in the batch twice the last one counts.
        """
        labels = [named for named, _ in batch]
        fresh = {named: content for named, content in batch if named not in there}
        self.now += len(batch)
        self.used.update({named: self.now - number for number, named in enumerate(labels) if named in there})
        granted = [
            named for named in fresh if store.bytes_max is None or store.taken(len(fresh[named])) <= store.bytes_max
        ]
        if store.bytes_max is not None:
            if not self.look(store):
                self.learn(store)
            store.use(labels)
            self.make_room(store, granted, fresh, labels)
        for named in reversed(granted):
            self.pages[named] = fresh[named]
            self.used[named] = self.now - labels.index(named)
            store.counted.pop(named, None)
            store.counted[named] = len(fresh[named])
        store.declined_count += len(fresh) - len(granted)
        stored = [named in there or named in granted for named in labels]
        lengths = {named: len(content) for named, content in batch}
        found = [named for named, is_stored in zip(labels, stored, strict=True) if is_stored]
        for named in reversed(found):
            store.counted.setdefault(named, lengths[named])
        store.use(found)
        return stored

    def make_room(self, store: OpenStore, granted: list[Label], fresh: dict[Label, bytes], keep: list[Label]) -> None:
        """Evict for what is granted; take from its end what finds no room even so."""
        while True:
            victims, short_bytes = store.victims(sum(store.taken(len(fresh[named])) for named in granted), keep)
            if not short_bytes or not granted:
                return self.evict(store, victims)
            while short_bytes > 0 and granted:
                short_bytes -= store.taken(len(fresh[granted.pop()]))

    def get(self, store: OpenStore, wanted: Sequence[tuple[Label, int]]) -> list[bool]:
        """Say which pages are hits; one of another length goes, and a file: store counts it until it evicts."""
        for named, length in wanted:
            if named in self.pages and len(self.pages[named]) != length:
                del self.pages[named]
                if self.kind is StoreKind.PACKED:
                    del store.counted[named]
        self.use(store, [named for named, _ in wanted if named in self.pages])
        return [named in self.pages for named, _ in wanted]

    def remove(self, store: OpenStore, labels: Sequence[Label]) -> int:
        there = {named for named in labels if self.pages.pop(named, None) is not None}
        for named in there:
            store.counted.pop(named, None)
        return len(there)


def content_of(named: Label, length: int, salt: int, *, is_sound: bool) -> bytes:
    """Make a page, sealed where it is long enough for that; one that is not sound has its last byte wrong."""
    if length < HEADER_BYTES:
        return random.Random(f"{named} {salt}").randbytes(length)
    content = bytearray(bytes_of(sealed_page(named, length, salt=salt)))
    content[-1] ^= not is_sound
    return bytes(content)


class DirectoryHistory(RuleBasedStateMachine):
    """A few labels and lengths, packed files of eight slots, little idle room, a crooked clock, other processes.

    Where several stores share the directory the clock goes on by leaps, so that each use is written at once.
    """

    kind = StoreKind.FILE
    stores_max = 1

    @initialize(bytes_max=CAPS)
    def start(self, bytes_max: int | None) -> None:
        self.top = Path(tempfile.mkdtemp())
        self.is_shared = self.stores_max > 1
        self.now_ns = self.latest_ns = 1000 * STAMP_GRAIN_NS
        self.salt = 0
        self.model = DirectoryModel(self.kind)
        self.open_one_more(bytes_max)

    def clock(self) -> int:
        self.now_ns += 2 * STAMP_GRAIN_NS * self.is_shared
        return self.now_ns

    def open(self, bytes_max: int | None, name: str = "store") -> DirectoryStorage:
        return self.kind.open(
            self.top / name, bytes_max=bytes_max, free_bytes_min=0, clock=self.clock, disk=UnsyncedDisk()
        )

    def taken(self, length: int) -> int:
        return taken_bytes(self.kind, length)

    def open_one_more(self, bytes_max: int | None) -> None:
        self.model.open(OpenStore(self.open(bytes_max), bytes_max, self.taken))

    def chosen(self, seed: int) -> OpenStore:
        return self.model.stores[seed % len(self.model.stores)]

    @rule(wanted=BATCH, level=st.sampled_from(Level), seed=SEED, flawed=st.none() | WHICH)
    def put(self, wanted: Wanted, level: Level, seed: int, flawed: int | None) -> None:
        self.salt += 1
        length_of: dict[int, int] = {}  # of a label that is twice in the batch, one
        batch: list[tuple[Label, bytes]] = []
        for which, length in wanted:
            one_length = length_of.setdefault(which, length)
            batch.append((LABELS[which], content_of(LABELS[which], one_length, self.salt, is_sound=which != flawed)))
        pages = [PageIO(named, (memoryview(content),)) for named, content in batch]
        store = self.chosen(seed)
        assert store.storage.put(pages, level) == Answer.of_puts(self.model.put(store, batch, level))

    @rule(which=WHICH, level=st.sampled_from(Level), seed=SEED)
    def put_one(self, which: int, level: Level, seed: int) -> None:
        self.put([(which, LENGTHS[1])], level, seed, None)

    @rule(wanted=BATCH, seed=SEED)
    def get(self, wanted: Wanted, seed: int) -> None:
        store, length_of = self.chosen(seed), dict(wanted)
        pages = [blank_page(LABELS[which], length_of[which]) for which, _ in wanted]
        hits = store.storage.get(pages)
        assert list(map(bool, hits)) == self.model.get(
            store, [(LABELS[which], length_of[which]) for which, _ in wanted]
        )
        for page, hit in zip(pages, hits, strict=True):
            assert not hit or bytes_of(page) == self.model.pages[page.label]

    @rule(wanted=st.lists(WHICH, max_size=7), seed=SEED, is_touched=st.booleans())
    def use_as_it_is(self, wanted: list[int], seed: int, is_touched: bool) -> None:
        if is_touched:
            store, labels = self.chosen(seed), [LABELS[which] for which in wanted]
            store.storage.touch(labels)
            self.model.use(store, labels)
        else:
            self.get([(which, len(self.model.pages.get(LABELS[which], b"none"))) for which in wanted], seed)

    @rule(wanted=st.lists(WHICH, max_size=7) | st.sampled_from(IDENTITIES), seed=SEED)
    def remove(self, wanted: list[int] | bytes, seed: int) -> None:
        store = self.chosen(seed)
        if isinstance(wanted, bytes):
            there = [named for named in self.model.pages if named.identity == wanted]
            assert store.storage.clear(wanted) == self.model.remove(store, there)
        else:
            labels = [LABELS[which] for which in wanted]
            assert store.storage.remove(labels) == self.model.remove(store, labels)

    @precondition(lambda self: self.stores_max == 1)
    @rule(by=st.sampled_from([-100 * STAMP_GRAIN_NS, -1, 1, 2 * STAMP_GRAIN_NS]))
    def turn_clock(self, by: int) -> None:
        self.now_ns = max(self.now_ns + by, 0)
        self.latest_ns = max(self.latest_ns, self.now_ns)

    @precondition(lambda self: len(self.model.stores) < self.stores_max)
    @rule(bytes_max=CAPS)
    def be_joined(self, bytes_max: int | None) -> None:
        self.open_one_more(bytes_max)

    @rule(bytes_max=CAPS, seed=SEED)
    def close_and_open(self, bytes_max: int | None, seed: int) -> None:
        """Close a store; the last one is opened again."""
        store = self.chosen(seed)
        store.storage.close()
        self.model.stores.remove(store)
        if self.model.stores:
            return
        if self.kind is StoreKind.FILE and bytes_max is None:
            # It lists nothing, and so does not know by how much the clock was set back.
            self.now_ns = self.latest_ns = max(self.latest_ns, self.now_ns) + STAMP_GRAIN_NS
        self.open_one_more(bytes_max)

    @rule()
    def die_and_be_opened(self) -> None:
        """Open a copy of the directory as it stands now."""
        shutil.copytree(self.top / "store", self.top / "copy")
        with closing(self.open(None, "copy")) as copy:
            found = [blank_page(named, len(content)) for named, content in self.model.pages.items()]
            assert all(copy.get(found))
            assert {page.label: bytes_of(page) for page in found} == self.model.pages
            assert copy.bytes_used == sum(self.taken(len(content)) for content in self.model.pages.values())
        shutil.rmtree(self.top / "copy")

    @invariant()
    def check(self) -> None:
        if "model" not in vars(self):
            return
        pages = self.model.pages
        expected = sorted(StoredObject(named, len(content)) for named, content in pages.items())
        for store in self.model.stores:
            storage = store.storage
            assert storage.bytes_used == sum(self.taken(len(content)) for content in pages.values())
            assert storage.exists(LABELS) == Answer.of_reads(named in pages for named in LABELS)
            assert sorted(each for identity in IDENTITIES for each in listing(storage, identity)) == expected
            counts = storage.counts
            assert (counts.evicted_count, counts.declined_count) == (store.evicted_count, store.declined_count)
            if isinstance(storage, PackedStorage):
                check_slots(storage)

    def teardown(self) -> None:
        """Remove everything; no file may be left."""
        if "model" not in vars(self):
            return
        for store in self.model.stores:
            store.storage.remove(LABELS)
            store.storage.close()
        assert [*self.top.rglob("*.pack"), *object_paths(self.top / "store"), *temps(self.top / "store")] == []
        shutil.rmtree(self.top)


class SharedHistory(DirectoryHistory):
    """The same in a directory that several processes have open."""

    stores_max = 3


class PackedHistory(DirectoryHistory):
    """The same in packed files."""

    kind = StoreKind.PACKED


def check_slots(storage: PackedStorage) -> None:
    """Compare the free and the used slots of every file with those that ever were used."""
    used = Counter((slot.segment.key, slot.segment.number) for slot in storage._index._slots.values())
    for shape, free in storage._segments._free.items():
        check_free(free, {number: count for (used_in, number), count in used.items() if used_in == shape})


def check_free(free: FreeSlots, used: dict[int, int]) -> None:
    places = [*free._idle, *free._roomless]
    assert len(set(places)) == len(places)
    count = Counter(number for number, _ in places)
    assert {file.number for file in free.segments} == (count + Counter(used)).keys()
    assert all(count[file.number] + used.get(file.number, 0) == free.key.slots_count for file in free.segments)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("history", [DirectoryHistory, SharedHistory, PackedHistory])
def test_random_histories_agree_with_the_model_at_every_step(
    history: type[DirectoryHistory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.storage_backends.packed.segment.SLOTS_MAX", 8)
    monkeypatch.setattr("unified_cache.storage_backends.packed.segments.IDLE_BYTES_MAX", 600)
    # Of several processes each sweeps before each put, so that it knows what the others have done.
    monkeypatch.setattr("unified_cache.storage_backends.file.quota.SWEEP_SHARE", 1 << 30)
    run_machine(
        history,
        settings=settings(
            max_examples=examples(60, 1000),
            stateful_step_count=40,
            deadline=None,
            phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )

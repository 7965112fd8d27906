"""Random histories on the stores of a directory and on a naive model; the two agree after every step."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import itemgetter
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
BATCH = st.lists(st.tuples(WHICH, LENGTH), max_size=7, unique_by=itemgetter(0))

Wanted = list[tuple[int, int]]
"""Pages of a batch: which label, which length."""


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
    """A store that is open, and what it has done to keep its cap."""

    storage: DirectoryStorage
    bytes_max: int | None
    evicted_count: int = 0
    declined_count: int = 0
    ghosts_count: int = 0
    """Pages that it may count though they have gone: of another length than was asked for, in files of their own."""
    ghosts_bytes: int = 0


class DirectoryModel:
    """Model of a directory: the bytes of every page, and when it was used last.

    Which pages were stored and which went for them is told by the store, and held against what may be: the least
    recent go, no more than are needed, and what is declined does not fit.
    """

    def __init__(self, kind: StoreKind) -> None:
        self.kind = kind
        self.pages: dict[Label, bytes] = {}
        self.used: dict[Label, int] = {}
        self.unsure: set[Label] = set()
        """Pages that are more recent in memory than on the disk: those of which another length was declined."""
        self.now = 0
        self.stores: list[OpenStore] = []

    def taken(self, labels: Iterable[Label]) -> int:
        """Return what pages take of a cap."""
        return sum(taken_bytes(self.kind, len(self.pages[named])) for named in labels)

    def open(self, store: OpenStore) -> None:
        """Take over what is left once it has evicted what is too much."""
        self.stores.append(store)
        self.settle(store, {}, {})

    def use(self, labels: Sequence[Label]) -> None:
        """Make pages recent, the first of them the most recent."""
        self.now += len(labels)
        self.used.update({named: self.now - number for number, named in enumerate(labels)})
        self.unsure.difference_update(labels)

    def is_there(self, named: Label, content: bytes, level: Level) -> bool:
        """Tell whether a page need not be put; where it has to be DURABLE its bytes must be right."""
        former = self.pages.get(named)
        if former is None or len(former) != len(content):
            return False
        if level is Level.DURABLE:
            return len(former) >= HEADER_BYTES and verify_buffers((memoryview(former),), named) is None
        return self.kind is StoreKind.PACKED or former[:SAME_BYTES] == content[:SAME_BYTES]

    def put(self, store: OpenStore, batch: Mapping[Label, bytes], level: Level, answers: Sequence[Answer]) -> None:
        """Take over what a put has left."""
        assert set(answers) <= {Answer.STORED, Answer.DECLINED}
        there = {named for named, content in batch.items() if self.is_there(named, content, level)}
        answer_of = dict(zip(batch, answers, strict=True))
        declined = [named for named, answer in answer_of.items() if not answer]
        assert not there.intersection(declined)
        store.declined_count += len(declined)
        before = {named: self.taken([named]) for named in batch if named in self.pages}
        if self.kind is StoreKind.FILE:
            self.used.update({named: self.now + len(batch) for named in there})
        else:
            self.remove(declined)  # one of another length makes room first
        self.settle(store, {named: batch[named] for named in batch.keys() - there - set(declined)}, before)
        kept_bytes = self.taken(batch.keys() & self.pages.keys()) + sum(before.values()) + store.ghosts_bytes
        for named in declined:
            assert store.bytes_max is not None
            needed_bytes = taken_bytes(self.kind, len(batch[named]))
            assert needed_bytes + kept_bytes > store.bytes_max, "it had room"
            if self.kind is StoreKind.FILE and needed_bytes <= store.bytes_max:
                break  # what comes after one that finds no room is not tried
        self.use([named for named in batch if answer_of[named]])
        self.unsure.update(self.pages.keys() & set(declined))

    def settle(self, store: OpenStore, fresh: Mapping[Label, bytes], replaced: Mapping[Label, int]) -> None:
        """Take over what a store has left of its pages and of fresh ones; ``replaced`` are bytes of former ones."""
        held = {named for named, found in zip(LABELS, store.storage.exists(LABELS), strict=True) if found}
        assert fresh.keys() <= held <= self.pages.keys() | fresh.keys()
        victims = self.pages.keys() - held
        evicted_count = store.storage.counts.evicted_count - store.evicted_count
        assert len(victims) <= evicted_count <= len(victims) + store.ghosts_count + len(replaced)
        store.evicted_count += evicted_count
        rest = self.pages.keys() & held - fresh.keys() - replaced.keys() - self.unsure
        newest = max(victims - self.unsure, key=self.used.__getitem__, default=None)
        last_bytes = max((self.taken([named]) for named in victims if named in {newest, *self.unsure}), default=0)
        assert newest is None or all(self.used[newest] < self.used[named] for named in rest), "it was not its turn"
        self.pages = {named: fresh.get(named) or self.pages[named] for named in held}
        bytes_max = store.bytes_max
        if bytes_max is None:
            assert not victims
            return
        assert self.taken(held) <= bytes_max, "it holds more than its cap"
        spare_bytes = bytes_max // LOW_SHARE if len(self.stores) > 1 else 0
        spare_bytes += store.ghosts_bytes + sum(replaced.values())
        assert not victims or self.taken(held) + last_bytes + spare_bytes > bytes_max, "it had room for one more"

    def get(self, wanted: Mapping[Label, int]) -> list[bool]:
        """Say which pages are hits; one of another length goes, and a file: store may count it on."""
        for named, length in wanted.items():
            if named in self.pages and len(self.pages[named]) != length:
                for store in self.stores:
                    store.ghosts_count += self.kind is StoreKind.FILE
                    store.ghosts_bytes += self.taken([named]) if self.kind is StoreKind.FILE else 0
                del self.pages[named]
        self.use([named for named in wanted if named in self.pages])
        return [named in self.pages for named in wanted]

    def remove(self, labels: Sequence[Label]) -> int:
        """Remove pages; return how many there were."""
        return sum(self.pages.pop(named, None) is not None for named in labels)


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

    def open_one_more(self, bytes_max: int | None) -> None:
        self.model.open(OpenStore(self.open(bytes_max), bytes_max))

    def chosen(self, seed: int) -> OpenStore:
        return self.model.stores[seed % len(self.model.stores)]

    @rule(wanted=BATCH, level=st.sampled_from(Level), seed=SEED, flawed=st.none() | WHICH)
    def put(self, wanted: Wanted, level: Level, seed: int, flawed: int | None) -> None:
        self.salt += 1
        batch = {
            LABELS[which]: content_of(LABELS[which], length, self.salt, is_sound=which != flawed)
            for which, length in wanted
        }
        pages = [PageIO(named, (memoryview(content),)) for named, content in batch.items()]
        store = self.chosen(seed)
        self.model.put(store, batch, level, store.storage.put(pages, level))

    @rule(which=WHICH, level=st.sampled_from(Level), seed=SEED)
    def put_one(self, which: int, level: Level, seed: int) -> None:
        self.put([(which, LENGTHS[1])], level, seed, None)

    @rule(wanted=BATCH, seed=SEED)
    def get(self, wanted: Wanted, seed: int) -> None:
        lengths = {LABELS[which]: length for which, length in wanted}
        pages = [blank_page(named, length) for named, length in lengths.items()]
        hits = self.chosen(seed).storage.get(pages)
        assert list(map(bool, hits)) == self.model.get(lengths)
        for page, hit in zip(pages, hits, strict=True):
            assert not hit or bytes_of(page) == self.model.pages[page.label]

    @rule(wanted=st.lists(WHICH, max_size=7, unique=True), seed=SEED, is_touched=st.booleans())
    def use_as_it_is(self, wanted: list[int], seed: int, is_touched: bool) -> None:
        if is_touched:
            labels = [LABELS[which] for which in wanted]
            self.chosen(seed).storage.touch(labels)
            self.model.use(labels)
        else:
            self.get([(which, len(self.model.pages.get(LABELS[which], b"none"))) for which in wanted], seed)

    @rule(wanted=st.lists(WHICH, max_size=7) | st.sampled_from(IDENTITIES), seed=SEED)
    def remove(self, wanted: list[int] | bytes, seed: int) -> None:
        store = self.chosen(seed)
        if isinstance(wanted, bytes):
            there = [named for named in self.model.pages if named.identity == wanted]
            assert store.storage.clear(wanted) == self.model.remove(there)
        else:
            labels = [LABELS[which] for which in wanted]
            assert store.storage.remove(labels) == self.model.remove(labels)

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
            assert copy.bytes_used == self.model.taken(self.model.pages)
        shutil.rmtree(self.top / "copy")

    @invariant()
    def check(self) -> None:
        if "model" not in vars(self):
            return
        pages = self.model.pages
        expected = sorted(StoredObject(named, len(content)) for named, content in pages.items())
        for store in self.model.stores:
            storage = store.storage
            assert storage.bytes_used == self.model.taken(pages)
            assert storage.exists(LABELS) == Answer.of_reads(named in pages for named in LABELS)
            assert sorted(each for identity in IDENTITIES for each in listing(storage, identity)) == expected
            counts = storage.counts
            assert (counts.evicted_count, counts.declined_count) == (store.evicted_count, store.declined_count)

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

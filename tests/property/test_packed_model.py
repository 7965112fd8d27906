"""Random histories on a packed store and on a naive model; the two agree after every step."""

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from tests.support.budget import PHASES, examples
from unified_cache.core.seal import Label
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.front import STAMP_GRAIN_NS
from unified_cache.storage_backends.packed.segments import FreeSlots
from unified_cache.storage_backends.packed.store import PackedStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO, StoredObject
from unified_cache.testing.storage_contract import OTHER_MODEL, blank_page, bytes_of, label, listing

LABELS = [
    *(label(number) for number in range(10)),
    *(label(number, "kv_index") for number in range(2)),
    *(label(number, model=OTHER_MODEL) for number in range(2)),
]
LENGTHS = (1, 128, 129, 1000)
CAPS = st.sampled_from([None, 500, 1500, 4000])

WHICH = st.integers(0, len(LABELS) - 1)
LENGTH = st.sampled_from([*LENGTHS, *[LENGTHS[1]] * 6])
BATCH = st.lists(st.tuples(WHICH, LENGTH), max_size=7)

Wanted = list[tuple[int, int]]
"""Pages of a batch: which label, which length."""


class UnsyncedDisk(Disk):
    """A disk that waits for no sync."""

    fsync = staticmethod(lambda fd: None)
    fdatasync = staticmethod(lambda fd: None)


class PackedModel:
    """Model of a store: the bytes of every page, the least recent first."""

    def __init__(self, bytes_max: int | None) -> None:
        self.bytes_max = bytes_max
        self.pages: dict[Label, bytes] = {}

    @property
    def bytes_used(self) -> int:
        return sum(map(len, self.pages.values()))

    def touch(self, labels: Sequence[Label]) -> None:
        """Make pages recent, the first of them the most recent."""
        for named in reversed(labels):
            if named in self.pages:
                self.pages[named] = self.pages.pop(named)

    def put(self, batch: Sequence[tuple[Label, bytes]], level: Level) -> list[bool]:
        """Keep a page that is there, unless it has to be durable: no page here is sealed, so none verifies."""
        stored: list[bool] = []
        keep = [named for named, _ in batch]
        for named, content in batch:
            if named in self.pages and len(self.pages[named]) == len(content):
                if level is Level.DURABLE:
                    self.pages[named] = content
                stored.append(True)
                continue
            self.pages.pop(named, None)
            stored.append(self.make_room(len(content), keep))
            if stored[-1]:
                self.pages[named] = content
        self.touch(keep)
        return stored

    def make_room(self, needed_bytes: int, keep: Sequence[Label]) -> bool:
        """Evict what is in the way; nothing where that would not be enough."""
        if self.bytes_max is None:
            return True
        kept_bytes = sum(len(content) for named, content in self.pages.items() if named in keep)
        if kept_bytes + needed_bytes > self.bytes_max:
            return False
        while self.bytes_used + needed_bytes > self.bytes_max:
            del self.pages[next(named for named in self.pages if named not in keep)]
        return True

    def get(self, wanted: Sequence[tuple[Label, int]]) -> list[bool]:
        """Say which pages are hits; one of another length is dropped."""
        for named, length in wanted:
            if named in self.pages and len(self.pages[named]) != length:
                del self.pages[named]
        self.touch([named for named, _ in wanted])
        return [named in self.pages for named, _ in wanted]


class PackedHistory(RuleBasedStateMachine):
    """A few labels and lengths, files of eight slots, little idle room, a crooked clock."""

    @initialize(bytes_max=CAPS)
    def start(self, bytes_max: int | None) -> None:
        self.top = Path(tempfile.mkdtemp())
        self.now_ns = 1000 * STAMP_GRAIN_NS
        self.salt = 0
        self.model = PackedModel(bytes_max)
        self.storage = self.open(bytes_max)

    def open(self, bytes_max: int | None, name: str = "store") -> PackedStorage:
        return PackedStorage.open(
            self.top / name, bytes_max=bytes_max, free_bytes_min=0, clock=lambda: self.now_ns, disk=UnsyncedDisk()
        )

    @rule(wanted=BATCH, level=st.sampled_from(Level))
    def put(self, wanted: Wanted, level: Level) -> None:
        self.salt += 1
        length_of: dict[int, int] = {}  # of a label that is twice in the batch, one
        batch: list[tuple[Label, bytes]] = []
        for which, length in wanted:
            content = random.Random(f"{which} {self.salt}").randbytes(length_of.setdefault(which, length))
            batch.append((LABELS[which], content))
        pages = [PageIO(named, None, (memoryview(content),)) for named, content in batch]
        assert self.storage.put(pages, level) == Answer.of_puts(self.model.put(batch, level))

    @rule(wanted=BATCH)
    def get(self, wanted: Wanted) -> None:
        pages = [blank_page(LABELS[which], length) for which, length in wanted]
        hits = self.storage.get(pages)
        assert list(map(bool, hits)) == self.model.get([(LABELS[which], length) for which, length in wanted])
        for page, hit in zip(pages, hits, strict=True):
            assert not hit or bytes_of(page) == self.model.pages[page.label]

    @rule(wanted=st.lists(WHICH, max_size=7))
    def get_as_it_is(self, wanted: list[int]) -> None:
        self.get([(which, len(self.model.pages.get(LABELS[which], b"none"))) for which in wanted])

    @rule(wanted=st.lists(WHICH, max_size=7))
    def remove(self, wanted: list[int]) -> None:
        labels = [LABELS[which] for which in wanted]
        there = {named for named in labels if self.model.pages.pop(named, None) is not None}
        assert self.storage.remove(labels) == len(there)

    @rule(by=st.sampled_from([-100 * STAMP_GRAIN_NS, -1, 1, 2 * STAMP_GRAIN_NS]))
    def turn_clock(self, by: int) -> None:
        self.now_ns = max(self.now_ns + by, 0)

    @rule(bytes_max=CAPS)
    def reopen(self, bytes_max: int | None) -> None:
        self.storage.close()
        self.storage = self.open(bytes_max)
        self.model.bytes_max = bytes_max
        self.model.make_room(0, ())

    @rule()
    def die_and_be_opened(self) -> None:
        """Open a copy of the directory as it stands now."""
        shutil.copytree(self.top / "store", self.top / "copy")
        with closing(self.open(None, "copy")) as copy:
            found = [blank_page(named, len(content)) for named, content in self.model.pages.items()]
            assert all(copy.get(found))
            assert {page.label: bytes_of(page) for page in found} == self.model.pages
            assert copy.bytes_used == self.model.bytes_used
        shutil.rmtree(self.top / "copy")

    @invariant()
    def check(self) -> None:
        if "storage" not in vars(self):
            return
        pages = self.model.pages
        assert self.storage.bytes_used == self.model.bytes_used
        assert self.storage.exists(LABELS) == Answer.of_reads(named in pages for named in LABELS)
        identities = (label(0).identity, label(0, model=OTHER_MODEL).identity)
        found = [each for identity in identities for each in listing(self.storage, identity)]
        assert sorted(found) == sorted(StoredObject(named, len(content)) for named, content in pages.items())
        used = Counter((slot.segment.key, slot.segment.number) for slot in self.storage._index._slots.values())
        for shape, free in self.storage._segments._free.items():
            check_slots(free, {number: count for (used_in, number), count in used.items() if used_in == shape})

    def teardown(self) -> None:
        """Remove everything; no file may be left."""
        if "storage" not in vars(self):
            return
        self.storage.remove(LABELS)
        self.storage.close()
        assert list(self.top.rglob("*.pack")) == []
        shutil.rmtree(self.top)


def check_slots(free: FreeSlots, used: dict[int, int]) -> None:
    """Compare the free and the used slots of every file with those that ever were used."""
    places = [*free._idle, *free._given_back]
    assert len(set(places)) == len(places)
    count = Counter(number for number, _ in places)
    assert {number: count[number] + used.get(number, 0) for number in free._fresh} == free._fresh
    assert {file.number for file in free.segments} == free._fresh.keys()


@pytest.mark.timeout(1800)
def test_random_histories_agree_with_the_model_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_cache.storage_backends.packed.segment.SLOTS_MAX", 8)
    monkeypatch.setattr("unified_cache.storage_backends.packed.segments.IDLE_BYTES_MAX", 600)
    run_machine(
        PackedHistory,
        settings=settings(
            max_examples=examples(60, 1000),
            stateful_step_count=40,
            deadline=None,
            phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )

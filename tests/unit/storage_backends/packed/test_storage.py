"""The packed store: restarts, the cap, calls on the disk, who may open it, threads."""

import itertools
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.files import FaultyDisk, chain, descriptors, put
from unified_cache.components import Full, SlidingWindow
from unified_cache.errors import ClosedError, ConfigError, InputError, StorageError
from unified_cache.pool import ModelLayout, PoolSpec
from unified_cache.seal import HEADER_BYTES, Label, verify_buffers
from unified_cache.storage_backends.catalog import UsedBetween
from unified_cache.storage_backends.directory.disk import Disk
from unified_cache.storage_backends.directory.stamps import STAMP_GRAIN_NS, Clock
from unified_cache.storage_backends.file.store import FileStorage
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.packed.store import PackedStorage, open_url
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.testing.storage_contract import (
    LAYOUT,
    MODEL,
    OTHER_MODEL,
    PAGE_BYTES,
    blank_page,
    bytes_of,
    label,
    listing,
    sealed_page,
)

CLOCK_START_NS = 1_700_000_000_000_000_000
SLOT_BYTES = 1152
"""Of a page of ``PAGE_BYTES``."""

SECOND_OPENER = """
import sys
from unified_cache.errors import StorageError
from unified_cache.storage_backends.packed.store import PackedStorage
try:
    PackedStorage.open(sys.argv[1]).close()
except StorageError as error:
    print(error.retryable, error)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def storage(root: Path) -> Iterator[PackedStorage]:
    storage = opened(root)
    yield storage
    storage.close()


@pytest.fixture
def clock() -> Clock:
    """Each call is later than the one before by more than the grain of times of use."""
    return itertools.count(CLOCK_START_NS, 2 * STAMP_GRAIN_NS).__next__


def opened(
    root: Path,
    pages_max: int | None = None,
    clock: Clock = lambda: CLOCK_START_NS,
    disk: Disk | None = None,
    free_bytes_min: int = 0,
) -> PackedStorage:
    bytes_max = None if pages_max is None else pages_max * PAGE_BYTES
    return PackedStorage.open(
        root, bytes_max=bytes_max, clock=clock, disk=disk or FaultyDisk(), free_bytes_min=free_bytes_min
    )


def held(storage: PackedStorage, count: int, pool: str = "kv") -> list[int]:
    found = storage.exists([label(number, pool) for number in range(count)])
    return [number for number, is_there in enumerate(found) if is_there]


def get(storage: PackedStorage, numbers: Sequence[int]) -> list[bool]:
    return list(map(bool, storage.get([blank_page(label(number)) for number in numbers])))


def packs(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*/*.pack"))


# Restarts


@pytest.mark.parametrize("page_bytes", [0, 1, 127, PAGE_BYTES, 32_767, 32_768, 100_000])
@pytest.mark.parametrize("level", Level)
def test_a_restart_finds_every_page_whatever_its_length(page_bytes: int, level: Level, root: Path) -> None:
    content = random.Random(page_bytes).randbytes(page_bytes)
    named = [
        label(number, pool, model) for number in range(3) for pool in ("kv", "a") for model in (MODEL, OTHER_MODEL)
    ]
    with closing(opened(root)) as first:
        pages = [PageIO(each, None, (memoryview(bytes([number]) * page_bytes),)) for number, each in enumerate(named)]
        assert all(first.put(pages, level))
        assert first.put([PageIO(label(9), None, (memoryview(content),))], level) == [Answer.STORED]
    with closing(opened(root)) as second:
        found = [blank_page(each, page_bytes) for each in [*named, label(9)]]
        assert all(second.get(found))
        assert [bytes_of(page) for page in found] == [*map(bytes_of, pages), content]
        assert second.bytes_used == 13 * page_bytes
        assert sorted(each.label for each in listing(second, label(0).identity)) == sorted([*named[::2], label(9)])


def test_a_page_may_lie_in_more_buffers_than_one_system_call_takes(storage: PackedStorage) -> None:
    page = sealed_page(label(1), 3000, range(1, 3000))
    found = blank_page(label(1), 3000, [0, *range(2, 3000), 3000])
    assert storage.put([page], Level.CACHED) == [Answer.STORED]
    assert storage.get([found]) == [Answer.HIT]
    assert bytes_of(found) == bytes_of(page)


def test_a_page_put_at_another_length_takes_the_place_of_the_first(root: Path) -> None:
    with closing(opened(root)) as storage:
        put(storage, [1])
        assert storage.put([sealed_page(label(1), 3000)], Level.CACHED) == [Answer.STORED]
        assert storage.bytes_used == 3000
    with closing(opened(root)) as storage:
        found = blank_page(label(1), 3000)
        assert storage.get([found]) == [Answer.HIT]
        assert bytes_of(found) == bytes_of(sealed_page(label(1), 3000))
        assert packs(root) == ["kv.3000.1.pack"]
        assert get(storage, [1]) == [False]
        assert storage.bytes_used == 0


def test_a_page_twice_in_a_batch_at_two_lengths_is_there_once_and_counted_once(storage: PackedStorage) -> None:
    stored = storage.put([sealed_page(label(1)), sealed_page(label(1), 3000)], Level.CACHED)
    (listed,) = listing(storage, label(1).identity)
    assert any(stored)
    assert storage.bytes_used == listed.object_bytes
    assert storage.get([blank_page(label(1), listed.object_bytes)]) == [Answer.HIT]


@pytest.mark.parametrize("spare", [1, 0])
def test_pages_in_slots_used_before_survive_a_restart_whatever_room_these_took(spare: int, root: Path) -> None:
    with closing(opened(root)) as storage:
        put(storage, range(10))
        storage.remove([label(5)])
        storage._segments.give_back()
        storage.remove([label(3), label(9 - spare)])
        assert put(storage, [20, 21, 22], Level.DURABLE) == [True] * 3
    with closing(opened(root)) as storage:
        assert held(storage, 23) == [*(n for n in range(10) if n not in (3, 5, 9 - spare)), 20, 21, 22]


# Order of use


def test_a_page_read_outlives_one_that_was_not_after_a_restart(root: Path, clock: Clock) -> None:
    with closing(opened(root, clock=clock)) as storage:
        put(storage, [0, 1, 2])
        put(storage, [3, 4, 5])
        get(storage, [0, 1, 2])
    with closing(opened(root, 6, clock)) as storage:
        put(storage, [6])
        put(storage, [7])
        assert held(storage, 8) == [0, 1, 2, 3, 6, 7]


def test_a_clock_that_went_back_does_not_turn_the_order_round(root: Path) -> None:
    for now_ns, number in ((CLOCK_START_NS, 0), (CLOCK_START_NS // 2, 1), (0, 2)):
        with closing(opened(root, clock=lambda now_ns=now_ns: now_ns)) as storage:  # type: ignore[misc]
            put(storage, [number])
            get(storage, [0])
    with closing(opened(root, 2)) as storage:
        assert held(storage, 3) == [0, 2]


def test_a_page_that_was_there_keeps_its_place_in_the_order_of_its_batch(root: Path) -> None:
    with closing(opened(root)) as storage:
        put(storage, [1])
        put(storage, [0, 1])
    with closing(opened(root, 1)) as storage:
        assert held(storage, 2) == [0]


def test_a_page_put_again_is_as_recent_as_that_put_whatever_was_read_before(root: Path) -> None:
    with closing(opened(root)) as storage:
        put(storage, [1])
        get(storage, [1])
        storage.remove([label(1)])
        put(storage, [2])
        put(storage, [1])
    with closing(opened(root, 1)) as storage:
        assert held(storage, 3) == [1]


def test_use_is_told_by_the_times_that_eviction_goes_by(storage: PackedStorage, clock: Clock, tmp_path: Path) -> None:
    assert storage.used_between(label(1).identity) is None
    with closing(opened(tmp_path / "other", clock=clock)) as other:
        put(other, [1])
        put(other, [2])
        first, last = other.used_between(label(1).identity) or (0, 0)
        assert last - first == 2 * STAMP_GRAIN_NS
        get(other, [1])
        assert other.used_between(label(1).identity) == UsedBetween(last, last + 2 * STAMP_GRAIN_NS)
        other.remove([label(1), label(2)])
        assert other.used_between(label(1).identity) is None


# Cap and eviction


def test_the_least_recently_used_pages_are_evicted_first(root: Path) -> None:
    with closing(opened(root, 4)) as storage:
        for number in range(4):
            put(storage, [number])
        get(storage, [0])
        put(storage, [4])
        put(storage, [5])
        assert held(storage, 6) == [0, 3, 4, 5]
        assert storage.bytes_used == 4 * PAGE_BYTES
        assert storage.counts.evicted_count == 2


def test_of_a_batch_beyond_the_cap_the_first_pages_are_stored(root: Path) -> None:
    with closing(opened(root, 3)) as storage:
        put(storage, [7, 8])
        assert put(storage, range(5)) == [True, True, True, False, False]
        assert held(storage, 9) == [0, 1, 2]
        assert storage.counts.declined_count == 2


def test_an_object_beyond_the_cap_is_declined_and_evicts_nothing(root: Path) -> None:
    with closing(opened(root, 3)) as storage:
        put(storage, range(3))
        assert storage.put([sealed_page(label(9), 3 * PAGE_BYTES + 1)], Level.CACHED) == [Answer.DECLINED]
        assert storage.put([sealed_page(label(0), 3 * PAGE_BYTES + 1)], Level.CACHED) == [Answer.DECLINED]
        assert held(storage, 10) == [1, 2]
        assert storage.bytes_used == 2 * PAGE_BYTES


def test_a_store_opened_with_a_smaller_cap_evicts_down_to_it(root: Path) -> None:
    with closing(opened(root, 9)) as storage:
        for number in range(9):
            put(storage, [number])
    with closing(opened(root, 2)) as storage:
        assert held(storage, 9) == [7, 8]
        assert storage.counts.evicted_count == 7
    with closing(opened(root)) as storage:
        assert held(storage, 9) == [7, 8]


def test_a_chain_goes_from_its_tail_whatever_was_used_last(root: Path) -> None:
    with closing(opened(root, 8)) as storage:
        pages = chain(range(8), sealed_page)
        storage.put(pages, Level.CACHED)
        for page in pages:
            storage.get([page])
        for number in range(8, 12):
            put(storage, [number])
        assert held(storage, 12) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_a_page_used_alone_keeps_the_pages_before_it_and_a_page_declined_holds_nothing_back(root: Path) -> None:
    with closing(opened(root, 8)) as storage:
        storage.put(chain(range(4), sealed_page), Level.CACHED)
        storage.put(chain(range(4, 8), sealed_page), Level.CACHED)
        assert storage.get(chain(range(4), blank_page)[2:]) == [Answer.HIT, Answer.HIT]
        storage.put(chain(range(8, 12), sealed_page), Level.CACHED)
        assert held(storage, 12) == [0, 1, 2, 3, 8, 9, 10, 11]
        longer = chain(range(20, 32), sealed_page)
        assert storage.put(longer[:8], Level.CACHED) == [Answer.STORED] * 8
        assert storage.put(longer[8:], Level.CACHED) == [Answer.DECLINED] * 4
        assert storage.put(chain(range(8), sealed_page), Level.CACHED) == [Answer.STORED] * 8


def test_a_windowed_pool_loses_its_old_pages_while_newer_ones_stay(root: Path) -> None:
    full, window = (PoolSpec(name, PAGE_BYTES - HEADER_BYTES) for name in ("kv", "window"))
    manifest = manifest_of(MODEL, ModelLayout(64, (Full((full,)), SlidingWindow(64, 64, (window,)))))
    manifest.identity = label(0).identity
    with closing(opened(root, 12)) as storage:
        storage.register(manifest, {})
        chained = chain(range(6), sealed_page)
        storage.put(chained, Level.CACHED)
        storage.put([page._replace(label=page.label._replace(pool="window")) for page in chained], Level.CACHED)
        get(storage, range(6))
        put(storage, range(20, 24))
        assert held(storage, 6) == list(range(6))
        assert held(storage, 6, "window") == [0, 1]
        assert storage.manifests() == {manifest.identity: manifest}


# Calls on the disk


def test_exists_makes_no_call_on_the_disk_and_a_read_makes_one(root: Path) -> None:
    disk = FaultyDisk()
    with closing(opened(root, 10, disk=disk)) as storage:
        put(storage, range(9))
        disk.calls.clear()
        assert held(storage, 12) == list(range(9))
        assert get(storage, [11]) == [False]
        assert disk.calls == []
        assert get(storage, [3]) == [True]
        assert storage.get([blank_page(label(4), cuts=(1, 2, 900))]) == [Answer.HIT]
        assert disk.calls == ["preadv"] * 2
        disk.calls.clear()
        put(storage, [9], Level.CACHED)
        assert disk.calls == ["pwritev"] * 2
        disk.calls.clear()
        put(storage, [10, 3], Level.DURABLE)
        assert disk.calls == ["pwritev", "pwritev", "fdatasync", "fstat", "pwritev", "fdatasync", "fstat"]


# Who may open it


def test_a_second_opener_is_refused_and_harms_nobody(root: Path) -> None:
    storage = opened(root)
    put(storage, range(5))
    before = descriptors(root)
    with pytest.raises(StorageError, match=f"{root} must be open once at a time") as raised:
        opened(root)
    assert raised.value.retryable
    assert descriptors(root) == before
    command = [sys.executable, "-c", SECOND_OPENER, str(root)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert child.stdout.startswith(f"True {root} must be open once at a time, found another one who has it")
    assert put(storage, [5], Level.DURABLE) == [True]
    assert get(storage, range(6)) == [True] * 6
    storage.close()
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
    with closing(opened(root)) as storage:
        assert get(storage, range(6)) == [True] * 6


def test_a_store_of_another_kind_is_refused(root: Path, tmp_path: Path) -> None:
    opened(root).close()
    with pytest.raises(StorageError, match=r"must be of a file store .* found a packed store of 1"):
        FileStorage.open(root)
    FileStorage.open(tmp_path / "files").close()
    with pytest.raises(StorageError, match=r"must be of a packed store .* found a file store of 2"):
        opened(tmp_path / "files")


def test_closing_gives_back_every_descriptor(root: Path) -> None:
    for _ in range(3):
        storage = opened(root, 15)
        put(storage, range(20), Level.DURABLE)
        storage.put([sealed_page(label(1), 3000), sealed_page(label(1, "a"))], Level.CACHED)
        storage.close()
        assert descriptors(root) == []
        assert list((root / "tmp").iterdir()) == []


def test_what_names_no_object_is_refused_and_costs_no_slot(root: Path) -> None:
    wrong = [Label(b"short", bytes(32), "kv"), Label(bytes(32), bytes(31), "kv"), Label(bytes(32), bytes(32), "../x")]
    with closing(opened(root)) as storage:
        put(storage, [1])
        for named in wrong:
            short = [blank_page(label(1), 7), PageIO(named, None, (memoryview(bytearray(10)),))]
            calls: list[Callable[[], object]] = [
                lambda named=named: storage.exists([named]),  # type: ignore[misc]
                lambda short=short: storage.get(short),  # type: ignore[misc]
                lambda short=short: storage.put(short[1:], Level.CACHED),  # type: ignore[misc]
                lambda named=named: storage.remove([named]),  # type: ignore[misc]
            ]
            for call in calls:
                with pytest.raises(InputError):
                    call()
        storage.remove([label(1)])
    assert packs(root) == []


def test_a_negative_cap_or_floor_is_refused_and_an_address_says_both(root: Path) -> None:
    with pytest.raises(ConfigError, match="bytes_max"):
        PackedStorage.open(root, bytes_max=-1)
    with pytest.raises(ConfigError, match="free_bytes_min"):
        PackedStorage.open(root, free_bytes_min=-1)
    assert not root.exists()
    with closing(open_url(f"{root}?free=0", 1 << 20)) as storage:
        assert storage.path == root
        assert storage.capability().bytes_max == 1 << 20
        storage.register(manifest_of(MODEL, LAYOUT), {})
        assert list(storage.manifests()) == [MODEL.digest(LAYOUT)]


# Threads


def test_every_page_that_a_thread_gets_is_whole_and_no_slot_is_lost(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unified_cache.storage_backends.packed.segments.IDLE_BYTES_MAX", 3 * SLOT_BYTES)
    storage = opened(root, 8)

    def use(seed: int) -> int:
        choice = random.Random(seed)
        hits_count = 0
        for turn in range(150):
            batch = [label(number) for number in choice.sample(range(12), 3)]
            stored = storage.put([sealed_page(named, salt=seed) for named in batch], choice.choice(list(Level)))
            assert len(stored) == 3
            found = [blank_page(named, cuts=(100, 600)) for named in batch]
            for page, hit in zip(found, storage.get(found), strict=True):
                assert not hit or verify_buffers(page.buffers, page.label) is None
                hits_count += bool(hit)
            storage.remove([choice.choice(batch)])
            if turn % 10 == 0:
                storage.put([sealed_page(choice.choice(batch), 3000)], Level.CACHED)
            assert storage.bytes_used <= 8 * PAGE_BYTES
        return hits_count

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(use, range(6))) > 0
    sys.setswitchinterval(interval_s)
    assert storage.bytes_used == sum(each.object_bytes for each in listing(storage, label(0).identity))
    storage.remove([label(number) for number in range(12)])
    assert storage.bytes_used == 0
    storage.close()
    assert packs(root) == []


def test_closing_waits_for_calls_in_flight(root: Path) -> None:
    storage = opened(root)
    put(storage, range(8))
    reading = threading.Barrier(5)
    outcomes: list[str] = []

    def read() -> None:
        reading.wait()
        try:
            while True:
                assert all(get(storage, range(8)))
        except ClosedError:
            outcomes.append("closed")

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    reading.wait()
    storage.close()
    for thread in threads:
        thread.join()
    assert outcomes == ["closed"] * 4
    assert descriptors(root) == []

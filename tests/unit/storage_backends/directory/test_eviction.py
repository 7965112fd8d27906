"""The cap of a store in a directory: the least recently used page goes first, and never before one that needs it."""

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.support.files import chain, held, put, temps
from tests.support.store_kinds import DirectoryStorage, StoreKind
from unified_cache.components import Full, SlidingWindow
from unified_cache.pool import ModelLayout, PoolSpec
from unified_cache.seal import HEADER_BYTES
from unified_cache.storage_backends.directory.front import Clock
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.testing.storage_contract import MODEL, PAGE_BYTES, blank_page, label, sealed_page

CLOCK_START_NS = 1_700_000_000_000_000_000


@pytest.fixture
def storage(kind: StoreKind, root: Path) -> Iterator[DirectoryStorage]:
    storage = kind.open(root, bytes_max=8 * PAGE_BYTES)
    yield storage
    storage.close()


@pytest.fixture
def reopen(kind: StoreKind, root: Path, clock: Clock) -> Callable[[int], DirectoryStorage]:
    """Open the store with a cap of so many pages."""
    return lambda pages_max: kind.open(root, bytes_max=pages_max * PAGE_BYTES, clock=clock)


# Order of use


def test_the_least_recently_used_pages_are_evicted_first(reopen: Callable[[int], DirectoryStorage]) -> None:
    with closing(reopen(4)) as storage:
        for number in range(4):
            put(storage, [number])
        storage.get([blank_page(label(0))])
        put(storage, [4])
        put(storage, [5])
        assert held(storage, 6) == [0, 3, 4, 5]
        assert storage.bytes_used == 4 * PAGE_BYTES
        assert storage.counts.evicted_count == 2


def test_a_batch_ages_from_its_tail(reopen: Callable[[int], DirectoryStorage]) -> None:
    with closing(reopen(6)) as storage:
        put(storage, [0, 1, 2])
        put(storage, [3, 4, 5])
        storage.get([blank_page(label(number)) for number in (0, 1, 2)])
        put(storage, [6])
        put(storage, [7])
        assert held(storage, 8) == [0, 1, 2, 3, 6, 7]


@pytest.mark.parametrize("bytes_max", [None, 6 * PAGE_BYTES], ids=["uncapped", "capped"])
def test_the_order_of_use_survives_a_restart(
    bytes_max: int | None, kind: StoreKind, root: Path, clock: Clock, reopen: Callable[[int], DirectoryStorage]
) -> None:
    with closing(kind.open(root, bytes_max=bytes_max, clock=clock)) as storage:
        put(storage, [0, 1, 2])
        put(storage, [3, 4, 5])
        storage.get([blank_page(label(number)) for number in (0, 1, 2)])
    with closing(reopen(6)) as storage:
        put(storage, [6])
        put(storage, [7])
        assert held(storage, 8) == [0, 1, 2, 3, 6, 7]


def test_a_touched_chain_ages_from_its_tail(reopen: Callable[[int], DirectoryStorage]) -> None:
    with closing(reopen(6)) as storage:
        put(storage, [0, 1, 2])
        put(storage, [3, 4, 5])
        storage.touch([label(number) for number in (0, 1, 2)])
        for number in (6, 7, 8, 9):
            put(storage, [number])
        assert held(storage, 10) == [0, 1, 6, 7, 8, 9]


def test_touching_the_tail_of_a_chain_keeps_what_stands_before_it(reopen: Callable[[int], DirectoryStorage]) -> None:
    with closing(reopen(6)) as storage:
        storage.put(chain(range(3), sealed_page), Level.CACHED)
        put(storage, [3, 4, 5])
        storage.touch([label(2)])
        put(storage, [6, 7, 8])
        assert held(storage, 9) == [0, 1, 2, 6, 7, 8]


@pytest.mark.parametrize("bytes_max", [None, 6 * PAGE_BYTES], ids=["uncapped", "capped"])
def test_the_order_of_touches_survives_a_restart(
    bytes_max: int | None, kind: StoreKind, root: Path, clock: Clock, reopen: Callable[[int], DirectoryStorage]
) -> None:
    with closing(kind.open(root, bytes_max=bytes_max, clock=clock)) as storage:
        put(storage, [0, 1, 2])
        put(storage, [3, 4, 5])
        storage.touch([label(number) for number in (0, 1, 2, 99)])
    with closing(reopen(6)) as storage:
        put(storage, [6])
        put(storage, [7])
        assert held(storage, 100) == [0, 1, 2, 3, 6, 7]


def test_a_clock_that_was_set_back_does_not_turn_the_order_round(kind: StoreKind, root: Path) -> None:
    for now_ns, number in ((CLOCK_START_NS, 0), (CLOCK_START_NS // 2, 1), (0, 2)):
        with closing(kind.open(root, bytes_max=8 * PAGE_BYTES, clock=partial(int, now_ns))) as storage:
            put(storage, [number])
            storage.get([blank_page(label(0))])
    with closing(kind.open(root, bytes_max=2 * PAGE_BYTES, clock=partial(int, 0))) as storage:
        assert held(storage, 3) == [0, 2]


def test_of_a_batch_beyond_the_cap_the_first_pages_are_stored(reopen: Callable[[int], DirectoryStorage]) -> None:
    with closing(reopen(3)) as storage:
        put(storage, [7, 8])
        assert put(storage, range(5)) == [True, True, True, False, False]
        assert held(storage, 9) == [0, 1, 2]
        assert storage.counts.declined_count == 2


def test_a_page_beyond_the_cap_is_declined_and_evicts_nothing(
    root: Path, reopen: Callable[[int], DirectoryStorage]
) -> None:
    with closing(reopen(3)) as storage:
        put(storage, range(3))
        assert storage.put([sealed_page(label(9), 3 * PAGE_BYTES + 1)], Level.CACHED) == [Answer.DECLINED]
        assert held(storage, 10) == [0, 1, 2]
        assert storage.bytes_used == 3 * PAGE_BYTES
        assert temps(root) == []


def test_a_store_opened_with_a_smaller_cap_evicts_down_to_it(
    kind: StoreKind, root: Path, reopen: Callable[[int], DirectoryStorage]
) -> None:
    with closing(reopen(9)) as storage:
        for number in range(9):
            put(storage, [number])
    with closing(reopen(2)) as storage:
        assert held(storage, 9) == [7, 8]
        assert storage.counts.evicted_count == 7
    with closing(kind.open(root)) as storage:
        assert held(storage, 9) == [7, 8]


# Chains


def test_a_page_used_alone_keeps_the_pages_before_it(storage: DirectoryStorage) -> None:
    storage.put(chain(range(4), sealed_page), Level.CACHED)
    storage.put(chain(range(4, 8), sealed_page), Level.CACHED)
    # The head of the first chain was in host memory, so that storage was asked for its tail alone.
    assert storage.get(chain(range(4), blank_page)[2:]) == [Answer.HIT, Answer.HIT]
    storage.put(chain(range(8, 12), sealed_page), Level.CACHED)
    assert held(storage, 12) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_a_chain_goes_from_its_tail_whatever_was_used_last(storage: DirectoryStorage) -> None:
    pages = chain(range(8), sealed_page)
    storage.put(pages, Level.CACHED)
    for page in pages:
        storage.get([page])
    for number in range(8, 12):
        storage.put([sealed_page(label(number))], Level.CACHED)
    assert held(storage, 12) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_the_pages_before_a_batch_are_not_evicted_for_it(storage: DirectoryStorage) -> None:
    pages = chain(range(12), sealed_page)
    assert storage.put(pages[:6], Level.CACHED) == [Answer.STORED] * 6
    assert storage.put(pages[6:], Level.CACHED) == [
        Answer.STORED,
        Answer.STORED,
        Answer.DECLINED,
        Answer.DECLINED,
        Answer.DECLINED,
        Answer.DECLINED,
    ]
    assert held(storage, 12) == list(range(8))
    assert storage.counts.declined_count == 4


def test_a_page_declined_holds_nothing_back(storage: DirectoryStorage) -> None:
    pages = chain(range(12), sealed_page)
    storage.put(pages[:8], Level.CACHED)
    assert storage.put(pages[8:], Level.CACHED) == [Answer.DECLINED] * 4
    assert storage.put(chain(range(12, 20), sealed_page), Level.CACHED) == [Answer.STORED] * 8
    assert held(storage, 20) == list(range(12, 20))


def test_a_page_removed_holds_nothing_back(storage: DirectoryStorage) -> None:
    storage.put(chain(range(8), sealed_page), Level.CACHED)
    storage.remove([label(number) for number in range(1, 8)])
    assert storage.put(chain(range(8, 16), sealed_page), Level.CACHED) == [Answer.STORED] * 8
    assert held(storage, 16) == list(range(8, 16))


def test_a_page_that_names_itself_as_the_one_before_it_can_be_evicted(storage: DirectoryStorage) -> None:
    pages = [sealed_page(label(number))._replace(parent=label(number).key) for number in range(16)]
    assert storage.put(pages[:8], Level.CACHED) == [Answer.STORED] * 8
    assert storage.put(pages[8:], Level.CACHED) == [Answer.STORED] * 8


def test_a_windowed_pool_loses_its_old_pages_while_newer_ones_stay(kind: StoreKind, root: Path) -> None:
    full, window = (PoolSpec(name, PAGE_BYTES - HEADER_BYTES) for name in ("kv", "window"))
    layout = ModelLayout(64, (Full((full,)), SlidingWindow(64, 64, (window,))))
    manifest = manifest_of(MODEL, layout)
    manifest.identity = label(0).identity
    storage = kind.open(root, bytes_max=12 * PAGE_BYTES)
    storage.register(manifest, {})
    storage.put(chain(range(6), sealed_page), Level.CACHED)
    storage.put(
        [page._replace(label=label(number, "window")) for number, page in enumerate(chain(range(6), sealed_page))],
        Level.CACHED,
    )
    newest = [page._replace(label=label(5, "window")) for page in chain(range(6), blank_page)[5:]]
    assert storage.get(newest) == [Answer.HIT]
    # What is older than all windows is not read, and everything else is.
    storage.get(chain(range(6), blank_page))
    storage.put([sealed_page(label(number)) for number in range(20, 24)], Level.CACHED)
    assert held(storage, 6) == list(range(6))
    assert 5 in held(storage, 6, "window")
    assert len(held(storage, 6, "window")) == 2
    storage.close()


def test_a_windowed_pool_keeps_its_first_pages_where_all_were_read_together(kind: StoreKind, root: Path) -> None:
    full, window = (PoolSpec(name, PAGE_BYTES - HEADER_BYTES) for name in ("kv", "window"))
    manifest = manifest_of(MODEL, ModelLayout(64, (Full((full,)), SlidingWindow(64, 64, (window,)))))
    manifest.identity = label(0).identity
    with closing(kind.open(root, bytes_max=12 * PAGE_BYTES)) as storage:
        storage.register(manifest, {})
        chained = chain(range(6), sealed_page)
        storage.put(chained, Level.CACHED)
        storage.put([page._replace(label=page.label._replace(pool="window")) for page in chained], Level.CACHED)
        storage.get([blank_page(label(number)) for number in range(6)])
        put(storage, range(20, 24))
        assert held(storage, 6) == list(range(6))
        assert held(storage, 6, "window") == [0, 1]
        assert storage.manifests() == {manifest.identity: manifest}


def test_a_page_in_one_pool_keeps_its_full_page(kind: StoreKind, root: Path) -> None:
    full, window = (PoolSpec(name, PAGE_BYTES - HEADER_BYTES) for name in ("kv", "window"))
    manifest = manifest_of(MODEL, ModelLayout(64, (Full((full,)), SlidingWindow(64, 64, (window,)))))
    manifest.identity = label(0).identity
    storage = kind.open(root, bytes_max=4 * PAGE_BYTES)
    storage.register(manifest, {})
    storage.put([sealed_page(label(1))], Level.CACHED)
    storage.put([sealed_page(label(1, "window"))], Level.CACHED)
    storage.put([sealed_page(label(2)), sealed_page(label(3))], Level.CACHED)
    storage.put([sealed_page(label(4))], Level.CACHED)
    assert held(storage, 5) == [1, 2, 3, 4]
    assert held(storage, 5, "window") == []
    storage.close()


def test_no_history_of_puts_and_gets_leaves_a_page_without_its_prefix(kind: StoreKind, root: Path) -> None:
    choice = random.Random(5)
    parent_of: dict[int, int | None] = {}
    storage = kind.open(root, bytes_max=24 * PAGE_BYTES)
    chains: list[list[int]] = []
    for _ in range(300):
        known = choice.choice(chains)[: choice.randrange(1, 9)] if chains and choice.random() < 0.7 else []
        numbers = known + list(range(len(parent_of), len(parent_of) + choice.randrange(0 if known else 1, 5)))
        for before, number in zip([None, *numbers], numbers, strict=False):
            parent_of.setdefault(number, before)
        chains.append(numbers)
        stored = storage.put(chain(numbers, sealed_page), Level.CACHED)
        assert stored == sorted(stored, key=bool, reverse=True)
        start = choice.randrange(len(numbers))
        storage.get(chain(numbers, blank_page)[start:])
        there = set(held(storage, len(parent_of)))
        assert [number for number in there if parent_of[number] not in (None, *there)] == []
        assert storage.bytes_used == len(there) * PAGE_BYTES <= 24 * PAGE_BYTES
    assert storage.counts.evicted_count > 100
    storage.close()

"""The cap of a store in a directory: the least recently used page goes first."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.support.files import held, put, temps
from tests.support.store_kinds import DirectoryStorage, StoreKind
from unified_cache.storage_backends.directory.front import Clock
from unified_cache.storage_backends.protocol import Answer, Level
from unified_cache.testing.storage_contract import PAGE_BYTES, blank_page, label, sealed_page

CLOCK_START_NS = 1_700_000_000_000_000_000


@pytest.fixture
def reopen(kind: StoreKind, root: Path, clock: Clock) -> Callable[[int], DirectoryStorage]:
    """Open the store with a cap of so many pages."""
    return lambda pages_max: kind.open(root, bytes_max=pages_max * PAGE_BYTES, clock=clock)


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

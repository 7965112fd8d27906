"""Retries: faults that pass are not seen, within bounds, and nothing else is tried again."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clock import ManualClock
from tests.support.faulty_storage import StorageFault
from tests.support.wrappers import blank, retrying, scripted, sealed
from unified_cache.core.errors import StorageError, StorageTimeoutError
from unified_cache.storage_backends.manifest import manifest_of
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Answer, Level, PageIO
from unified_cache.testing.storage_contract import LAYOUT, MODEL, bytes_of, label


def test_a_fault_that_passes_is_not_seen() -> None:
    clock = ManualClock()
    faulty = scripted({0: StorageFault.FAIL, 4: StorageFault.FAIL, 7: StorageFault.FAIL})
    storage = retrying(faulty, 2, clock)
    assert storage.put(sealed(range(4)), Level.CACHED) == [Answer.STORED] * 4
    assert storage.exists([label(9)]) == [Answer.MISS]
    found = blank([0, 9, 3])
    assert storage.get(found) == [Answer.HIT, Answer.MISS, Answer.HIT]
    assert [bytes_of(found[0]), bytes_of(found[2])] == [bytes_of(page) for page in sealed([0, 3])]
    assert storage.exists([label(2)]) == [Answer.HIT]
    assert faulty.calls_count == 9
    assert (storage.retries_count, storage.abandoned_pages_count, len(clock.sleeps_s)) == (5, 0, 3)


@pytest.mark.parametrize(("rounds_max", "calls_count"), [(1, 1), (2, 3), (4, 15)])
def test_a_store_that_always_fails_is_asked_so_often_and_then_its_error_is_raised(
    rounds_max: int, calls_count: int
) -> None:
    clock = ManualClock()
    faulty = scripted(dict.fromkeys(range(100), StorageFault.FAIL))
    storage = retrying(faulty, rounds_max, clock)
    with pytest.raises(StorageError, match=f"call {calls_count - 1}, get, fails"):
        storage.get(blank(range(64)))
    assert faulty.calls_count == calls_count
    assert storage.retries_count == calls_count - 1
    assert storage.abandoned_pages_count == 64
    assert len(clock.sleeps_s) == rounds_max - 1


def test_pauses_double_shortened_by_up_to_a_half_as_the_seed_says() -> None:
    def pauses_s(seed: int) -> list[float]:
        clock = ManualClock()
        with pytest.raises(StorageError):
            retrying(scripted(dict.fromkeys(range(9), StorageFault.FAIL)), 5, clock, seed).get(blank([1]))
        return clock.sleeps_s

    assert pauses_s(1) == pauses_s(1)
    assert pauses_s(1) != pauses_s(2)
    for slept_s, longest_s in zip(pauses_s(3), (1.0, 2.0, 4.0, 8.0), strict=True):
        assert longest_s / 2 <= slept_s <= longest_s


def test_a_batch_that_fails_is_cut_until_only_what_fails_is_missing() -> None:
    # Page 4 is bad: of calls 0 [0, 8); 1 [0, 4), 2 [4, 8); 3 [4, 6), 4 [6, 8); 5 [4, 5), 6 [5, 6) those with it fail.
    backend = MemoryStorage()
    faulty = scripted(dict.fromkeys([0, 2, 3, 5], StorageFault.FAIL), backend)
    storage = retrying(faulty, 4)
    assert list(map(bool, storage.put(sealed(range(8)), Level.CACHED))) == [number != 4 for number in range(8)]
    assert backend.exists([label(number) for number in range(8)]) == Answer.of_reads(number != 4 for number in range(8))
    assert (storage.retries_count, storage.abandoned_pages_count) == (6, 1)


def test_a_batch_that_was_stored_in_part_is_completed() -> None:
    storage = retrying(scripted({0: StorageFault.PARTIAL_WRITE}), 2)
    assert storage.put(sealed(range(6)), Level.CACHED) == [Answer.STORED] * 6
    found = blank(range(6))
    assert storage.get(found) == [Answer.HIT] * 6
    assert [bytes_of(page) for page in found] == [bytes_of(page) for page in sealed(range(6))]


def test_a_put_that_was_declined_and_a_miss_are_answers() -> None:
    faulty = scripted({}, MemoryStorage(bytes_max=10))
    storage = retrying(faulty, 5)
    assert storage.put(sealed([1]), Level.CACHED) == [Answer.DECLINED]
    assert storage.get(blank([1])) == [Answer.MISS]
    assert (faulty.calls_count, storage.retries_count) == (2, 0)


def test_what_cannot_pass_is_not_tried_again() -> None:
    clock = ManualClock()
    storage = retrying(MemoryStorage(), 5, clock)
    with pytest.raises(StorageError, match="DURABLE"):
        storage.put(sealed([1]), Level.DURABLE)
    assert (storage.retries_count, clock.sleeps_s) == (0, [])


class TimingOut(MemoryStorage):
    """A store that fails for four pages together and times out for the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gets_count = 0

    def get(self, pages: Sequence[PageIO]) -> list[Answer]:
        self.gets_count += 1
        if len(pages) == 4:
            raise StorageError("cut me", retryable=True)
        if pages[-1].label == label(3):
            raise StorageTimeoutError("too late", Returned())
        return super().get(pages)


class Returned:
    name = "get"
    started_s = 0.0
    returned = True

    def wait(self, timeout_s: float) -> bool:
        return True


def test_a_timeout_is_not_tried_again_nor_hidden_by_what_was_answered() -> None:
    backend = TimingOut()
    backend.put(sealed(range(4)), Level.CACHED)
    storage = retrying(backend, 5)
    with pytest.raises(StorageTimeoutError):
        storage.get(blank([3]))
    assert (backend.gets_count, storage.retries_count) == (1, 0)
    with pytest.raises(StorageTimeoutError):
        storage.get(blank(range(4)))
    assert (backend.gets_count, storage.retries_count) == (4, 2)


def test_other_methods_are_tried_once() -> None:
    faulty = scripted(dict.fromkeys(range(4), StorageFault.FAIL))
    storage = retrying(faulty, 5)
    for call in (
        lambda: storage.register(manifest_of(MODEL, LAYOUT), {}),
        lambda: storage.touch([label(1)]),
        lambda: storage.remove([label(1)]),
        lambda: storage.scan(label(1).identity),
    ):
        with pytest.raises(StorageError, match="on purpose"):
            call()
    assert (faulty.calls_count, storage.retries_count) == (4, 0)


@given(pages_count=st.integers(0, 20), rounds_max=st.integers(1, 5), fails=st.sets(st.integers(0, 40)))
def test_whatever_fails_calls_are_bounded_and_every_page_said_to_be_stored_is(
    pages_count: int, rounds_max: int, fails: set[int]
) -> None:
    clock = ManualClock()
    backend = MemoryStorage()
    faulty = scripted(dict.fromkeys(fails, StorageFault.FAIL), backend)
    storage = retrying(faulty, rounds_max, clock)
    try:
        stored = storage.put(sealed(range(pages_count)), Level.CACHED)
    except StorageError:
        stored = [Answer.UNAVAILABLE] * pages_count
    assert list(map(bool, stored)) == list(map(bool, backend.exists([label(number) for number in range(pages_count)])))
    assert storage.abandoned_pages_count == stored.count(Answer.UNAVAILABLE)
    assert storage.retries_count == faulty.calls_count - 1 <= 2**rounds_max - 2
    assert len(clock.sleeps_s) <= rounds_max - 1
    storage.close()

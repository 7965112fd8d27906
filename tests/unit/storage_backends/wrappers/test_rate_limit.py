"""Rates: no more is asked of the store than it was given, and nobody waits longer than allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clock import ManualClock
from tests.support.wrappers import blank, scripted, sealed
from unified_cache.errors import ClosedError, ConfigError
from unified_cache.storage_backends.memory import MemoryStorage
from unified_cache.storage_backends.protocol import Level, StorageBackend
from unified_cache.storage_backends.wrappers import Method, Rate, RateLimit
from unified_cache.testing.storage_contract import PAGE_BYTES, label

AMPLE = Rate(calls_per_s=1e6, bytes_per_s=1e12, burst_s=1e6)


def limited(
    backend: StorageBackend, clock: ManualClock, gets: Rate = AMPLE, puts: Rate = AMPLE, wait_max_s: float = 1.0
) -> RateLimit:
    return RateLimit(backend, gets=gets, puts=puts, wait_max_s=wait_max_s, clock=clock, sleep=clock.sleep)


def test_calls_beyond_the_burst_wait_for_their_turn() -> None:
    clock = ManualClock()
    storage = limited(MemoryStorage(), clock, gets=Rate(calls_per_s=4.0, bytes_per_s=1e9, burst_s=0.5))
    for _ in range(6):
        assert storage.get(blank([1])) == [False]
    assert clock.sleeps_s == [0.25, 0.25, 0.25]
    clock.sleep(10.0)
    del clock.sleeps_s[:]
    for _ in range(4):
        storage.get(blank([1]))
    assert clock.sleeps_s == [0.25]


def test_bytes_are_limited_like_calls_and_a_batch_larger_than_any_burst_passes_and_delays_the_next() -> None:
    clock = ManualClock()
    storage = limited(MemoryStorage(), clock, puts=Rate(1e6, bytes_per_s=4.0 * PAGE_BYTES, burst_s=0.5))
    assert storage.put(sealed(range(5)), Level.CACHED) == [True] * 5
    assert clock.sleeps_s == []
    assert storage.put(sealed([7]), Level.CACHED) == [True]
    assert clock.sleeps_s == [0.75]


def test_a_turn_that_would_not_come_in_time_is_a_miss_or_a_declined_put_at_once_and_is_counted() -> None:
    clock = ManualClock()
    faulty = scripted({})
    tight = Rate(calls_per_s=0.5, bytes_per_s=1e9, burst_s=0.0)
    storage = limited(faulty, clock, gets=tight, puts=tight)
    assert storage.put(sealed([1]), Level.CACHED) == [True]
    assert storage.get(blank([1])) == [True]
    assert storage.put(sealed([2, 3]), Level.CACHED) == [False, False]
    assert storage.get(blank([1, 2])) == [False, False]
    assert storage.get(blank([1])) == [False]
    assert storage.refused_count == {Method.PUT: 1, Method.GET: 2}
    assert (faulty.calls_count, clock.sleeps_s) == (2, [])
    clock.sleep(1.0)
    assert storage.get(blank([1])) == [True]
    assert clock.now_s == 2.0


def test_puts_do_not_use_up_the_rate_of_gets_and_other_methods_have_none() -> None:
    clock = ManualClock()
    tight = Rate(calls_per_s=1e-3, bytes_per_s=1.0, burst_s=0.0)
    storage = limited(MemoryStorage(), clock, puts=tight)
    assert storage.put(sealed([1]), Level.CACHED) == [True]
    assert storage.put(sealed([2]), Level.CACHED) == [False]
    for _ in range(5):
        assert storage.get(blank([1])) == [True]
        assert storage.exists([label(1)]) == [True]
    assert len(storage.scan(label(1).identity).objects) == 1
    assert storage.remove([label(1)]) == 1
    assert clock.sleeps_s == []


def test_a_closed_store_is_closed_whatever_its_rate() -> None:
    clock = ManualClock()
    storage = limited(MemoryStorage(), clock, gets=Rate(1e-3, 1.0, 0.0))
    storage.get(blank([1]))
    storage.close()
    with pytest.raises(ClosedError):
        storage.get(blank([1]))


@pytest.mark.parametrize("values", [(0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, -1.0)])
def test_a_rate_of_nothing_is_an_error(values: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match="a rate needs"):
        Rate(*values)


def test_a_negative_wait_is_an_error() -> None:
    with pytest.raises(ConfigError, match="wait_max_s"):
        limited(MemoryStorage(), ManualClock(), wait_max_s=-1.0)


@given(
    calls=st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0, 5.0]), st.integers(1, 4)), max_size=40),
    wait_max_s=st.sampled_from([0.0, 0.5, 4.0]),
)
def test_over_any_time_the_store_is_asked_for_the_rate_one_burst_and_one_batch_at_most(
    calls: list[tuple[float, int]], wait_max_s: float
) -> None:
    clock = ManualClock()
    backend = MemoryStorage()
    backend.put(sealed(range(4)), Level.CACHED)
    rate = Rate(calls_per_s=2.0, bytes_per_s=3.0 * PAGE_BYTES, burst_s=2.0)
    storage = limited(backend, clock, gets=rate, wait_max_s=wait_max_s)
    made: list[tuple[float, int]] = []
    for idle_s, pages_count in calls:
        clock.now_s += idle_s
        asked_s = clock.now_s
        if all(storage.get(blank(range(pages_count)))):
            made.append((clock.now_s, pages_count))
        assert clock.now_s - asked_s <= wait_max_s + 1e-9
    for i, (start_s, _) in enumerate(made):
        for j in range(i, len(made)):
            span_s = made[j][0] - start_s
            assert j - i + 1 <= 2.0 * (span_s + 2.0) + 1 + 1e-6
            assert sum(pages for _, pages in made[i : j + 1]) <= 3.0 * (span_s + 2.0) + 4 + 1e-6

"""Times of reads: what calls and bytes take is told apart, and a read is as long as its deadline allows."""

import math

import pytest

from unified_cache.controller.cost_model import ReadTimes, pages_to_read

MIB = 1 << 20


def noted(call_s: float, mib_s: float, reads: list[tuple[int, int]], times: ReadTimes | None = None) -> ReadTimes:
    """Return what is known after reads of so many calls and MiB from a store of that speed."""
    times = ReadTimes() if times is None else times
    for calls, mib in reads:
        times.record(calls, mib * MIB, calls * call_s + mib * mib_s)
    return times


def test_before_the_first_read_nothing_is_known() -> None:
    times = ReadTimes()
    assert math.isnan(times.call_s)
    assert math.isnan(times.byte_s)


@pytest.mark.parametrize(("call_s", "mib_s"), [(0.02, 0.0), (0.0, 0.01), (0.02, 0.01)])
def test_reads_of_two_sizes_tell_calls_and_bytes_apart(call_s: float, mib_s: float) -> None:
    times = noted(call_s, mib_s, [(1, 8), (1, 1), (1, 8), (1, 1)])
    assert times.call_s == pytest.approx(call_s, abs=1e-3)
    assert times.byte_s * MIB == pytest.approx(mib_s, abs=5e-4)


def test_reads_of_one_size_are_taken_for_bytes_alone() -> None:
    times = noted(0.02, 0.0, [(1, 8)] * 5)
    assert times.call_s == 0
    assert times.byte_s * MIB == pytest.approx(0.02 / 8)


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_new_speed_is_believed_at_once(factor: float) -> None:
    times = noted(0.0, 0.01, [(1, 8)] * 20)
    noted(0.0, 0.01 * factor, [(1, 8)], times)
    assert times.byte_s * MIB == pytest.approx(0.01 * factor, rel=0.3)


def test_one_slow_read_is_forgotten_after_the_next_ones() -> None:
    reads = [(1, 8), (1, 2), (1, 4)] * 3
    times = noted(0.002, 0.01, reads)
    times.record(1, 8 * MIB, 1.0)
    noted(0.002, 0.01, reads, times)
    assert times.call_s + 8 * MIB * times.byte_s == pytest.approx(0.082, rel=0.1)


@pytest.mark.parametrize(("calls", "size", "seconds"), [(0, 0, 1.0), (1, 0, 1.0), (1, 8, 0.0), (1, 8, -1.0)])
def test_a_read_without_calls_bytes_or_time_says_nothing(calls: int, size: int, seconds: float) -> None:
    times = noted(0.002, 0.01, [(1, 8), (1, 2)])
    before = times.call_s, times.byte_s
    times.record(calls, size, seconds)
    assert (times.call_s, times.byte_s) == before


@pytest.mark.parametrize("jump_s", [1e-9, 1e4])
def test_figures_stay_numbers_whatever_a_clock_says(jump_s: float) -> None:
    times = noted(0.002, 0.01, [(1, 8), (1, 2)] * 3)
    for size in (1, 10**12, 1, 10**12):
        times.record(1, size, jump_s)
        noted(0.002, 0.01, [(1, 8)], times)
        assert 0 <= times.call_s < math.inf
        assert 0 <= times.byte_s < math.inf


@pytest.mark.parametrize(
    ("call_s", "page_s", "left_s", "pages"),
    [
        (math.nan, math.nan, 1.0, 128),  # nothing is known: one call
        (0.02, 1e-5, 0.05, 256),  # all comes in time
        (0.02, 1e-5, 0.03, 128),  # a call comes in time, and not two
        (0.03, 1e-3, 0.05, 17),  # calls are slow: all that one brings until shortly before the deadline
        (0.0, 1e-3, 0.05, 25),  # half of the time
        (0.0, 1e-4, 0.0265, 128),  # half of the time, a call and a little more: that call
        (0.08, 1e-5, 0.05, 128),  # nothing comes in time: one call, for others
        (0.0, 1e-3, 0.0, 128),
        (0.0, 0.04, 0.05, 1),  # one page, though it takes more than half of the time
    ],
)
def test_a_read_is_as_long_as_its_deadline_allows(call_s: float, page_s: float, left_s: float, pages: int) -> None:
    assert pages_to_read(256, 128, call_s, page_s, left_s, left_s) == pages


def test_shortly_before_a_deadline_one_read_brings_what_still_can_come() -> None:
    assert pages_to_read(256, 128, 0.0, 1e-3, 0.02, 0.1) == 10
    assert pages_to_read(256, 128, 0.0, 1e-3, 0.02, 0.2) == 19


def test_no_more_is_read_than_there_is() -> None:
    assert pages_to_read(3, 128, math.nan, math.nan, 1.0, 1.0) == 3
    assert pages_to_read(3, 128, 1.0, 1.0, 0.0, 1.0) == 3

"""Fits over the last things that were timed: against the speeds they were made of, with strange ones among them."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_cache.estimates.recent import KNOWN_MIN, RECENT_MAX, FittedSeconds, RecentTimes

MIB = float(1 << 20)


def fitted(times: RecentTimes) -> FittedSeconds:
    assert times.fitted is not None
    return times.fitted


def noted(latency_s: float, byte_s: float, sizes: list[float]) -> RecentTimes:
    times = RecentTimes(2)
    for size in sizes:
        times.note((1.0, size), latency_s + byte_s * size)
    return times


def expected(times: RecentTimes, *parts: float) -> float:
    return sum(weight * part for weight, part in zip(fitted(times).weights, parts, strict=True))


def test_nothing_is_said_before_enough_was_timed() -> None:
    sizes = [MIB, 2 * MIB, 4 * MIB, 8 * MIB]
    assert noted(0.01, 1e-9, sizes[: KNOWN_MIN - 1]).fitted is None
    assert noted(0.01, 1e-9, sizes).fitted is not None


@given(
    st.floats(0, 1), st.floats(1e-11, 1e-6), st.lists(st.floats(1e4, 1e9), min_size=KNOWN_MIN, max_size=2 * RECENT_MAX)
)
def test_what_was_timed_is_expected_again(latency_s: float, byte_s: float, sizes: list[float]) -> None:
    times = noted(latency_s, byte_s, sizes)
    for size in sizes[-RECENT_MAX:]:
        assert expected(times, 1.0, size) == pytest.approx(latency_s + byte_s * size, rel=0.15)


def test_latency_and_bandwidth_are_told_apart_where_sizes_differ() -> None:
    times = noted(0.1, 1e-8, [MIB * size for size in (1, 2, 5, 10, 20, 50)])
    latency_s, byte_s = fitted(times).weights
    assert latency_s == pytest.approx(0.1, rel=0.05)
    assert byte_s == pytest.approx(1e-8, rel=0.05)


def test_where_all_were_equally_large_bytes_are_taken_for_the_cost() -> None:
    times = noted(0.0, 1e-8, [MIB] * 10)
    assert expected(times, 1.0, 4 * MIB) == pytest.approx(4 * MIB * 1e-8, rel=0.05)


def test_a_few_strange_times_move_the_fit_little() -> None:
    draw = random.Random(3)
    times = RecentTimes(2)
    for number in range(RECENT_MAX):
        size = draw.uniform(1, 64) * MIB
        strange = 50.0 if number % 6 == 5 else draw.uniform(0.95, 1.05)
        times.note((1.0, size), strange * (0.01 + 1e-8 * size))
    assert expected(times, 1.0, 32 * MIB) == pytest.approx(0.01 + 32 * MIB * 1e-8, rel=0.1)


def test_a_speed_that_has_changed_for_good_is_learned_after_three() -> None:
    sizes = [MIB * size for size in (1, 3, 9, 27)]
    times = noted(0.0, 1e-9, sizes * 8)
    assert fitted(times)
    for size in sizes:
        times.note((1.0, size), 1e-8 * size)
    assert expected(times, 1.0, 9 * MIB) == pytest.approx(9 * MIB * 1e-8, rel=0.05)


def test_two_hiccups_in_a_row_forget_nothing() -> None:
    sizes = [MIB * size for size in (1, 3, 9, 27)]
    times = noted(0.0, 1e-9, sizes * 7)
    assert fitted(times)
    for size in (*sizes[:2], *sizes):
        times.note((1.0, size), (1e-7 if size in sizes[:2] else 1e-9) * size)
    assert expected(times, 1.0, 9 * MIB) == pytest.approx(9 * MIB * 1e-9, rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -5.0, float("nan"), float("inf")])
def test_a_clock_that_stands_still_or_jumps_back_teaches_nothing(seconds: float) -> None:
    times = RecentTimes(2)
    for _ in range(20):
        times.note((1.0, MIB), seconds)
    assert times.fitted is None


def test_doubt_grows_beyond_what_was_timed_and_shrinks_with_what_was() -> None:
    few, many = (noted(0.0, 1e-9, [MIB, 2 * MIB, 4 * MIB, 8 * MIB] * count) for count in (1, 8))
    assert fitted(many).error < fitted(few).error
    longest_s = fitted(few).longest_s
    assert fitted(few).error_at(longest_s / 2) == fitted(few).error
    assert fitted(few).error_at(longest_s * 10) == pytest.approx(10 * fitted(few).error)


@given(st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 30_000), st.floats(0.5, 2)), min_size=4, max_size=40))
def test_no_part_is_ever_negative_and_every_figure_is_finite(requests: list[tuple[int, int, float]]) -> None:
    times = RecentTimes(3)
    for start, count, noise in requests:
        end = start + count
        times.note((1.0, count, end**2 - start**2), noise * (0.01 + 1e-4 * count + 1e-8 * (end**2 - start**2)))
    found = times.fitted
    if found is not None:
        assert np.isfinite([*found.weights, found.error]).all()
        assert min(found.weights) >= 0


def test_computing_is_fitted_with_the_pairs_of_attention() -> None:
    times = RecentTimes(3)
    draw = random.Random(1)
    for _ in range(24):
        start = draw.randrange(0, 8_000)
        end = start + draw.randrange(500, 16_000)
        pairs = end**2 - start**2
        times.note((1.0, end - start, pairs), draw.uniform(0.97, 1.03) * (0.02 + 1e-4 * (end - start) + 2e-8 * pairs))
    assert expected(times, 1.0, 12_000, 12_000**2) == pytest.approx(0.02 + 1.2 + 2.88, rel=0.05)

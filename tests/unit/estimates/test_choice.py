"""The length that makes the first token come soonest: against one that tries them all."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unified_cache.controller import LeftAloneReason
from unified_cache.estimates.choice import ExpectedTimes, soonest

seconds = st.floats(0, 100, width=32)


@st.composite
def expectations(draw: st.DrawFn, *, doubt: bool = False) -> ExpectedTimes:
    """Draw times of one to eight ends: loading takes longer, computing less long, the later the end."""
    count = draw(st.integers(1, 8))
    rising = st.lists(seconds, min_size=count - 1, max_size=count - 1)
    read, copy, compute = (np.array([0.0, *draw(rising)]) for _ in range(3))
    errors = [draw(st.floats(0, 2)) if doubt else 0.0 for _ in range(3)]
    left_s = draw(st.one_of(st.just(math.inf), seconds))
    return ExpectedTimes([np.cumsum(read), np.cumsum(copy)], np.cumsum(compute)[::-1], errors, left_s)


def total(expected: ExpectedTimes, number: int) -> float:
    return float(sum(step[number] for step in expected.steps_s) + expected.compute_s[number])


def in_time(expected: ExpectedTimes) -> list[int]:
    reads = expected.steps_s[0].tolist()
    return [number for number, read_s in enumerate(reads) if number == 0 or read_s <= expected.left_s]


@given(expectations())
def test_without_doubt_it_is_the_least_of_those_in_time(expected: ExpectedTimes) -> None:
    chosen, _ = soonest(expected)
    assert chosen in in_time(expected)
    assert total(expected, chosen) == min(total(expected, number) for number in in_time(expected))


@given(expectations(doubt=True))
def test_it_differs_from_the_longest_in_time_only_for_a_gain_beyond_doubt(expected: ExpectedTimes) -> None:
    chosen, _ = soonest(expected)
    usual = in_time(expected)[-1]
    if chosen != usual:
        times = [*expected.steps_s, expected.compute_s]
        apart_s = [
            error * float(each[usual] - each[chosen]) for error, each in zip(expected.errors, times, strict=True)
        ]
        doubt_s = math.sqrt(sum(each * each for each in apart_s))
        assert total(expected, usual) - total(expected, chosen) > doubt_s * (1 - 1e-6)


@given(expectations(doubt=True))
def test_a_reason_is_told_exactly_where_something_is_left(expected: ExpectedTimes) -> None:
    chosen, reason = soonest(expected)
    assert (reason is None) == (chosen == len(expected.compute_s) - 1)
    if reason is LeftAloneReason.PAST_DEADLINE:
        assert in_time(expected)[-1] < len(expected.compute_s) - 1


@given(expectations(), st.integers(0, 2))
def test_what_is_not_known_is_taken_for_worth_it(expected: ExpectedTimes, unknown: int) -> None:
    times = [*expected.steps_s, expected.compute_s]
    times[unknown] = np.full(len(expected.compute_s), math.nan)
    assert soonest(ExpectedTimes(times[:2], times[2], expected.errors, expected.left_s)) == (
        len(expected.compute_s) - 1,
        None,
    )


def test_of_equal_ones_the_longest_is_taken() -> None:
    load, compute = np.array([0.0, 1.0, 2.0]), np.array([2.0, 1.0, 0.0])
    assert soonest(ExpectedTimes([load], compute, [0.0, 0.0], math.inf)) == (2, None)


def test_a_deadline_takes_the_longest_that_comes_in_time_and_says_so() -> None:
    load, compute = np.array([0.0, 1.0, 2.0]), np.array([20.0, 10.0, 0.0])
    assert soonest(ExpectedTimes([load], compute, [0.1, 0.1], 1.5)) == (1, LeftAloneReason.PAST_DEADLINE)
    assert soonest(ExpectedTimes([load], compute, [0.1, 0.1], 0.5)) == (0, LeftAloneReason.PAST_DEADLINE)

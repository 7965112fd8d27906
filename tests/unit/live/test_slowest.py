"""The slowest of what ended in the last minutes."""

from itertools import count

from unified_cache.core.slowest import PERIOD_S, SLOWEST_MAX, Slowest


def test_the_slowest_of_this_period_and_the_one_before_are_kept() -> None:
    slowest: Slowest[str] = Slowest(0.0)
    numbers = count()
    for second in range(int(PERIOD_S)):
        seconds = float(second % 50)
        if slowest.is_slow(seconds, float(second)):
            slowest.record(seconds, f"{seconds} {next(numbers)}")
    assert [text.split()[0] for text in slowest.latest()] == ["49.0"] * 6 + ["48.0"] * 2
    assert slowest.is_slow(0.5, PERIOD_S + 1)
    slowest.record(0.5, "0.5 late")
    assert len(slowest.latest()) == SLOWEST_MAX, "those of the period before are still told of"
    assert slowest.is_slow(0.1, 4 * PERIOD_S)
    slowest.record(0.1, "0.1 later")
    assert slowest.latest() == ("0.1 later",)

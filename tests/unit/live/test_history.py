"""Rates and ratios of the last minutes, and the slowest of what ended in them."""

from itertools import count

from unified_cache.live.figures import FoundPages, LegFigures, LiveFigures, SourceKind
from unified_cache.live.history import HISTORY_POINTS_MAX, LiveHistory
from unified_cache.slowest import PERIOD_S, SLOWEST_MAX, Slowest


def figures_of(found: FoundPages, moved_bytes: int = 0) -> LiveFigures:
    legs = (LegFigures("load", 0, moved_bytes),)
    return LiveFigures(SourceKind.CACHE, "cache", 0.0, (), found, legs, 0, (), (), None, None)


def test_the_last_minute_is_what_came_since_a_minute_ago() -> None:
    history = LiveHistory()
    for second in range(100):
        asked = 10 * second
        history.note(figures_of(FoundPages(second, asked // 2, 0, 0, 0, asked // 2), 1_000 * second), float(second))
    last = figures_of(FoundPages(100, 500, 60, 20, 0, 440), 100_000)
    minute = history.last_minute(last, 100.0)
    # Since second 40: 60 look-ups of 600 pages, 300 on the device, 60 on the host, 20 of these from storage before.
    assert minute.seconds == 60
    assert minute.lookups_per_s == 1
    assert (minute.device_ratio, minute.host_ratio, minute.storage_ratio) == (0.5, 40 / 600, 20 / 600)
    assert minute.bytes_per_s == (1_000.0,)


def test_without_look_ups_there_is_no_ratio_and_nothing_is_divided_by_zero() -> None:
    history = LiveHistory()
    minute = history.last_minute(figures_of(FoundPages(0, 0, 0, 0, 0, 0)), 5.0)
    assert (minute.seconds, minute.device_ratio, minute.lookups_per_s) == (0, 0, 0)


def test_storage_that_was_prefetched_and_not_looked_up_yet_takes_nothing_from_the_host() -> None:
    history = LiveHistory()
    history.note(figures_of(FoundPages(0, 0, 0, 0, 0, 0)), 0.0)
    minute = history.last_minute(figures_of(FoundPages(1, 0, 5, 9, 0, 5)), 1.0)
    assert (minute.host_ratio, minute.storage_ratio) == (0.0, 0.5)


def test_a_history_keeps_one_point_a_second_of_the_last_ten_minutes() -> None:
    history = LiveHistory()
    made = [history.note(figures_of(FoundPages(0, 0, 0, 0, 0, 0)), tenth / 10) for tenth in range(10_000)]
    assert sum(point is not None for point in made) == 1_000
    assert len(history.points) == HISTORY_POINTS_MAX
    assert history.points[-1].at_s == 999.0


def test_the_slowest_of_this_period_and_the_one_before_are_kept() -> None:
    slowest: Slowest[str] = Slowest(0.0)
    numbers = count()
    for second in range(int(PERIOD_S)):
        seconds = float(second % 50)
        if slowest.is_slow(seconds, float(second)):
            slowest.note(seconds, f"{seconds} {next(numbers)}")
    assert [text.split()[0] for text in slowest.latest()] == ["49.0"] * 6 + ["48.0"] * 2
    assert slowest.is_slow(0.5, PERIOD_S + 1)
    slowest.note(0.5, "0.5 late")
    assert len(slowest.latest()) == SLOWEST_MAX, "those of the period before are still told of"
    assert slowest.is_slow(0.1, 4 * PERIOD_S)
    slowest.note(0.1, "0.1 later")
    assert slowest.latest() == ("0.1 later",)

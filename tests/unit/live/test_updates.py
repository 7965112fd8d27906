"""Updates of a page say what their figures say, and make again only what has changed."""

import json
from dataclasses import replace

from tests.support.clock import ManualClock
from unified_cache.observe.live.authenticator import View
from unified_cache.observe.live.figures import FoundPages, LiveFigures, SlowFigures, SourceKind
from unified_cache.observe.live.updates import POINTS_MAX, LiveUpdates

SLOW = SlowFigures("load", "done", 5, 0.25, 1.0)
FIGURES = LiveFigures(
    *(SourceKind.CACHE, "cache", 1.5, (), FoundPages(1, 0, 2, 0, 0, 3), (), 0, (), (SLOW,), None, None)
)


class GivenSource:
    """Source of the figures that it was given last."""

    def __init__(self) -> None:
        self.given = FIGURES

    def figures(self) -> LiveFigures:
        return self.given


def test_an_update_says_what_its_figures_say() -> None:
    source = GivenSource()
    updates = LiveUpdates(source)
    for live, slowest in ((1, (SLOW,)), (2, ()), (3, (SLOW, SLOW))):
        source.given = replace(FIGURES, operations_live=live, slowest=slowest)
        assert updates.read()
        told = json.loads(updates.latest.text(View.EVERYTHING))
        assert told["operations_live"] == live
        assert told["slowest"] == [each.as_json() for each in slowest]
        assert told["found"]["missed"] == 3


def test_a_history_keeps_one_point_a_second_of_the_last_ten_minutes() -> None:
    clock = ManualClock()
    updates = LiveUpdates(GivenSource(), clock)
    made = [updates.latest.point]
    for tenth in range(1, 10_000):
        clock.now_s = tenth / 10
        updates.read()
        made.append(updates.latest.point)
    assert sum(point is not None for point in made) == 1_000
    assert len(updates.points) == POINTS_MAX
    assert updates.points[-1] == [999.0, *FIGURES.found]


def test_what_was_not_published_anew_is_no_news() -> None:
    updates = LiveUpdates(GivenSource())
    assert updates.latest.point is not None
    assert not updates.read()

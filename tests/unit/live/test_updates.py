"""Updates of a page say what their figures say, and make again only what has changed."""

import json
from dataclasses import dataclass, field, replace

from unified_cache.explain.short_hits import ShortHit
from unified_cache.live.door import View
from unified_cache.live.figures import FoundPages, LiveFigures, SlowFigures, SourceKind
from unified_cache.live.updates import LiveUpdates
from unified_cache.recording.note import FoundByTier

SLOW = SlowFigures("load", "done", 5, 0.25, 1.0)
FIGURES = LiveFigures(
    *(SourceKind.CACHE, "cache", 1.5, (), FoundPages(1, 0, 2, 0, 0, 3), (), 0, (), (SLOW,), None, None, ())
)


@dataclass(frozen=True, slots=True)
class CountedHit(ShortHit):
    """Short hit that counts how often it is made into JSON."""

    counted: list[int] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        self.counted.append(1)
        return ShortHit.as_json(self)


class GivenSource:
    """Source of the figures that it was given last."""

    def __init__(self) -> None:
        self.given = FIGURES

    def look(self) -> None:
        pass

    def figures(self) -> LiveFigures:
        return self.given


def hit(at_s: float) -> CountedHit:
    return CountedHit(at_s, 2, 16, FoundByTier(1, 0, 0), ("full",), 'lost "pages"', "full |==..|\n")


def test_an_update_says_what_its_figures_say() -> None:
    source = GivenSource()
    updates = LiveUpdates(source)
    older, newer = hit(1.0), hit(2.0)
    for live, slowest, hits in ((1, (SLOW,), (older,)), (2, (), (newer, older)), (3, (SLOW, SLOW), (newer, older))):
        source.given = replace(FIGURES, operations_live=live, slowest=slowest, explanations=hits)
        assert updates.read()
        told = json.loads(updates.latest.text(View.EVERYTHING))
        assert told["operations_live"] == live
        assert told["slowest"] == [each.as_json() for each in slowest]
        assert told["explanations"] == [each.as_json() for each in hits]
        assert (told["found"]["missed"], told["last_minute"]["lookups_per_s"]) == (3, 0)


def test_short_hits_are_made_into_text_once_however_often_the_figures_change() -> None:
    source = GivenSource()
    updates = LiveUpdates(source)
    shown = hit(1.0)
    for live in range(50):
        source.given = replace(FIGURES, operations_live=live, explanations=(shown,))
        updates.read()
        told = json.loads(updates.latest.text(View.FIGURES))
        assert (told["operations_live"], told["explanations"][0]["pages"]) == (live, 2)
    assert len(shown.counted) == 1


def test_what_was_not_published_anew_is_no_news() -> None:
    updates = LiveUpdates(GivenSource())
    assert updates.latest.point is not None
    assert not updates.read()

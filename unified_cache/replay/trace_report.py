"""The page of a trace: how much of it repeats, how soon, how often, and in which sessions."""

from collections.abc import Sequence
from itertools import accumulate

from unified_cache.replay.trace_figures import TraceFigures, power_text
from unified_cache.report.charts import BarChart, Hue, Series, Unit
from unified_cache.report.page import Page, TableSection

__all__ = ["page_of"]


def page_of(name: str, figures: TraceFigures) -> Page:
    """Return what the page of a trace says."""
    charts = [
        _bars("Uses again, by the blocks used meanwhile (reuse distance)", "uses", figures.reuse_distances),
        _bars("Uses, by how often their block is used (popularity)", "uses", figures.popularity),
        _bars("Sessions, by their requests", "sessions", figures.session_requests),
    ]
    return Page(
        title=f"Trace {name}",
        headline=figures.headline,
        lead="An LRU cache of so many blocks has what is used again at a smaller distance.",
        alarm="",
        charts=[chart for chart in charts if chart.categories],
        tables=[TableSection("Reuse distance", ("blocks held", "uses again", "share of all blocks"), _curve(figures))],
        notes=[],
        settings=figures.rows(),
    )


def _bars(title: str, name: str, counts: Sequence[int]) -> BarChart:
    return BarChart(
        title, Unit.COUNT, [power_text(power) for power in range(len(counts))], [Series(name, Hue.PLAIN, counts)]
    )


def _curve(figures: TraceFigures) -> list[tuple[str, ...]]:
    """Return what an LRU cache of so many blocks hits."""
    uses = accumulate(figures.reuse_distances)
    return [
        (f"{(1 << power + 1) - 1:,}", f"{count:,}", f"{share:.2%}")
        for power, (count, share) in enumerate(zip(uses, figures.lru_ratios(), strict=True))
    ]

"""A replay as a page: the hit ratio over the run, by engine and by component. Needs the extra ``report``."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from unified_cache.replay.result import ReplayResult
from unified_cache.replay.summary import (
    COLUMNS,
    COMPONENT_COLUMNS,
    component_rows,
    headline,
    present_tiers,
    setting_rows,
    tier_rows,
    verdict,
)
from unified_cache.report.charts import BandChart, BarChart, Chart, Hue, Series, Unit
from unified_cache.report.page import Page, TableSection

__all__ = ["write_report"]

SMOOTH_WINDOWS = 3
"""Windows averaged into one point: single windows of a trace jump with the luck of a few long prompts."""

_Floats = npt.NDArray[np.float64]


def write_report(result: ReplayResult, directory: Path) -> Path:
    """Write the page of a replay into ``directory``; return its path.

    Raises:
        OSError: it cannot be written; nothing is left half-written.

    """
    return page_of(result).write(directory)


def page_of(result: ReplayResult) -> Page:
    """Return what the page of a replay says."""
    wrong = result.wrong_pages or result.leaked_slots
    first, *notes = verdict(result)
    return Page(
        title=f"Replay of {result.trace}",
        headline=headline(result),
        lead=f"{first}.",
        alarm=f"{result.wrong_pages:,} pages held wrong bytes, {result.leaked_slots:,} slots leaked: this is a bug."
        if wrong
        else "",
        charts=list(_charts(result)),
        tables=[
            TableSection("By tier", COLUMNS, tier_rows(result), has_total=True),
            *_component_table(result),
        ],
        notes=notes,
        settings=setting_rows(result),
    )


def _component_table(result: ReplayResult) -> list[TableSection]:
    rows = component_rows(result)
    return [TableSection("By component", COMPONENT_COLUMNS, rows, text_columns=2)] if rows else []


def _charts(result: ReplayResult) -> list[Chart]:
    tiers = present_tiers(result)
    charts: list[Chart] = [_over_the_run(result, tiers)]
    if len(result.engines) > 1:
        ratios = [engine.ratios() for engine in result.engines]
        names = [f"engine {number}" for number in range(len(ratios))]
        charts.append(
            BarChart(
                "Share of the blocks handed back, by engine",
                Unit.RATIO,
                names,
                [Series(tier, Hue(tier), [each[tier] for each in ratios]) for tier in tiers],
            )
        )
    if len(result.components) > 1:
        charts.append(
            BarChart(
                "Bytes handed back, by component",
                Unit.BYTES,
                [component.name for component in result.components],
                [Series(tier, Hue(tier), [each.hit_bytes()[tier] for each in result.components]) for tier in tiers],
            )
        )
    moved = {kind: count for kind, count in result.bytes_moved.items() if count}
    if moved:
        charts.append(
            BarChart("Bytes moved", Unit.BYTES, list(moved), [Series("bytes moved", Hue.PLAIN, list(moved.values()))])
        )
    return charts


def _over_the_run(result: ReplayResult, tiers: Sequence[str]) -> BandChart:
    """Return the smoothed ratios over the run: by tier, and of what had been asked for before."""
    series = result.series
    asked = _smooth([window.pages for window in series])
    asked[asked == 0] = 1
    # To both ends of the run, so that nothing seems to be missing there; a single point becomes a plateau.
    positions = [0.0, *((window.start + window.end) / 2 for window in series), float(result.requests)]
    times = [window.timestamp_ms for window in series]

    def ratios(counts: Sequence[int]) -> list[float]:
        smooth: list[float] = np.pad(_smooth(counts) / asked, 1, mode="edge").tolist()
        return smooth

    return BandChart(
        title="Share of the blocks handed back, over the run",
        unit=Unit.RATIO,
        position_name="request",
        positions=positions,
        position_notes=_minutes([times[0], *times, times[-1]]) if times and times[-1] > 0 else (),
        bands=[Series(tier, Hue(tier), ratios([window.hits.by_tier()[tier] for window in series])) for tier in tiers],
        bound=Series("asked for before", Hue.PLAIN, ratios([window.seen_pages for window in series])),
    )


def _minutes(times_ms: Sequence[float]) -> list[str]:
    return [f"minute {time_ms / 60_000:,.1f} of the trace" for time_ms in times_ms]


def _smooth(counts: Sequence[int]) -> _Floats:
    """Sum neighbouring windows; at the ends, those there are."""
    kernel = np.ones(min(SMOOTH_WINDOWS, len(counts)))
    smooth: _Floats = np.convolve(np.array(counts, np.float64), kernel, mode="same")
    return smooth

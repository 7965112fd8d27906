"""A replay as a page: the hit ratio over the run, by engine and by component. Needs the extra ``report``."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from unified_cache.replay.missed import ComponentMiss, MissedTokens
from unified_cache.replay.references import References
from unified_cache.replay.result import ReplayResult
from unified_cache.replay.summary import (
    component_table,
    headline,
    miss_table,
    prefix_table,
    present_tiers,
    regret_table,
    setting_rows,
    tier_table,
    verdict,
)
from unified_cache.report.charts import BandChart, BarChart, Chart, Hue, Series, Unit, tier_series
from unified_cache.report.page import Page

__all__ = ["page_of"]

SMOOTH_WINDOWS = 3
"""Windows averaged into one point: single windows of a trace jump with the luck of a few long prompts."""

_MISS_HUES = (Hue.FIRST, Hue.SECOND, Hue.THIRD, Hue.FOURTH, Hue.FIFTH)
"""Colours of the reasons that cost most."""

_Floats = npt.NDArray[np.float64]


def page_of(result: ReplayResult) -> Page:
    """Return what the page of a replay says."""
    wrong = result.wrong_pages or result.leaked_slots
    first, *notes = verdict(result)
    tables = (table_of(result) for table_of in (tier_table, component_table, miss_table, regret_table, prefix_table))
    return Page(
        title=f"Replay of {result.trace}",
        headline=headline(result),
        lead=f"{first}.",
        alarm=f"{result.wrong_pages:,} pages held wrong bytes, {result.leaked_slots:,} slots leaked: this is a bug."
        if wrong
        else "",
        charts=list(_charts(result)),
        tables=[table for table in tables if table is not None],
        notes=notes,
        settings=setting_rows(result),
    )


def _charts(result: ReplayResult) -> list[Chart]:
    tiers = present_tiers(result)
    charts: list[Chart] = [_over_the_run(result, tiers)]
    if result.references is not None:
        charts.append(_beside_references(result, result.references))
    if result.missed is not None and result.missed.total:
        charts.append(_missed_over_the_run(result, result.missed))
    if len(result.engines) > 1:
        ratios = [engine.tokens.ratios() for engine in result.engines]
        names = [f"engine {number}" for number in range(len(ratios))]
        series = tier_series(tiers, ratios)
        charts.append(BarChart("Share of the tokens handed back, by engine", Unit.RATIO, names, series))
    if len(result.components) > 1:
        names = [component.name for component in result.components]
        series = tier_series(tiers, [component.hit_bytes() for component in result.components])
        charts.append(BarChart("Bytes handed back, by component", Unit.BYTES, names, series))
    moved = {kind: count for kind, count in result.bytes_moved.items() if count}
    if moved:
        charts.append(
            BarChart("Bytes moved", Unit.BYTES, list(moved), [Series("bytes moved", Hue.PLAIN, list(moved.values()))])
        )
    return charts


def _over_the_run(result: ReplayResult, tiers: Sequence[str]) -> BandChart:
    """Return the smoothed ratios over the run: by tier, and of what had been asked for before."""
    series = result.series
    asked = [window.tokens.asked for window in series]
    bands = [
        Series(tier, Hue(tier), _ratios([window.tokens.hits.by_tier()[tier] for window in series], asked))
        for tier in tiers
    ]
    bound = Series("asked for before", Hue.PLAIN, _ratios([window.tokens.seen for window in series], asked))
    return _run_chart("Share of the tokens handed back, over the run", result, bands, bound)


def _beside_references(result: ReplayResult, references: References) -> BandChart:
    """Return the smoothed share of the blocks that was handed back, and would have been by each reference."""
    series = result.series
    asked = [window.pages for window in series]
    lru, best = references.lru, references.clairvoyant
    ran = Series("handed back", Hue.FIRST, _ratios([window.hits.total for window in series], asked))
    bound = Series(f"best possible with {best.capacity_pages:,} pages", Hue.PLAIN, _ratios(best.series, asked))
    chart = _run_chart("Share of the blocks handed back, beside lru and the best policy", result, [ran], bound)
    return replace(
        chart, lines=[Series(f"lru with {lru.capacity_pages:,} pages", Hue.SECOND, _ratios(lru.series, asked))]
    )


def _missed_over_the_run(result: ReplayResult, missed: MissedTokens) -> BandChart:
    """Return the smoothed share of the tokens that was missed, by reason and component, those that cost most first."""
    reasons = list(missed.by_reason)
    shown, rest = reasons[: len(_MISS_HUES)], reasons[len(_MISS_HUES) :]
    several = len(result.components) > 1

    def band(name: str, hue: Hue, summed: Sequence[ComponentMiss]) -> Series:
        counts = [sum(window.get(reason, 0) for reason in summed) for window in missed.series]
        return Series(name, hue, _ratios(counts, missed.asked))

    bands = [
        band(f"{reason.component}: {reason.text}" if several else reason.text, hue, [reason])
        for reason, hue in zip(shown, _MISS_HUES, strict=False)
    ]
    if rest:
        bands.append(band("all others", Hue.REST, rest))
    bound = Series(
        "all missed", Hue.PLAIN, [sum(values) for values in zip(*(each.values for each in bands), strict=True)]
    )
    return _run_chart("Share of the tokens missed, by reason, over the run", result, bands, bound)


def _run_chart(title: str, result: ReplayResult, bands: Sequence[Series], bound: Series) -> BandChart:
    """Return a chart over the requests of a run, to both ends, so that nothing seems to be missing there."""
    series = result.series
    times = [window.timestamp_ms for window in series]
    return BandChart(
        title=title,
        unit=Unit.RATIO,
        position_name="request",
        positions=[0.0, *((window.start + window.end) / 2 for window in series), float(result.requests)],
        position_notes=_minutes([times[0], *times, times[-1]]) if times and times[-1] > 0 else (),
        bands=bands,
        bound=bound,
    )


def _ratios(counts: Sequence[int], asked: Sequence[int]) -> list[float]:
    """Return smoothed shares, one more at both ends; a single point becomes a plateau."""
    whole = _smooth(asked)
    whole[whole == 0] = 1
    smooth: list[float] = np.pad(_smooth(counts) / whole, 1, mode="edge").tolist()
    return smooth


def _minutes(times_ms: Sequence[float]) -> list[str]:
    return [f"minute {time_ms / 60_000:,.1f} of the trace" for time_ms in times_ms]


def _smooth(counts: Sequence[int]) -> _Floats:
    """Sum neighbouring windows; at the ends, those there are."""
    kernel = np.ones(min(SMOOTH_WINDOWS, len(counts)))
    smooth: _Floats = np.convolve(np.array(counts, np.float64), kernel, mode="same")
    return smooth

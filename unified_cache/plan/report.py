"""A plan as a page: hit ratio over host memory and storage, curves by tier, and bars. Needs the extra ``report``."""

from unified_cache.byte_sizes import bytes_text
from unified_cache.plan.hardware import GIB
from unified_cache.plan.result import TIERS, PlanResult
from unified_cache.plan.summary import plan_notes, setting_pairs, step_table
from unified_cache.report.charts import BandChart, BarChart, Chart, HeatMap, Hue, Series, Unit, tier_series
from unified_cache.report.page import Page

__all__ = ["page_of"]

PRICE_LEVELS = 6
"""Bands of price between the cheapest and the dearest cell of a heat map."""

BARS_MAX = 8
"""Combinations shown as bars, the cheapest per token first."""


def page_of(result: PlanResult) -> Page:
    """Return what the page of a plan says."""
    first, *others = plan_notes(result)
    charts: list[Chart] = [_heat_map(result)]
    charts += [_curve(result, tier) for tier in TIERS if len(result.curve(tier)) > 1]
    charts.append(_bars(result))
    return Page(
        title=f"Plan for {result.model.name} and {result.trace}",
        headline=result.sentence,
        lead=f"{first}.",
        alarm="" if result.is_complete else "The plan was interrupted: not all combinations were evaluated.",
        charts=charts,
        tables=[step_table(result)],
        notes=others,
        settings=setting_pairs(result),
    )


def _heat_map(result: PlanResult) -> HeatMap:
    best = result.best.sizes
    points = {(each.sizes.host, each.sizes.storage): each for each in result.points if each.sizes.device == best.device}
    hosts, stores = (sorted({pair[part] for pair in points}) for part in (0, 1))
    prices = [point.costs.price_per_hour for point in points.values()]
    step = (max(prices) - min(prices)) / PRICE_LEVELS or 1.0

    def level(host: int, storage: int) -> int:
        point = points.get((host, storage))
        return -1 if point is None else int((point.costs.price_per_hour - min(prices)) / step)

    def ratio(host: int, storage: int) -> float | None:
        point = points.get((host, storage))
        return None if point is None else point.hit_ratio

    return HeatMap(
        title=f"Share of the tokens handed back, with {bytes_text(best.device)} of each device",
        unit=Unit.RATIO,
        row_name="host memory",
        rows=[bytes_text(host) for host in hosts],
        column_name="storage",
        columns=[bytes_text(storage) for storage in stores],
        values=[[ratio(host, storage) for storage in stores] for host in hosts],
        levels=[[level(host, storage) for storage in stores] for host in hosts],
        levels_name=f"a line is {step:.3g} more an hour",
        best=(hosts.index(best.host), stores.index(best.storage)),
    )


def _curve(result: PlanResult, tier: str) -> BandChart:
    curve = result.curve(tier)
    knee = result.knees()[tier]
    sizes = [point.sizes.by_tier()[tier] for point in curve]
    marks = [
        ", ".join(
            ([f"knee at {bytes_text(size)}"] if size == knee else []) + (["best"] if point is result.best else [])
        )
        for size, point in zip(sizes, curve, strict=True)
    ]
    marks_text = "; ".join(
        mark if mark.startswith("knee") else f"{mark} at {bytes_text(size)}"
        for size, mark in zip(sizes, marks, strict=True)
        if mark
    )
    return BandChart(
        title=f"Share of the tokens handed back, by size of {_named(tier)}; circles: {marks_text}",
        unit=Unit.RATIO,
        position_name=_named(tier),
        positions=[size / GIB for size in sizes],
        position_notes=marks,
        bands=tier_series(TIERS, [point.tier_ratios for point in curve]),
        bound=Series("clairvoyant", Hue.PLAIN, [point.bound_ratio for point in curve]),
        position_labels=[bytes_text(size) for size in sizes],
        marked=[number for number, mark in enumerate(marks) if mark],
    )


def _bars(result: PlanResult) -> BarChart:
    cheapest = sorted(result.points, key=lambda point: (point is not result.best, point.costs.cost_per_million_tokens))
    shown = cheapest[:BARS_MAX]
    names = [" + ".join(bytes_text(size) for size in point.sizes.by_tier().values() if size) for point in shown]
    return BarChart(
        "Share of the tokens by tier: the best, and those next in cost per token (device + host + storage)",
        Unit.RATIO,
        names,
        tier_series(TIERS, [point.tier_ratios for point in shown]),
    )


def _named(tier: str) -> str:
    return {"device": "each device", "host": "host memory", "storage": "storage"}[tier]

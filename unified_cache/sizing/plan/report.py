"""A plan for people: what to buy, the curve of each tier as a table and drawn, hits over host memory and storage."""

from unified_cache.core.sizes import bytes_text, short_size
from unified_cache.sizing.plan.hardware import GIB
from unified_cache.sizing.plan.planner import PlanResult
from unified_cache.sizing.plan.sweep import TIERS
from unified_cache.sizing.report.charts import BandChart, Series, series_of
from unified_cache.sizing.report.page import Page, TableSection

CURVE_COLUMNS = ("device", "host", "storage", "all", "TTFT p50", "p99", "cost/M tokens", "")
"""Columns of a curve after the size of its tier."""

NAMES = {"device": "each device", "host": "host memory", "storage": "storage"}


def page_of(result: PlanResult) -> Page:
    """Return what a plan says."""
    curved = [tier for tier in TIERS if len(result.curve(tier)) > 1]
    return Page(
        title=f"Plan for {result.model.name} and {result.trace}",
        headline=result.sentence,
        lead=f"{result.requests:,} requests, {result.input_tokens:,} tokens, {len(result.points):,} combinations in "
        f"{result.seconds:.1f} s; {result.seen_ratio:.2%} of the tokens had been asked for before.",
        alarm="" if result.is_complete else "The plan was interrupted: not all combinations were evaluated.",
        charts=[_curve(result, tier) for tier in curved],
        tables=[*(_curve_table(result, tier) for tier in curved), _size_table(result)],
        notes=_notes(result),
        settings=_settings(result),
    )


def _notes(result: PlanResult) -> list[str]:
    """Return lines on what the best combination moves and saves, and how far off replays were."""
    best = result.best
    costs = best.costs
    lines = [
        f"at the best: TTFT {costs.ttft_p50_s:.2f} s (p50), {costs.ttft_p90_s:.2f} s (p90), {costs.ttft_p99_s:.2f} s "
        f"(p99); {costs.prefill_hours_saved:.2f} hours of prefill saved, "
        f"{costs.prefill_share:.0%} of the time computing",
        f"moved: {bytes_text(costs.loaded_bytes)} to the devices, {bytes_text(costs.fetched_bytes)} out of storage, "
        f"{bytes_text(costs.written_bytes)} into it",
    ]
    if best.sizes.storage:
        life = costs.drive_life_years
        worn = "never worn" if life is None else f"worn after {life:,.1f} years"
        lines.append(
            f"storage is written {bytes_text(int(costs.written_per_day))} a day at the rate of the trace: {worn}"
        )
    if costs.requests_price_per_hour:
        lines.append(f"requests of storage cost {costs.requests_price_per_hour:.3g} an hour")
    if len(result.model.sized.layout.components) > 1:
        lines.append("windows are followed for a cache that never evicts; --check N says how far off that is")
    if result.checked:
        worst = max(abs(each.planned - each.replayed) for each in result.checked)
        lines.append(
            f"{len(result.checked)} combinations replayed: the plan is off by {worst * 100:.2f} points at most"
        )
    return [*lines, *result.model.sized.left_out]


def _marks(result: PlanResult, tier: str) -> list[str]:
    """Return for each point of a curve whether it is the best, or where the curve flattens most; empty for others."""
    knee = result.knees()[tier]
    return [
        ", ".join(
            [*(["best"] if point is result.best else []), *(["knee"] if point.sizes.by_tier()[tier] == knee else [])]
        )
        for point in result.curve(tier)
    ]


def _curve_table(result: PlanResult, tier: str) -> TableSection:
    """Return a row for each combination that differs from the best in one tier."""
    rows = [
        (
            short_size(point.sizes.by_tier()[tier]),
            *(f"{ratio:.2%}" for ratio in (*point.tier_ratios.values(), point.hit_ratio)),
            f"{point.costs.ttft_p50_s:,.2f}",
            f"{point.costs.ttft_p99_s:,.2f}",
            f"{point.costs.cost_per_million_tokens:.4f}",
            mark,
        )
        for point, mark in zip(result.curve(tier), _marks(result, tier), strict=True)
    ]
    return TableSection(f"By size of {NAMES[tier]}; TTFT in seconds", (tier, *CURVE_COLUMNS), rows)


def _size_table(result: PlanResult) -> TableSection:
    """Return the share of the tokens handed back by host memory and storage, with the device of the best."""
    best = result.best.sizes
    points = {(each.sizes.host, each.sizes.storage): each for each in result.points if each.sizes.device == best.device}
    hosts, stores = (sorted({pair[part] for pair in points}) for part in (0, 1))

    def cell(host: int, storage: int) -> str:
        point = points.get((host, storage))
        if point is None:
            return ""
        return f"{point.hit_ratio:.1%}" + ("*" if point is result.best else "")

    return TableSection(
        "Share of the tokens handed back, by host memory (down) and storage (across), with "
        f"{bytes_text(best.device)} of each device; * is the best",
        ("", *map(short_size, stores)),
        [(short_size(host), *(cell(host, storage) for storage in stores)) for host in hosts],
    )


def _settings(result: PlanResult) -> list[tuple[str, str]]:
    """Return what was planned for: names and values."""
    model, hardware = result.model, result.hardware
    kept = f"{model.retention.tail_tokens} tokens before the end" + (", branches" if model.retention.branches else "")
    page = f"{model.sized.layout.page_size} tokens, {bytes_text(model.sized.layout.page_bytes)}"
    speeds = ", ".join(
        f"{speed:,.0f} from {tokens:,} on" for tokens, speed in sorted(hardware.prefill_tokens_per_s.items())
    )
    return [
        ("trace", result.trace),
        ("model", model.name),
        ("devices", f"{model.devices}, each with all of a page" if model.is_replicated else f"{model.devices}"),
        ("engines", f"{model.engines}" + (", in turn, over one store" if model.engines > 1 else "")),
        ("page", page),
        ("resumable at", kept),
        ("hardware", hardware.name),
        ("prefill", f"{speeds} tokens/s of one device"),
        ("bus", f"{bytes_text(int(hardware.device_bytes_per_s))}/s to one device"),
        (
            "storage",
            f"{bytes_text(int(hardware.storage_read_bytes_per_s))}/s read, {model.storage_ratio:g} of a page's bytes",
        ),
    ]


def _curve(result: PlanResult, tier: str) -> BandChart:
    curve, marks = result.curve(tier), _marks(result, tier)
    sizes = [point.sizes.by_tier()[tier] for point in curve]
    circles = "; ".join(f"{mark} at {bytes_text(size)}" for size, mark in zip(sizes, marks, strict=True) if mark)
    return BandChart(
        title=f"Share of the tokens handed back, by size of {NAMES[tier]}; circles: {circles}",
        position_name=NAMES[tier],
        positions=[size / GIB for size in sizes],
        position_notes=marks,
        bands=series_of(TIERS, [point.tier_ratios for point in curve]),
        bound=Series("asked for before", [result.seen_ratio] * len(curve)),
        position_labels=[bytes_text(size) for size in sizes],
        marked=[number for number, mark in enumerate(marks) if mark],
    )

"""A replay for people: hits by tier, by component, what was missed and why, and the run as a chart."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from unified_cache.core.byte_sizes import bytes_text
from unified_cache.sizing.replay.result import ReplayResult
from unified_cache.sizing.replay.trace import BLOCK_TOKENS
from unified_cache.sizing.report.charts import BandChart, BarChart, Chart, Hue, Series, Unit, tier_series
from unified_cache.sizing.report.page import Page, TableSection

SMOOTH_WINDOWS = 3
"""Windows averaged into one point: single windows of a trace jump with the luck of a few long prompts."""

_Floats = npt.NDArray[np.float64]


def page_of(result: ReplayResult) -> Page:
    """Return what a replay says."""
    wrong = result.wrong_pages or result.leaked_slots
    first, *notes = verdict(result)
    tables = (tier_table(result), component_table(result), miss_table(result))
    run = [
        (name, bytes_text(int(value)) if name.endswith("_bytes") and value.isdigit() else value)
        for name, value in _flat({"trace": result.trace, **result.settings.as_json(), **result.environment})
    ]
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
        settings=run,
    )


def headline(result: ReplayResult) -> str:
    """Return one sentence: the share of tokens by tier, the most that could be had, and tiers without hits."""
    hit, seen = f"{result.token_hit_ratio:.2%}", f"{result.tokens.seen_ratio:.2%}"
    most = "all that had been asked for before" if hit == seen else f"{seen} had been asked for before"
    ratios = {tier: result.tokens.ratios()[tier] for tier in _present_tiers(result)}
    said = f"{hit} of the tokens asked for were handed back; {most}."
    if len(ratios) > 1:
        tiers = ", ".join(f"{tier} {ratio:.2%}" for tier, ratio in ratios.items())
        said = f"{hit} of the tokens asked for were handed back ({tiers}); {most}."
    idle = " and ".join(tier for tier, ratio in ratios.items() if not ratio)
    if idle:
        said = f"{said.removesuffix('.')}; {idle} brought nothing."
    return said


def tier_table(result: ReplayResult) -> TableSection:
    """Return a row for each tier there is, fastest first, and one for all together."""
    plan, moved = result.settings.plan, result.bytes_moved
    device_pages, host_pages = (pages[0] * plan.engines for pages in (plan.device_pages, plan.host_pages))
    cap_bytes = result.settings.storage_bytes
    capacity = "no cap" if cap_bytes is None else bytes_text(cap_bytes)
    tiers = {
        "device": (f"{device_pages:,}", moved["load"], moved["backup"]),
        "host": (f"{host_pages:,}", moved["backup"] + moved["prefetch"], moved["load"] + moved["store"]),
        "storage": (capacity, moved["store"], moved["prefetch"]),
    }
    hits, ratios = result.tokens.hits, result.tokens.ratios()
    rows: list[tuple[str, ...]] = []
    for tier in _present_tiers(result):
        pages, in_bytes, out_bytes = tiers[tier]
        tokens = hits.by_tier()[tier]
        share = tokens / hits.total if hits.total else 0.0
        cells = (f"{tokens:,}", f"{ratios[tier]:.2%}", f"{share:.1%}")
        rows.append((tier, pages, *cells, bytes_text(in_bytes), bytes_text(out_bytes)))
    total = (f"{hits.total:,}", f"{result.token_hit_ratio:.2%}")
    rows.append(("all", "", *total, f"{min(1, hits.total):.1%}", "", ""))
    columns = ("tier", "pages or cap", "hit tokens", "hit ratio", "share", "bytes in", "bytes out")
    return TableSection("By tier", columns, rows, has_total=True)


def component_table(result: ReplayResult) -> TableSection | None:
    """Return a row for each tier and component; None for a model of one component, where they say nothing new."""
    if len(result.components) == 1:
        return None
    rows: list[tuple[str, ...]] = []
    for tier in _present_tiers(result):
        for component in result.components:
            pages = component.capacity_pages.get(tier)
            sizes = ("", "") if pages is None else (f"{pages:,}", bytes_text(pages * component.page_bytes))
            hit_pages = component.hits.by_tier()[tier]
            share = hit_pages / component.hits.total if component.hits.total else 0.0
            cells = (f"{hit_pages:,}", bytes_text(component.hit_bytes()[tier]), f"{share:.1%}")
            rows.append((tier, component.name, *sizes, *cells))
    columns = ("tier", "component", "pages", "bytes", "hit pages", "hit bytes", "share")
    return TableSection("By component", columns, rows, text_columns=2)


def miss_table(result: ReplayResult) -> TableSection | None:
    """Return a row for each reason that tokens were missed for, and one for all; None where it was not asked for."""
    if not result.missed:
        return None
    total = sum(result.missed.values())
    counts = [(why.value, component, tokens) for (component, why), tokens in result.missed.items()]
    rows = [
        (text, component, f"{count:,}", f"{count / total:.1%}", f"{count / result.tokens.asked:.2%}")
        for text, component, count in [*counts, ("all", "", total)]
    ]
    columns = ("missed because", "component", "tokens", "of missed", "of asked")
    return TableSection("Missed tokens, by reason", columns, rows, text_columns=2, has_total=True)


def verdict(result: ReplayResult) -> list[str]:
    """Return a few lines: requests, speed, and whether every byte was right."""
    lines = [
        f"{result.requests:,} requests, {result.tokens.asked:,} tokens in {result.seconds:.1f} s: "
        f"{result.requests_per_s:,.0f} requests/s",
        f"{result.block_hit_ratio:.2%} of {_number(result.blocks)} blocks of {BLOCK_TOKENS} tokens; "
        f"a cache that never evicts: {result.seen_ratio:.2%}",
    ]
    lines += _reference_lines(result)
    if result.apart is not None:
        lines.append(
            f"{result.settings.plan.engines} engines over one store: hit ratio {result.token_hit_ratio:.2%}; "
            f"over private stores of the same total size: {result.apart.token_hit_ratio:.2%}"
        )
    if result.settings.plan.with_bytes:
        lines.append(
            f"{result.pages_verified:,} pages verified, {result.wrong_pages:,} wrong, "
            f"{result.leaked_slots:,} slots leaked"
        )
    else:
        lines.append(f"no payload moved: bytes are what would have; {result.leaked_slots:,} slots leaked")
    moved = [component.moved_pages for component in result.components]
    unstored = sum(pages["backup"] - pages["store"] for pages in moved)
    if result.settings.plan.storage is not None and unstored:
        lines.append(f"{unstored:,} pages were backed up and not stored: the store had no room for them")
    lines += _spare_lines(result)
    if result.flawed_pages:
        lines.append(f"{result.flawed_pages:,} pages came damaged from storage, and were refused")
    return lines


def _reference_lines(result: ReplayResult) -> list[str]:
    """Return lines on the hits of the references, and their memory; empty where there are none."""
    if result.references is None or not result.pages:
        return []
    each = " of each engine" if len(result.engines) > 1 else ""
    whole = " of full attention" if len(result.components) > 1 else ""
    shown = (("lru", "lru", "the largest tier"), ("clairvoyant", "at best", "all tiers"))
    return [
        f"{name} with {result.references[key].capacity_pages:,} pages{whole} ({tiers}{each}): "
        f"{result.references[key].hit_pages / result.pages:.2%} of the blocks"
        for key, name, tiers in shown
    ]


def _spare_lines(result: ReplayResult) -> list[str]:
    """Return a line for each memory tier that was never full: how much of it was used."""
    lines: list[str] = []
    for tier in _present_tiers(result):
        filled = [component.filled_pages.get(tier) for component in result.components]
        used = sum(
            (pages or 0) * component.page_bytes for pages, component in zip(filled, result.components, strict=True)
        )
        held = sum(component.capacity_pages.get(tier, 0) * component.page_bytes for component in result.components)
        if held and None not in filled:
            lines.append(f"{tier} was never full: {bytes_text(used)} of {bytes_text(held)} were used")
    return lines


def _present_tiers(result: ReplayResult) -> list[str]:
    """Return the tiers that the run had, fastest first."""
    plan = result.settings.plan
    return ["device", *(["host"] if plan.has_host else []), *(["storage"] if plan.storage is not None else [])]


def _number(count: float) -> str:
    return f"{count:,.1f}" if count % 1 else f"{count:,.0f}"


def _charts(result: ReplayResult) -> list[Chart]:
    tiers = _present_tiers(result)
    charts: list[Chart] = [_over_the_run(result, tiers)]
    if len(result.engines) > 1:
        ratios = [engine.tokens.ratios() for engine in result.engines]
        names = [f"engine {number}" for number in range(len(ratios))]
        series = tier_series(tiers, ratios)
        charts.append(BarChart("Share of the tokens handed back, by engine", Unit.RATIO, names, series))
    return charts


def _over_the_run(result: ReplayResult, tiers: Sequence[str]) -> BandChart:
    """Return the smoothed ratios over the run, to both ends: by tier, and of what had been asked for before."""
    series = result.series
    asked = [window.tokens.asked for window in series]
    times = [window.timestamp_ms for window in series]
    times = [times[0], *times, times[-1]] if times and times[-1] > 0 else []
    return BandChart(
        title="Share of the tokens handed back, over the run",
        unit=Unit.RATIO,
        position_name="request",
        positions=[0.0, *((window.start + window.end) / 2 for window in series), float(result.requests)],
        position_notes=[f"minute {time_ms / 60_000:,.1f} of the trace" for time_ms in times],
        bands=[
            Series(tier, Hue(tier), _ratios([window.tokens.hits.by_tier()[tier] for window in series], asked))
            for tier in tiers
        ],
        bound=Series("asked for before", Hue.PLAIN, _ratios([window.tokens.seen for window in series], asked)),
    )


def _ratios(counts: Sequence[int], asked: Sequence[int]) -> list[float]:
    """Return smoothed shares, one more at both ends; a single point becomes a plateau."""
    whole = _smooth(asked)
    whole[whole == 0] = 1
    smooth: list[float] = np.pad(_smooth(counts) / whole, 1, mode="edge").tolist()
    return smooth


def _smooth(counts: Sequence[int]) -> _Floats:
    """Sum neighbouring windows; at the ends, those there are."""
    kernel = np.ones(min(SMOOTH_WINDOWS, len(counts)))
    smooth: _Floats = np.convolve(np.array(counts, np.float64), kernel, mode="same")
    return smooth


def _flat(values: Mapping[str, object], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested values as text, their names joined by dots."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat({str(key): each for key, each in value.items()}, f"{before}{name}.")
        else:
            yield f"{before}{name}", "none" if value is None else str(value)

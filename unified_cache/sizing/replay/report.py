"""A replay for people: hits by tier, by component, what was missed and why, and the run as a chart."""

from collections.abc import Iterator, Mapping
from itertools import accumulate

from unified_cache.core.sizes import bytes_text
from unified_cache.sizing.replay.result import ReplayResult
from unified_cache.sizing.replay.trace import BLOCK_TOKENS
from unified_cache.sizing.report.charts import BandChart, Series, series_of
from unified_cache.sizing.report.page import Page, TableSection


def page_of(result: ReplayResult) -> Page:
    """Return what a replay says."""
    wrong = result.wrong_pages or result.leaked_slots
    first, *notes = verdict(result)
    tables = (tier_table(result), component_table(result), miss_table(result))
    run = [
        (name, bytes_text(int(value)) if name.endswith("_bytes") and value.isdigit() else value)
        for name, value in _flat({"trace": result.trace, **result.plan.as_json(), **result.environment})
    ]
    return Page(
        title=f"Replay of {result.trace}",
        headline=headline(result),
        lead=f"{first}.",
        alarm=f"{result.wrong_pages:,} pages held wrong bytes, {result.leaked_slots:,} slots leaked: this is a bug."
        if wrong
        else "",
        charts=[_over_the_run(result)] if len(result.series) > 1 else [],
        tables=[table for table in tables if table is not None],
        notes=notes,
        settings=run,
    )


def headline(result: ReplayResult) -> str:
    """Return one sentence: the share of tokens by tier, the most that could be had, and tiers without hits."""
    served = result.served
    hit, seen = f"{served.token_hit_ratio:.2%}", f"{served.seen_token_ratio:.2%}"
    most = "all that had been asked for before" if hit == seen else f"{seen} had been asked for before"
    ratios = {tier: served.token_ratios()[tier] for tier in _present_tiers(result)}
    by_tier = ", ".join(f"{tier} {ratio:.2%}" for tier, ratio in ratios.items())
    tiers = f" ({by_tier})" if len(ratios) > 1 else ""
    said = f"{hit} of the tokens asked for were handed back{tiers}; {most}."
    idle = " and ".join(tier for tier, ratio in ratios.items() if not ratio)
    if idle:
        said = f"{said.removesuffix('.')}; {idle} brought nothing."
    return said


def tier_table(result: ReplayResult) -> TableSection:
    """Return a row for each tier there is, fastest first, and one for all together."""
    plan, moved, served = result.plan, result.bytes_moved, result.served
    device_pages, host_pages = (pages[0] * plan.engines for pages in (plan.config.device_pages, plan.config.host_pages))
    cap_bytes = plan.true_storage_bytes
    capacity = "no cap" if cap_bytes is None else bytes_text(cap_bytes)
    tiers = {
        "device": (f"{device_pages:,}", moved["load"], moved["backup"]),
        "host": (f"{host_pages:,}", moved["backup"] + moved["prefetch"], moved["load"] + moved["store"]),
        "storage": (capacity, moved["store"], moved["prefetch"]),
    }
    hits, ratios = served.hit_tokens, served.token_ratios()
    rows: list[tuple[str, ...]] = []
    for tier in _present_tiers(result):
        pages, in_bytes, out_bytes = tiers[tier]
        tokens = hits.by_tier()[tier]
        share = tokens / hits.total if hits.total else 0.0
        cells = (f"{tokens:,}", f"{ratios[tier]:.2%}", f"{share:.1%}")
        rows.append((tier, pages, *cells, bytes_text(in_bytes), bytes_text(out_bytes)))
    total = (f"{hits.total:,}", f"{served.token_hit_ratio:.2%}")
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
        (text, component, f"{count:,}", f"{count / total:.1%}", f"{count / result.served.tokens:.2%}")
        for text, component, count in [*counts, ("all", "", total)]
    ]
    columns = ("missed because", "component", "tokens", "of missed", "of asked")
    return TableSection("Missed tokens, by reason", columns, rows, text_columns=2, has_total=True)


def verdict(result: ReplayResult) -> list[str]:
    """Return a few lines: requests, speed, and whether every byte was right."""
    served = result.served
    lines = [
        f"{served.requests:,} requests, {served.tokens:,} tokens in {result.seconds:.1f} s: "
        f"{result.requests_per_s:,.0f} requests/s",
        f"{served.block_hit_ratio:.2%} of {result.blocks:,.{1 if result.blocks % 1 else 0}f} blocks "
        f"of {BLOCK_TOKENS} tokens; a cache that never evicts: {served.seen_block_ratio:.2%}",
    ]
    if result.plan.with_bytes:
        lines.append(
            f"{result.pages_verified:,} pages verified, {result.wrong_pages:,} wrong, "
            f"{result.leaked_slots:,} slots leaked"
        )
    else:
        lines.append(f"no payload moved: bytes are what would have; {result.leaked_slots:,} slots leaked")
    moved = [component.moved_pages for component in result.components]
    unstored = sum(pages["backup"] - pages["store"] for pages in moved)
    if result.plan.storage is not None and unstored:
        lines.append(f"{unstored:,} pages were backed up and not stored: the store had no room for them")
    lines += _spare_lines(result)
    if result.flawed_pages:
        lines.append(f"{result.flawed_pages:,} pages came damaged from storage, and were refused")
    return lines


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
    plan = result.plan
    return ["device", *(["host"] if plan.has_host else []), *(["storage"] if plan.storage is not None else [])]


def _over_the_run(result: ReplayResult) -> BandChart:
    """Return the ratios over the run: by tier, and of what had been asked for before."""
    series = result.series
    ends = list(accumulate(window.requests for window in series))
    return BandChart(
        title="Share of the tokens handed back, over the run",
        position_name="request",
        positions=[end - window.requests / 2 for end, window in zip(ends, series, strict=True)],
        position_notes=[f"minute {window.timestamp_ms / 60_000:,.1f} of the trace" for window in series],
        bands=series_of(_present_tiers(result), [window.token_ratios() for window in series]),
        bound=Series("asked for before", [window.seen_token_ratio for window in series]),
    )


def _flat(values: Mapping[str, object], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested values as text, their names joined by dots."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat({str(key): each for key, each in value.items()}, f"{before}{name}.")
        else:
            yield f"{before}{name}", "none" if value is None else str(value)

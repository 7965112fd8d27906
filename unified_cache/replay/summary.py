"""The result of a replay in words and tables, for a terminal and for the page of a report."""

from collections.abc import Iterable

from unified_cache.byte_sizes import bytes_text
from unified_cache.replay.machine import PLAIN_CORE
from unified_cache.replay.result import ReplayResult
from unified_cache.replay.trace import BLOCK_TOKENS
from unified_cache.report.tables import TableSection

__all__ = [
    "component_table",
    "headline",
    "miss_table",
    "prefix_table",
    "present_tiers",
    "reference_lines",
    "regret_table",
    "setting_rows",
    "spare_rows",
    "tier_table",
    "verdict",
]


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
    for tier in present_tiers(result):
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
    for tier in present_tiers(result):
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
    """Return a row for each reason that tokens were missed for, and one for all; None where nobody asked for that."""
    missed = result.missed
    if missed is None or not missed.total:
        return None
    counts = [(reason.text, reason.component, tokens) for reason, tokens in missed.by_reason.items()]
    counts.append(("all", "", missed.total))
    rows = [
        (text, component, f"{count:,}", f"{count / missed.total:.1%}", f"{count / result.tokens.asked:.2%}")
        for text, component, count in counts
    ]
    columns = ("missed because", "component", "tokens", "of missed", "of asked")
    return TableSection("Missed tokens, by reason", columns, rows, text_columns=2, has_total=True)


def prefix_table(result: ReplayResult) -> TableSection | None:
    """Return a row for each prefix whose loss cost most tokens; None where there is none, or nobody asked for that."""
    if result.missed is None or not result.missed.prefixes:
        return None
    rows = [
        (each.digest, each.reason.text, each.reason.component, f"{each.pages:,}", f"{each.times:,}", f"{each.tokens:,}")
        for each in result.missed.prefixes
    ]
    columns = ("prefix", "missed because", "component", "pages", "times", "tokens")
    return TableSection("Prefixes whose loss cost most tokens", columns, rows, text_columns=3)


def regret_table(result: ReplayResult) -> TableSection | None:
    """Return a row for each reason for which tokens were missed that a reference would have had, and what is left.

    What was handed back and a reference would not have had is taken off below; None where there are no references.
    """
    references = result.references
    if references is None or not result.tokens.asked:
        return None
    both = (references.lru, references.clairvoyant)
    reasons = sorted({*both[0].regret, *both[1].regret}, key=lambda each: -both[1].regret.get(each, 0))

    def cells(counts: Iterable[int]) -> list[str]:
        return [text for count in counts for text in (f"{count:,}", f"{count / result.tokens.asked:.2%}")]

    rows = [(each.text, each.component, *cells(one.regret.get(each, 0) for one in both)) for each in reasons]
    rows.append(("handed back, and not by these", "", *cells(-one.gained_tokens for one in both)))
    rows.append(("all", "", *cells(one.hit_tokens - result.tokens.hits.total for one in both)))
    columns = ("missed because", "component", "tokens lru had", "of asked", "tokens best had", "of asked")
    title = "Missed tokens that lru and the best policy would have had"
    return TableSection(title, columns, rows, text_columns=2, has_total=True)


def reference_lines(result: ReplayResult) -> list[str]:
    """Say what the references would have handed back, and with how much memory; empty where there are none."""
    references = result.references
    if references is None or not result.pages:
        return []
    each = " of each engine" if len(result.engines) > 1 else ""
    whole = " of full attention" if len(result.components) > 1 else ""
    shown = (("lru", references.lru, "the largest tier"), ("at best", references.clairvoyant, "all tiers"))
    return [
        f"{name} with {reference.capacity_pages:,} pages{whole} ({tiers}{each}): "
        f"{reference.hit_pages / result.pages:.2%} of the blocks"
        for name, reference, tiers in shown
    ]


def present_tiers(result: ReplayResult) -> list[str]:
    """Return the tiers that the run had, fastest first."""
    plan = result.settings.plan
    return ["device", *(["host"] if plan.has_host else []), *(["storage"] if plan.storage is not None else [])]


def _number(count: float) -> str:
    return f"{count:,.1f}" if count % 1 else f"{count:,.0f}"


def headline(result: ReplayResult) -> str:
    """Say in one sentence what share of the tokens came from where, of how much at most, and what brought nothing."""
    hit, seen = f"{result.token_hit_ratio:.2%}", f"{result.tokens.seen_ratio:.2%}"
    most = "all that had been asked for before" if hit == seen else f"{seen} had been asked for before"
    ratios = {tier: result.tokens.ratios()[tier] for tier in present_tiers(result)}
    said = f"{hit} of the tokens asked for were handed back; {most}."
    if len(ratios) > 1:
        tiers = ", ".join(f"{tier} {ratio:.2%}" for tier, ratio in ratios.items())
        said = f"{hit} of the tokens asked for were handed back ({tiers}); {most}."
    idle = " and ".join(tier for tier, ratio in ratios.items() if not ratio)
    if idle:
        said = f"{said.removesuffix('.')}; {idle} brought nothing."
    return said


def spare_rows(result: ReplayResult) -> list[str]:
    """Say of each memory tier that was never full how much of it was used."""
    lines: list[str] = []
    for tier in present_tiers(result):
        filled = [component.filled_pages.get(tier) for component in result.components]
        used = sum(
            (pages or 0) * component.page_bytes for pages, component in zip(filled, result.components, strict=True)
        )
        held = sum(component.capacity_pages.get(tier, 0) * component.page_bytes for component in result.components)
        if held and None not in filled:
            lines.append(f"{tier} was never full: {bytes_text(used)} of {bytes_text(held)} were used")
    return lines


def verdict(result: ReplayResult) -> list[str]:
    """Say in a few lines how much was asked for, how fast it went, and whether every byte was right."""
    lines = [
        f"{result.requests:,} requests, {result.tokens.asked:,} tokens in {result.seconds:.1f} s: "
        f"{result.requests_per_s:,.0f} requests/s",
        f"{result.block_hit_ratio:.2%} of {_number(result.blocks)} blocks of {BLOCK_TOKENS} tokens; "
        f"a cache that never evicts: {result.seen_ratio:.2%}",
    ]
    lines += reference_lines(result)
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
    lines += spare_rows(result)
    if result.flawed_pages:
        lines.append(f"{result.flawed_pages:,} pages came damaged from storage, and were refused")
    if result.environment.get("core") == PLAIN_CORE:
        lines.append("the core ran in plain Python; a wheel built with a C compiler holds it compiled")
    return lines


def setting_rows(result: ReplayResult) -> list[tuple[str, str]]:
    """Return what was run, on what: names and values."""
    environment = [(name.replace("_", "-"), value) for name, value in result.environment.items()]
    return [("trace", result.trace), *result.settings.rows(), *environment]

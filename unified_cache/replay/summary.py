"""The result of a replay in words and rows: what the table on a terminal and the page of a report both show."""

from unified_cache.replay.result import ReplayResult
from unified_cache.replay.settings import bytes_text

__all__ = ["COLUMNS", "setting_rows", "tier_rows", "verdict"]

COLUMNS = ("tier", "pages", "hit blocks", "hit ratio", "share", "bytes in", "bytes out")
"""Of ``tier_rows``; the first is text, the others are numbers."""


def tier_rows(result: ReplayResult) -> list[tuple[str, ...]]:
    """Return a row for each tier there is, fastest first, and one for all together."""
    settings, moved = result.settings, result.bytes_moved
    capacity = "none" if settings.storage is None else "no cap"
    if settings.storage_bytes is not None:
        capacity = bytes_text(settings.storage_bytes)
    tiers = {
        "device": (f"{settings.device_pages:,}", moved["load"], moved["backup"]),
        "host": (f"{settings.host_pages:,}", moved["backup"] + moved["prefetch"], moved["load"] + moved["store"]),
        "storage": (capacity, moved["store"], moved["prefetch"]),
    }
    present = {"device": True, "host": settings.host_pages > 0, "storage": settings.storage is not None}
    hit_blocks = result.hit_blocks()
    rows: list[tuple[str, ...]] = []
    for tier, (pages, in_bytes, out_bytes) in tiers.items():
        if present[tier]:
            share = hit_blocks[tier] / sum(hit_blocks.values()) if result.hits.total else 0.0
            ratio = hit_blocks[tier] / result.blocks if result.blocks else 0.0
            cells = (f"{hit_blocks[tier]:,.10g}", f"{ratio:.4f}", f"{share:.1%}")
            rows.append((tier, pages, *cells, bytes_text(in_bytes), bytes_text(out_bytes)))
    total = (f"{sum(hit_blocks.values()):,.10g}", f"{result.block_hit_ratio:.4f}")
    rows.append(("all", "", *total, f"{min(1, result.hits.total):.1%}", "", ""))
    return rows


def verdict(result: ReplayResult) -> list[str]:
    """Say in a few lines how much was asked for, how fast it went, and whether every byte was right."""
    lines = [
        f"{result.requests:,} requests, {result.blocks:,} blocks in {result.seconds:.1f} s: "
        f"{result.requests_per_s:,.0f} requests/s",
        f"token hit ratio {result.token_hit_ratio:.4f}; a cache that never evicts, empty at first: "
        f"{result.seen_ratio:.4f} of blocks",
    ]
    if result.settings.with_bytes:
        lines.append(
            f"{result.pages_verified:,} pages verified, {result.wrong_pages:,} wrong, "
            f"{result.leaked_slots:,} slots leaked"
        )
    else:
        lines.append(f"no payload moved: bytes are what would have; {result.leaked_slots:,} slots leaked")
    if result.flawed_pages:
        lines.append(f"{result.flawed_pages:,} pages came damaged from storage, and were refused")
    return lines


def setting_rows(result: ReplayResult) -> list[tuple[str, str]]:
    """Return what was run, on what: names and values."""
    settings = result.settings
    rows = [
        ("trace", result.trace),
        ("page", f"{settings.page_size} tokens, {bytes_text(settings.page_bytes)}"),
        ("device", f"{settings.device_pages:,} pages"),
        ("host", f"{settings.host_pages:,} pages" if settings.host_pages else "none"),
        ("storage", settings.storage or "none"),
    ]
    if settings.storage_bytes is not None:
        rows.append(("storage cap", bytes_text(settings.storage_bytes)))
    rows.append(("payload", "moved and verified" if settings.with_bytes else "not moved"))
    return rows + [(name.replace("_", "-"), value) for name, value in result.environment.items()]

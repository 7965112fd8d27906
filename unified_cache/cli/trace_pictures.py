"""Pictures of a trace for a terminal: how soon blocks are used again, how often, and how long sessions are."""

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from unified_cache.cli.text import table
from unified_cache.replay.trace_figures import TraceFigures, power_text

__all__ = ["trace_pictures"]

BAR_COLUMNS = 32
"""Columns of the longest bar."""


def trace_pictures(figures: TraceFigures) -> Iterator[Table]:
    """Yield a table with bars for each histogram of a trace that has something in it."""
    if figures.reuse_distances:
        lru = [f"{share:.1%}" for share in figures.lru_ratios()]
        yield _picture("reuse distance, blocks", "uses again", figures.reuse_distances, ("an LRU cache hits", lru))
    if figures.popularity:
        yield _picture("popularity, uses of a block", "uses", figures.popularity)
    if figures.session_requests:
        yield _picture("requests of a session", "sessions", figures.session_requests)


def _picture(title: str, counted: str, counts: Sequence[int], more: tuple[str, Sequence[str]] | None = None) -> Table:
    """Return a row for each power of two from the first to the last that something was counted of."""
    shown = table(title, counted, "share", *([] if more is None else [more[0]]), "")
    shown.columns[-1].justify = "left"
    first = next(power for power, count in enumerate(counts) if count)
    total, largest = sum(counts), max(counts)
    for power in range(first, len(counts)):
        bar = Text("█" * round(BAR_COLUMNS * counts[power] / largest) or ("▏" if counts[power] else ""), style="blue")
        cells = [power_text(power), f"{counts[power]:,}", f"{counts[power] / total:.1%}"]
        shown.add_row(*cells, *([] if more is None else [more[1][power]]), bar)
    return shown

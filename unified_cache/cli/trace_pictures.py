"""Pictures of a trace for a terminal: how soon blocks are used again, how often, and how long sessions are."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rich.text import Text

from unified_cache.cli.text import LineConsole
from unified_cache.replay.trace_figures import TraceFigures, power_text

__all__ = ["print_pictures"]

BAR_COLUMNS = 32
"""Columns of the longest bar."""


def print_pictures(console: LineConsole, figures: TraceFigures) -> None:
    """Print a table with bars for each histogram of a trace that has something in it."""
    lru = {"an LRU cache hits": [f"{share:.1%}" for share in figures.lru_ratios()]}
    _print_bars(console, "reuse distance, blocks", "uses again", figures.reuse_distances, lru)
    _print_bars(console, "popularity, uses of a block", "uses", figures.popularity)
    _print_bars(console, "requests of a session", "sessions", figures.session_requests)


def _print_bars(
    console: LineConsole,
    title: str,
    counted: str,
    counts: Sequence[int],
    more: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Print a row for each power of two from the first to the last that something was counted of; none for none."""
    total, largest = sum(counts), max(counts, default=0)
    first = next((power for power, count in enumerate(counts) if count), len(counts))
    rows: list[tuple[str | Text, ...]] = []
    for power in range(first, len(counts)):
        bar = "█" * round(BAR_COLUMNS * counts[power] / largest) or ("▏" if counts[power] else "")
        cells = (power_text(power), f"{counts[power]:,}", f"{counts[power] / total:.1%}")
        rows.append((*cells, *(column[power] for column in more.values()), Text(bar, style="blue", justify="left")))
    if rows:
        console.print_table((title, counted, "share", *more, ""), rows)

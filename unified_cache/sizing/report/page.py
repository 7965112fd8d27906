"""A result for people: a headline that answers, charts to explore, and the figures behind them.

A terminal shows all but the charts; ``html`` writes all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from unified_cache.sizing.report.charts import Chart


@dataclass(frozen=True, slots=True)
class TableSection:
    """A table with a heading; its first columns are text, the others numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1
    has_total: bool = False
    """Whether the last row sums up the others."""


@dataclass(frozen=True, slots=True)
class Page:
    """Parts of a page, from top to bottom."""

    title: str
    """Name of the page in a browser, above the headline."""
    headline: str
    """The answer, in one sentence."""
    lead: str
    """What one should know to judge it, in a sentence or two."""
    alarm: str
    """What is wrong and must not be overlooked; empty if nothing is."""
    charts: Sequence[Chart]
    tables: Sequence[TableSection]
    notes: Sequence[str]
    settings: Sequence[tuple[str, str]]
    """What was run, on what: names and values."""

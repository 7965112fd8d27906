"""The result of a replay as tables on a terminal."""

from typing import TextIO

from rich.table import Table

from unified_cache.cli.text import console_on, printable, table
from unified_cache.replay.result import ReplayResult
from unified_cache.replay.summary import (
    component_table,
    headline,
    miss_table,
    prefix_table,
    regret_table,
    tier_table,
    verdict,
)
from unified_cache.report.tables import TableSection

__all__ = ["print_result"]

WIDTH_MIN = 80
"""Columns assumed where the output is no terminal; the table fits."""


def print_result(stream: TextIO, result: ReplayResult) -> None:
    """Print what it found in a sentence, the table by tier, what was missed and why, then the verdict."""
    console = console_on(stream, WIDTH_MIN)
    console.print(printable(headline(result)), style="bold")
    console.print(_shown(tier_table(result), is_total_apart=True))
    for table_of in (component_table, miss_table, prefix_table, regret_table):
        section = table_of(result)
        if section is not None:
            console.print(_shown(section))
    for line in verdict(result):
        console.print_line(line)


def _shown(section: TableSection, *, is_total_apart: bool = False) -> Table:
    """Return a table as a terminal shows it, its last row below a line or like any other."""
    shown = table(*section.columns, left=section.text_columns)
    for number, row in enumerate(section.rows, 1):
        is_apart = is_total_apart and number == len(section.rows)
        if is_apart:
            shown.add_section()
        shown.add_row(*row, style="bold" if is_apart else None)
    return shown

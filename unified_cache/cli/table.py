"""The result of a replay, as a table on a terminal."""

from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from unified_cache.replay.result import ReplayResult
from unified_cache.replay.summary import COLUMNS, COMPONENT_COLUMNS, component_rows, tier_rows, verdict

__all__ = ["print_result"]

WIDTH_MIN = 80
"""Columns assumed where the output is no terminal; the table fits."""


def print_result(stream: TextIO, result: ReplayResult) -> None:
    """Print the table by tier, then the verdict."""
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else WIDTH_MIN)
    rows = tier_rows(result)
    table = _table(COLUMNS, texts=1)
    for row in rows[:-1]:
        table.add_row(*row)
    table.add_section()
    table.add_row(*rows[-1], style="bold")
    console.print(table)
    by_component = component_rows(result)
    if by_component:
        table = _table(COMPONENT_COLUMNS, texts=2)
        for row in by_component:
            table.add_row(*row)
        console.print(table)
    for line in verdict(result):
        console.print(line, soft_wrap=True)


def _table(columns: Sequence[str], texts: int) -> Table:
    """Make a table whose first ``texts`` columns are text and the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < texts else "right")
    return table

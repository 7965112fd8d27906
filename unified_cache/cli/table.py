"""The result of a replay, as a table on a terminal."""

from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from unified_cache.replay.result import ReplayResult
from unified_cache.replay.summary import COLUMNS, tier_rows, verdict

__all__ = ["print_result"]

WIDTH_MIN = 80
"""Columns assumed where the output is no terminal; the table fits."""


def print_result(stream: TextIO, result: ReplayResult) -> None:
    """Print the table by tier, then the verdict."""
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else WIDTH_MIN)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if number else "left")
    rows = tier_rows(result)
    for row in rows[:-1]:
        table.add_row(*row)
    table.add_section()
    table.add_row(*rows[-1], style="bold")
    console.print(table)
    for line in verdict(result):
        console.print(line, soft_wrap=True)

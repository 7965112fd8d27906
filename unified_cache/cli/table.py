"""The result of a replay as a table on a terminal."""

from typing import TextIO

from unified_cache.cli.text import console_on, printable, table
from unified_cache.replay.result import ReplayResult
from unified_cache.replay.summary import (
    COLUMNS,
    COMPONENT_COLUMNS,
    MISS_COLUMNS,
    PREFIX_COLUMNS,
    REGRET_COLUMNS,
    component_rows,
    headline,
    miss_rows,
    prefix_rows,
    regret_rows,
    tier_rows,
    verdict,
)

__all__ = ["print_result"]

WIDTH_MIN = 80
"""Columns assumed where the output is no terminal; the table fits."""


def print_result(stream: TextIO, result: ReplayResult) -> None:
    """Print what it found in a sentence, the table by tier, what was missed and why, then the verdict."""
    console = console_on(stream, WIDTH_MIN)
    console.print(printable(headline(result)), style="bold")
    rows = tier_rows(result)
    tiers = table(*COLUMNS)
    for row in rows[:-1]:
        tiers.add_row(*row)
    tiers.add_section()
    tiers.add_row(*rows[-1], style="bold")
    console.print(tiers)
    by_component = component_rows(result)
    if by_component:
        components = table(*COMPONENT_COLUMNS, left=2)
        for row in by_component:
            components.add_row(*row)
        console.print(components)
    for rows, columns, text_columns in (
        (miss_rows(result), MISS_COLUMNS, 2),
        (prefix_rows(result), PREFIX_COLUMNS, 3),
        (regret_rows(result), REGRET_COLUMNS, 2),
    ):
        if rows:
            misses = table(*columns, left=text_columns)
            for row in rows:
                misses.add_row(*row)
            console.print(misses)
    for line in verdict(result):
        console.print_line(line)

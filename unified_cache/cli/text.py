"""Sizes, tables and consoles, alike in every command."""

from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["console_on", "example", "size_text", "table"]

WIDTH_MIN = 128
"""Columns assumed where the output is no terminal; the tables fit."""

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(count: int) -> str:
    """Say bytes in the largest unit that they fill: 512 B, 1.50 KiB."""
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_BINARY_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.2f} {_BINARY_UNITS[unit]}" if unit else f"{count} B"


def example(*command_lines: str) -> str:
    """Return the end of a command's help: lines that show how to call it."""
    return "\n\n".join(("**Examples**", *(f"    {line}" for line in command_lines)))


def table(*columns: str, left: int = 1) -> Table:
    """Make a table of which the first ``left`` columns are words and the rest numbers."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        made.add_column(name, justify="left" if number < left else "right")
    return made


def console_on(stream: TextIO) -> Console:
    """Make a console that prints to a stream and reads no markup in names and reasons."""
    return Console(
        file=stream, highlight=False, markup=False, emoji=False, width=None if stream.isatty() else WIDTH_MIN
    )

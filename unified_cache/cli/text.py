"""Sizes, tables and consoles, alike in every command."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

WIDTH_MIN = 128
"""Columns assumed where the output is no terminal; the tables fit."""

_IN_QUANTITY = re.compile(r"(?<=\d) (?=[KMGT]?i?B\b|s\b)|(?<=±) ")
_GLUE = "\0"
"""Stands for a space at which a line must not end; ``printable`` leaves none in a text."""

CODE_COLUMNS = 70
"""Columns of a line of code in help, without the backslash, so that it is one line on a terminal of 80."""


class LineConsole(Console):
    """Console for text that others may have written: a line is one line, and none of it commands the terminal."""

    def on_broken_pipe(self) -> None:
        """Raise for a closed pipe, as the caller expects; rich would exit with status 1."""
        self.quiet = True
        raise BrokenPipeError

    def print_line(self, text: str, style: str = "") -> None:
        """Print one line, however long; see ``printable``."""
        self.print(printable(text), style=style, soft_wrap=True)

    def print_sentences(self, text: str, style: str = "") -> None:
        """Print text for people, wrapped between words but not between a number and its unit."""
        glued = _IN_QUANTITY.sub(_GLUE, printable(text))
        wrapped = textwrap.fill(glued, self.width, break_long_words=False, break_on_hyphens=False)
        self.print(wrapped.replace(_GLUE, " "), style=style, soft_wrap=True)

    def print_table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[RenderableType]],
        *,
        left: int = 1,
        has_total: bool = False,
    ) -> None:
        """Print a table of which the first ``left`` columns are words and the rest numbers.

        ``has_total`` has the last row, which sums up the others, stand apart from them. Where a table is too wide, its
        headings are wrapped before its numbers.
        """
        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        cells = [[printable(each) if isinstance(each, str) else each for each in row] for row in rows]
        for number, name in enumerate(columns):
            is_text = number < left
            widths = [0 if is_text else len(each) for row in cells if isinstance(each := row[number], str)]
            shown.add_column(name, justify="left" if is_text else "right", min_width=max(widths, default=0))
        for row in cells[:-1] if has_total else cells:
            shown.add_row(*row)
        if has_total:
            shown.add_section()
            shown.add_row(*cells[-1], style="bold")
        self.print(shown)


def printable(text: str) -> str:
    """Write escapes in the place of characters that a terminal would obey: controls, line ends, changes of direction.

    Names of models come from manifests, and messages from servers: their authors must not control a terminal.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def example(*command_lines: str) -> str:
    """Return the end of a command's help: lines that show how to call it, and can be copied from any terminal."""
    return "\n\n".join(("**Examples**", *map(_code, command_lines)))


def copyable(epilog: str) -> str:
    """Return the end of a command's help with every line of code cut so that no terminal wraps it."""
    lines = (_code(line.strip()) if line.startswith("    ") else line for line in epilog.splitlines())
    # Typer takes away what all lines but the first are indented by, and with it what makes code of them.
    return "\n".join(["", *lines])


def _code(line: str) -> str:
    """Return a command line as code, cut before options by backslashes where it is long."""
    first, *options = re.split(" (?=-|&&)", line)
    rows = [first]
    for option in options:
        if len(rows[-1]) + 1 + len(option) > CODE_COLUMNS:
            rows.append(f"  {option}")
        else:
            rows[-1] += f" {option}"
    return "\n".join(f"    {row}" for row in " \\\n".join(rows).split("\n"))


def console_on(stream: TextIO, width_min: int = WIDTH_MIN) -> LineConsole:
    """Make a console that prints to a stream and reads no markup in names and reasons.

    ``width_min`` is how many columns are assumed where the stream is no terminal.
    """
    width = None if stream.isatty() else width_min
    return LineConsole(file=stream, highlight=False, markup=False, emoji=False, width=width)

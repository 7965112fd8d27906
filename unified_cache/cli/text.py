"""Sizes, tables and consoles, alike in every command."""

import re
from typing import TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.style import Style
from rich.table import Table

__all__ = ["LineConsole", "console_on", "copyable", "example", "printable", "table"]

WIDTH_MIN = 128
"""Columns assumed where the output is no terminal; the tables fit."""

CODE_COLUMNS = 70
"""Columns of a line of code in help, without the backslash, so that it is one line on a terminal of 80."""


class LineConsole(Console):
    """Console for text that others may have written: a line is one line, and none of it commands the terminal."""

    def on_broken_pipe(self) -> None:
        """Leave it to whoever runs the command that nobody reads any more; rich would exit with status 1.

        Raises:
            BrokenPipeError: always.
        """
        self.quiet = True
        raise BrokenPipeError

    def print_line(self, text: str, style: str = "") -> None:
        """Print one line, however long; see ``printable``."""
        self.print(printable(text), style=style, soft_wrap=True)


class _PrintableTable(Table):
    """Table whose cells are ``printable``."""

    def add_row(
        self, *renderables: RenderableType | None, style: str | Style | None = None, end_section: bool = False
    ) -> None:
        """Add a row of cells."""
        cells = (printable(each) if isinstance(each, str) else each for each in renderables)
        super().add_row(*cells, style=style, end_section=end_section)


def printable(text: str) -> str:
    """Write escapes in the place of characters that a terminal would obey: controls, line ends, changes of direction.

    Names of models come from manifests, and messages from servers: whoever wrote them shall not write on a terminal.
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


def table(*columns: str, left: int = 1) -> Table:
    """Make a table of which the first ``left`` columns are words and the rest numbers."""
    made = _PrintableTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        made.add_column(name, justify="left" if number < left else "right")
    return made


def console_on(stream: TextIO, width_min: int = WIDTH_MIN) -> LineConsole:
    """Make a console that prints to a stream and reads no markup in names and reasons.

    ``width_min`` is how many columns are assumed where the stream is no terminal.
    """
    width = None if stream.isatty() else width_min
    return LineConsole(file=stream, highlight=False, markup=False, emoji=False, width=width)

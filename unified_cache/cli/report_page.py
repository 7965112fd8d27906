"""Results as commands show them: on a terminal, and with ``--report`` as a page."""

import sys
from collections.abc import Callable
from pathlib import Path

from unified_cache.cli.text import console_on
from unified_cache.core.extras import import_with_extra
from unified_cache.core.files import check_writable, expanded
from unified_cache.sizing.report.page import Page

WIDTH_MIN = 80
"""Columns assumed where the output is no terminal; the tables fit."""


def print_page(page: Page, width_min: int = WIDTH_MIN) -> None:
    """Print all of a page but its charts and what was run; ``width_min`` is for an output that is no terminal."""
    console = console_on(sys.stdout, width_min)
    console.print_sentences(page.headline, style="bold")
    for table in page.tables:
        console.print()
        console.print_sentences(table.title)
        console.print_table(table.columns, table.rows, left=table.text_columns, has_total=table.has_total)
    for line in (page.lead, *page.notes, page.alarm):
        if line:
            console.print_sentences(line)


def page_writer(directory: Path | None) -> Callable[[Page], None]:
    """Return a function that writes a page there and names it, once the directory is tried; nothing for None."""
    if directory is None:
        return lambda _page: None
    write_html = import_with_extra("unified_cache.sizing.report.html", "report", "--report").write_html
    place = expanded(directory)
    place.mkdir(parents=True, exist_ok=True)
    check_writable(place)

    def write(page: Page) -> None:
        sys.stderr.write(f"report: {write_html(page, place)}\n")

    return write

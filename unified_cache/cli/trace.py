"""``unified-cache trace``: figures of a trace."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from unified_cache.cli.options import JsonFileOptions
from unified_cache.cli.progress import read_watched, watched
from unified_cache.cli.report_page import page_writer, print_page
from unified_cache.cli.text import example
from unified_cache.sizing.replay.trace_figures import TraceFigures, page_of
from unified_cache.sizing.report.page import TableSection

trace_app = typer.Typer(
    name="trace",
    help="Look at a request trace or a recording.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

TraceArgument = Annotated[Path, typer.Argument(help="Trace of Mooncake or Bailian, or a recording, plain or .gz.")]


@dataclass(frozen=True, slots=True)
class TraceInfoCommand(JsonFileOptions):
    """Show how much of a trace repeats, how soon, how often, and in which sessions."""

    trace: TraceArgument
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a page with pictures there.")] = None

    def run(self) -> None:
        """Count and show."""
        self.check_json_file()
        write_page = page_writer(self.report)
        requests = read_watched(self.trace)
        with watched(sys.stderr, "count", sum(len(each.hash_ids) for each in requests), "blocks") as on_progress:
            figures = TraceFigures.of(requests, on_progress)
        page = page_of(self.trace.name, figures)
        if not self.shown_as_json("trace info", figures.as_json()):
            print_page(replace(page, tables=[TableSection("", ("", self.trace.name), page.settings), *page.tables]))
        write_page(page)


@trace_app.callback()
def trace() -> None:
    """Look at a request trace or a recording."""


trace_app.command("info", epilog=example("unified-cache trace info trace.jsonl.gz --report out"))(TraceInfoCommand)

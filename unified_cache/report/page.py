"""A result as one HTML file: a headline that answers, charts to explore, and the figures behind them."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import jinja2

from unified_cache.files import write_whole
from unified_cache.report.charts import Chart
from unified_cache.report.tables import TableSection

__all__ = ["PAGE_NAME", "Page", "TableSection"]

PAGE_NAME = "index.html"


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

    def render(self) -> str:
        """Return the whole page, with style, library and figures inside."""
        return (
            _environment()
            .get_template("page.html")
            .render(page=self, charts=[chart.as_json() for chart in self.charts])
        )

    def write(self, directory: Path) -> Path:
        """Write the page into ``directory``; return its path.

        Raises:
            OSError: it cannot be written; nothing is left half-written.

        """
        write_whole(directory / PAGE_NAME, self.render().encode())
        return directory / PAGE_NAME


def _environment() -> jinja2.Environment:
    """Return a renderer that escapes whatever a result brings, and takes the files beside this one as they are."""
    room = files("unified_cache.report")

    def own_file(name: str) -> str:
        return (room / name).read_text(encoding="utf-8")

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(own_file),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["own_file"] = own_file
    return environment

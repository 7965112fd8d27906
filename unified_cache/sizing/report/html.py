"""Writes a page as one HTML file, with style, library and figures inside. Needs the extra ``report``."""

from importlib.resources import files
from pathlib import Path

import jinja2

from unified_cache.core.files import write_whole
from unified_cache.sizing.report.page import Page

PAGE_NAME = "index.html"


def html_of(page: Page) -> str:
    """Return the whole page; whatever a result brings is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_own_file),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["own_file"] = _own_file
    return environment.get_template("page.html").render(page=page, charts=[chart.as_json() for chart in page.charts])


def write_html(page: Page, directory: Path) -> Path:
    """Write the page into ``directory``; return its path."""
    write_whole(directory / PAGE_NAME, html_of(page).encode())
    return directory / PAGE_NAME


def _own_file(name: str) -> str:
    return (files("unified_cache.sizing.report") / name).read_text(encoding="utf-8")

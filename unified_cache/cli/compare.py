"""``unified-cache compare``: the results of two replays side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unified_cache.cli.options import JsonOptions
from unified_cache.cli.report_page import print_page
from unified_cache.sizing.replay.compared import different_settings, page_of, read_result

__all__ = ["CompareCommand", "compare_app"]

COMPARE_EPILOG = """**Examples**

Does a larger host tier pay?

    unified-cache replay trace.jsonl.gz --host-pages 20000 --no-bytes --json-file small.json

    unified-cache replay trace.jsonl.gz --host-pages 40000 --no-bytes --json-file large.json

    unified-cache compare small.json large.json
"""

compare_app = typer.Typer(rich_markup_mode="markdown")

RESULT_HELP = "Result of a replay, as --json-file wrote it."


@dataclass(frozen=True, slots=True)
class CompareCommand(JsonOptions):
    """Compare the results of two replays: what the second hits and moves, held against the first, and why.

    Runs of different traces, or of different numbers of requests, are compared too; the difference is named.
    """

    first: Annotated[Path, typer.Argument(metavar="FIRST", help=RESULT_HELP)]
    second: Annotated[Path, typer.Argument(metavar="SECOND", help=RESULT_HELP)]

    def run(self) -> None:
        """Read both and show."""
        first, second = read_result(self.first), read_result(self.second)
        page = page_of(first, second)
        value = {
            "headline": page.headline,
            "figures": {name: [each, second.figures.get(name, 0.0)] for name, each in first.figures.items()},
            "settings": [
                {"name": name, "first": one, "second": other} for name, one, other in different_settings(first, second)
            ],
        }
        if not self.shown_as_json("compare", value):
            print_page(page)


compare_app.command("compare", epilog=COMPARE_EPILOG)(CompareCommand)

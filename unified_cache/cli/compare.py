"""``unified-cache compare``: the results of two replays side by side."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from unified_cache.cli.options import JsonOptions
from unified_cache.cli.text import console_on
from unified_cache.replay.compared import KeptResult, compared_figures, compared_settings, read_result

__all__ = ["CompareCommand", "compare_app"]

COMPARE_EPILOG = """**Examples**

Does a larger host tier pay?

    unified-cache replay trace.jsonl.gz --host-pages 20000 --no-bytes --json-file small.json

    unified-cache replay trace.jsonl.gz --host-pages 40000 --no-bytes --json-file large.json

    unified-cache compare small.json large.json
"""

compare_app = typer.Typer(rich_markup_mode="markdown")

WORTH_NAMING = 0.0005
"""Share of the tokens that four digits behind the point would show."""

RESULT_HELP = "Result of a replay, as --json-file wrote it."


@dataclass(frozen=True, slots=True)
class CompareCommand(JsonOptions):
    """Compare the results of two replays: what the second hits and moves, held against the first, and why.

    Runs of different traces, or of different numbers of requests, are compared too; the difference is named.
    """

    first: Annotated[Path, typer.Argument(metavar="FIRST", help=RESULT_HELP)]
    second: Annotated[Path, typer.Argument(metavar="SECOND", help=RESULT_HELP)]

    def run(self) -> None:
        """Read both and show.

        Raises:
            ConfigError: one of them is no result of a replay.
            OSError: one of them cannot be read.
        """
        first, second = read_result(self.first), read_result(self.second)
        figures, settings = compared_figures(first, second), compared_settings(first, second)
        value = {
            "headline": compared_headline(first, second),
            "figures": {pair.name: [pair.first, pair.second] for pair in figures},
            "settings": [asdict(pair) for pair in settings],
        }
        if self.shown_as_json("compare", value):
            return
        console = console_on(sys.stdout)
        console.print_line(compared_headline(first, second), style="bold")
        console.print_table(
            ("figure", "first", "second", "change"), ((pair.name.replace("_", " "), *pair.texts) for pair in figures)
        )
        if settings:
            rows = ((each.name, each.first, each.second) for each in settings)
            console.print_table(("setting", "first", "second"), rows, left=3)
        else:
            console.print_line("the settings are the same")


def compared_headline(first: KeptResult, second: KeptResult) -> str:
    """Say in a sentence which of two runs hit more, and by how much."""
    one, other = first.ratios["token_hit_ratio"], second.ratios["token_hit_ratio"]
    if abs(other - one) < WORTH_NAMING:
        return f"Both hit {one:.1%} of the tokens."
    more = "more" if other > one else "less"
    points = f"{abs(other - one) * 100:.1f} points"
    return f"The second hits {other:.1%} of the tokens, {points} {more} than the first with {one:.1%}."


compare_app.command("compare", epilog=COMPARE_EPILOG)(CompareCommand)

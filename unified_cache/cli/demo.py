"""``unified-cache demo``: conversations on a small model, with an engine restarted in the middle.

The run is imported when it begins: it brings torch and transformers, and neither help nor a refused option should wait
for those.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from unified_cache.cli.options import JsonOptions
from unified_cache.cli.progress import watched
from unified_cache.cli.report_page import page_writer
from unified_cache.cli.text import console_on
from unified_cache.core.errors import CacheError
from unified_cache.core.extras import import_with_extra

if TYPE_CHECKING:
    from unified_cache.sizing.demo.result import DemoResult

__all__ = ["DemoCommand", "demo_app"]

demo_app = typer.Typer(rich_markup_mode="markdown")


DEMO_EPILOG = """**Examples**

    unified-cache demo

Compressed sparse attention, with a page that shows what was saved:

    unified-cache demo --model tiny-deepseek-v4 --report out

The same store twice: the second run finds what the first one left:

    unified-cache demo --storage file:/tmp/kv
"""


@dataclass(frozen=True, slots=True)
class DemoCommand(JsonOptions):
    """Serve conversations with a small engine, restart it on the same store, and compare with computing everything.

    The model is built from a stock configuration with random weights and speaks bytes, so its answers mean nothing;
    but every one of them is compared with what the model says to the same prompt without a cache. Exits with 1 if one
    differs.
    """

    model: Annotated[
        str,
        typer.Option(help="tiny-llama, tiny-gemma3, tiny-gpt-oss, tiny-qwen3-next or tiny-deepseek-v4."),
    ] = "tiny-gpt-oss"
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Store (L3): file:DIR and others. [default: a temporary directory]"),
    ] = None
    users: Annotated[int, typer.Option(min=1, max=9, help="Conversations under one system prompt.")] = 3
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a page there, index.html.")] = None

    def run(self) -> None:
        """Run the demo and show the result.

        Raises:
            InputError: an option cannot be used; nothing was touched.
            CacheError: an answer differs from the one computed cold, or the store cannot be opened.
            OSError: page or JSON file cannot be written.
        """
        demo = import_with_extra("unified_cache.sizing.demo.run", "transformers", "the demo")
        page_of = import_with_extra("unified_cache.sizing.demo.report", "transformers", "the demo").page_of
        write_page = page_writer(self.report)
        self.check_json_file()
        settings = demo.DemoSettings(model=self.model, storage=self.storage, users=self.users)
        with watched(sys.stderr, "demo", settings.requests_count, "requests") as on_progress:
            result: DemoResult = demo.run_demo(settings, on_progress)
        if not self.shown_as_json("demo", result.as_json()):
            print_demo(sys.stdout, result)
        write_page(page_of(result))
        if result.different:
            raise CacheError(result.verdict())


def print_demo(stream: TextIO, result: "DemoResult") -> None:
    """Print the first user's conversation, the table by tier, and whether all answers are what they are cold."""
    console = console_on(stream)
    for line in result.transcript():
        console.print_line(line)
    console.print_table(result.columns, (row.cells() for row in result.rows))
    console.print_line(f"tokens are means, times medians; forwards: {result.forwards_text()}")
    console.print_line(result.verdict())


demo_app.command("demo", epilog=DEMO_EPILOG)(DemoCommand)

"""``unified-cache demo``: a real model in the terminal, while its cache loses tier after tier."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unified_cache.cli.options import JsonOptions
from unified_cache.cli.report_page import page_writer, print_page
from unified_cache.cli.samples import samples_directory
from unified_cache.cli.text import WIDTH_MIN, console_on
from unified_cache.core.errors import CacheError
from unified_cache.core.extras import import_with_extra

if TYPE_CHECKING:
    from unified_cache.sizing.demo.result import DemoResult

DEFAULT_DOCUMENT = "LICENSE"
"""Prose that a small model understands. At the root of a checkout; an installed package has it beside its samples."""
QUESTIONS = ("What is this text about?", "What does it say at the beginning?", "Whom is it written for?")
"""Questions about any text."""
DEFAULT_QUESTIONS = (
    "What may I do with the software?",
    "Which license is this?",
    "What must I do when I redistribute the work?",
)

demo_app = typer.Typer(rich_markup_mode="markdown")

DEMO_EPILOG = """**Examples**

    unified-cache demo

    unified-cache demo novel.txt --question "Who is the hero?" --storage packed:/tmp/kv

Compressed sparse attention, with random weights, in seconds:

    unified-cache demo --model tiny-deepseek-v4 --report out
"""


@dataclass(frozen=True, slots=True)
class DemoCommand(JsonOptions):
    """Ask a model about a long document, while the cache loses its device, its process and a byte of its store.

    Every answer is compared with computing without a cache, word by word and bit by bit. Exits with 1 if one differs.
    """

    document: Annotated[
        Path | None,
        typer.Argument(metavar="DOCUMENT", help="Text to ask about. [default: the Apache License]", dir_okay=False),
    ] = None
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Checkpoint directory or GGUF file, or one with random weights: tiny-llama, tiny-gemma3, "
            "tiny-gpt-oss, tiny-qwen3-next, tiny-deepseek-v4.",
        ),
    ] = "SmolLM2-135M-Instruct"
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A store of yours. [default: a file store in a temporary directory]"),
    ] = None
    question: Annotated[list[str] | None, typer.Option(help="Ask this; may be given several times.")] = None
    document_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the document at most.")] = 2048
    report: Annotated[Path, typer.Option(metavar="DIR", help="Write page and picture there.")] = Path(
        "unified-cache-demo"
    )

    def run(self) -> None:
        """Run the demo, show it while it runs, and write its page.

        Raises:
            InputError: an option cannot be used; nothing was touched.
            CacheError: an answer differs, or a part of the demo failed.
            OSError: a file cannot be read or written.
        """
        demo = import_with_extra("unified_cache.sizing.demo.run", "demo", "the demo")
        picture = import_with_extra("unified_cache.sizing.demo.picture", "demo", "the demo")
        write_page = page_writer(self.report)
        document = self.document or samples_directory() / DEFAULT_DOCUMENT
        questions = self.question or (QUESTIONS if self.document else DEFAULT_QUESTIONS)
        settings = demo.DemoSettings(document, tuple(questions), self.model, self.storage, self.document_tokens)
        console = console_on(sys.stdout)
        console.quiet = self.as_json
        with console.status("the model reads and answers"):
            result: DemoResult = demo.run_demo(settings, console.print_line)
        page = picture.page_of(result)
        if not self.shown_as_json("demo", result.as_json()):
            print_page(page, WIDTH_MIN)
        write_page(page)
        if (image := picture.write_picture(page, self.report)) is not None:
            sys.stderr.write(f"picture: {image}\n")
        if result.findings:
            raise CacheError(result.verdict)


demo_app.command("demo", epilog=DEMO_EPILOG)(DemoCommand)

"""``unified-cache demo``: a real model in the terminal, while its cache loses tier after tier."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from unified_cache.cli.options import JsonOptions
from unified_cache.cli.report_page import page_writer, print_page
from unified_cache.cli.samples import samples_directory
from unified_cache.cli.text import WIDTH_MIN, LineConsole, console_on, printable
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
REFRESH_PER_SECOND = 10

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
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 24
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
        settings = demo.DemoSettings(
            document, tuple(questions), self.model, self.storage, self.document_tokens, self.answer_tokens
        )
        console = console_on(sys.stdout)
        console.quiet = self.as_json
        screen = Screen(console)
        with Live(
            get_renderable=screen.picture, console=console, transient=True, refresh_per_second=REFRESH_PER_SECOND
        ):
            result: DemoResult = demo.run_demo(settings, screen)
        page = picture.page_of(result)
        if not self.shown_as_json("demo", result.as_json()):
            print_page(page, WIDTH_MIN)
        write_page(page)
        if (image := picture.write_picture(page, self.report)) is not None:
            sys.stderr.write(f"picture: {image}\n")
        if result.findings:
            raise CacheError(result.verdict)


class Screen:
    """A demo on a terminal: the waits so far, the answer that comes, and how far its prompt is. In a pipe, lines."""

    def __init__(self, console: LineConsole) -> None:
        self._console = console
        self._question = self._answer = ""
        self._result: DemoResult | None = None
        self._bar = Progress(TextColumn("  computing the prompt"), BarColumn(), TextColumn("{task.completed} tokens"))
        self._task = self._bar.add_task("", total=None, visible=False)

    def phase(self, number: int, text: str) -> None:
        """Print the text of a phase that begins."""
        self._console.print_line(f"{number}. {text}", "bold")

    def asked(self, question: str) -> None:
        """Begin an answer."""
        self._question, self._answer = question, ""
        self._bar.reset(self._task, total=None, visible=False)

    def computed(self, tokens: int, total_tokens: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=tokens, total=total_tokens, visible=tokens < total_tokens)

    def words(self, text: str) -> None:
        """Add words to the answer."""
        self._answer += text

    def answered(self, result: "DemoResult") -> None:
        """Leave question, answer and its wait on the terminal."""
        if self._result is None or len(result.steps) > len(self._result.steps):
            answer = result.steps[-1].answer
            source = f"from {answer.main_source}" if answer.reused_tokens else "computed"
            self._console.print_line(f"   > {answer.question}")
            self._console.print_line(f"   {' '.join(answer.text.split())}")
            self._console.print_line(
                f"   {answer.first_token_s:.2f} s to the first token; {source}: "
                f"{answer.reused_tokens:,} tokens reused, {answer.prompt_tokens['computed']:,} computed"
                + (f"; {answer.flawed_pages} page FLAWED" if answer.flawed_pages else ""),
                "green" if answer.reused_tokens else "yellow",
            )
        self._result, self._question, self._answer = result, "", ""

    def picture(self) -> Group:
        """Return what is shown below the lines: the answer under way, its bar, and the waits so far."""
        shown: list[Text | Table | Progress] = []
        if self._question:
            shown.append(Text(printable(f"   > {self._question}")))
            shown.append(Text(printable(f"   {' '.join(self._answer.split())}")))
        shown.append(self._bar)
        if self._result is not None:
            shown.append(waits_table(self._result))
        return Group(*shown)


def waits_table(result: "DemoResult") -> Table:
    """Return the waits so far, each with a bar of its length."""
    table = Table.grid(padding=(0, 2))
    longest_s = max(step.answer.first_token_s for step in result.steps)
    for step in result.steps:
        wait_s, source = step.answer.first_token_s, step.answer.main_source
        table.add_row(f"   {step.name}", f"{wait_s:.2f} s", source, "━" * max(1, round(40 * wait_s / longest_s)))
    return table


demo_app.command("demo", epilog=DEMO_EPILOG)(DemoCommand)

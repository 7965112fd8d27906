"""``unified-cache faithful``: whether the cache of any OpenAI-compatible server changes its answers."""

import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unified_cache.cli.options import JsonOptions
from unified_cache.cli.progress import watched
from unified_cache.cli.report_page import page_writer, print_page
from unified_cache.core.errors import CacheError, InputError
from unified_cache.core.extras import import_with_extra

__all__ = ["FaithfulCommand", "faithful_app"]

FAITHFUL_EPILOG = """**Examples**

    unified-cache faithful http://localhost:8000

    unified-cache faithful http://localhost:8000 --report bug --restart-command "systemctl restart vllm"

    unified-cache faithful http://localhost:30000 --skip host --skip branches --json
"""

faithful_app = typer.Typer(rich_markup_mode="markdown")


@dataclass(frozen=True, slots=True)
class FaithfulCommand(JsonOptions):
    """Ask a server for what its cache holds, and compare the answers with cold ones.

    URL is an OpenAI-compatible server, vLLM, SGLang or any, that serves nobody else meanwhile. It is asked about
    documents with planted facts, greedily: cold, from the device, at branches and ends of pages, at once, under salts,
    and after others have pushed the prefix to the host and to storage. How far cold answers differ among themselves is
    the noise floor. Exits with 0 if all is faithful, 1 if an answer is not, 2 if it cannot tell, as without hits.
    """

    url: Annotated[str, typer.Argument(metavar="URL", help="Server, such as http://localhost:8000.")]
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Model to ask. [default: its first]")] = None
    documents: Annotated[int, typer.Option(min=1, help="Documents to ask about in each phase.")] = 4
    facts: Annotated[int, typer.Option(min=3, help="Facts in a document, of some 15 tokens.")] = 40
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 16
    page_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a page, if /metrics lacks it.")] = None
    device_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens the device holds, if it lacks that.")] = None
    host_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens host memory holds, to get to storage.")] = None
    restart: Annotated[bool, typer.Option("--restart", help="Wait until you have restarted the server.")] = False
    restart_command: Annotated[str | None, typer.Option(metavar="COMMAND", help="Restart it by this.")] = None
    restart_timeout_s: Annotated[float, typer.Option(help="Seconds until it answers again.")] = 900.0
    tolerance: Annotated[float, typer.Option(metavar="NATS", help="Distance of answers that rounding explains.")] = 0.2
    skip: Annotated[list[str] | None, typer.Option(metavar="PHASE", help="Leave a phase out; several times.")] = None
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a page for a bug report.")] = None

    def run(self) -> None:
        """Run the phases, show the verdicts, and exit with that of all.

        Raises:
            InputError: an option cannot be used.
            CacheError: the server does not answer.
        """
        trial = import_with_extra("unified_cache.sizing.faithful.trial", "faithful", "faithful")
        server = import_with_extra("unified_cache.sizing.faithful.server", "faithful", "faithful")
        if unknown := set(self.skip or ()) - set(trial.PHASES):
            raise InputError(f"--skip takes one of {', '.join(trial.PHASES)}, found {', '.join(sorted(unknown))}")
        self.check_json_file()
        write_page = page_writer(self.report)
        left_out = {*(self.skip or ())}
        if not self.host_tokens:
            left_out.add("storage")
        if not self.restart and self.restart_command is None:
            left_out.add("restart")
        settings = trial.FaithfulSettings(
            self.documents,
            self.facts,
            self.device_tokens,
            self.host_tokens,
            self.page_tokens,
            self.restart_command,
            self.restart_timeout_s,
            frozenset(left_out),
            self.tolerance,
            first_number=secrets.randbelow(10**9) * 1000,
        )
        with (
            server.CompletionServer.connect(self.url, self.model, self.answer_tokens) as asked,
            watched(sys.stderr, "faithful", len(trial.PHASES) - len(left_out), "phases") as on_progress,
        ):
            result = trial.run_trial(asked, settings, on_progress)
        if not self.shown_as_json("faithful", result.as_json()):
            print_page(result.page(with_answers=False))
        write_page(result.page(with_answers=True))
        verdict = result.verdict.value
        if verdict == "unfaithful":
            raise CacheError(result.headline)
        if verdict != "faithful":
            raise InputError(result.headline)


faithful_app.command("faithful", epilog=FAITHFUL_EPILOG)(FaithfulCommand)

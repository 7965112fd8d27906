"""``unified-cache faithful``: whether the cache of any OpenAI-compatible server changes its answers."""

import shlex
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from unified_cache.cli.options import JsonOptions
from unified_cache.cli.progress import watched
from unified_cache.cli.text import console_on, example
from unified_cache.core.errors import CacheError, InputError
from unified_cache.core.extras import import_with_extra

EXAMPLE = 'unified-cache faithful http://localhost:8000 --restart-command "systemctl restart vllm" --json > bug.json'

faithful_app = typer.Typer(rich_markup_mode="markdown")


@dataclass(frozen=True, slots=True)
class FaithfulCommand(JsonOptions):
    """Ask a server for what its cache holds, and compare the answers with cold ones.

    URL is an OpenAI-compatible server, vLLM, SGLang or any, that serves nobody else meanwhile. It is asked about
    documents with planted facts, greedily: cold, from the device, at branches, at once, under salts, and after others
    have pushed the prefix to the host and to storage. How far cold answers differ among themselves is the noise floor.
    Exits with 0 if all is faithful, 1 if an answer is not, 2 if it cannot tell, as without hits.
    """

    url: Annotated[str, typer.Argument(metavar="URL", help="Server, such as http://localhost:8000.")]
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Model to ask. [default: its first]")] = None
    documents: Annotated[int, typer.Option(min=1, help="Documents to ask about in each phase.")] = 4
    facts: Annotated[int, typer.Option(min=3, help="Facts in a document, of some 15 tokens.")] = 40
    device_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens on the device, if not in /metrics.")] = None
    host_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens host memory holds, to get to storage.")] = None
    restart_command: Annotated[str | None, typer.Option(metavar="COMMAND", help="Restart the server by this.")] = None
    skip: Annotated[list[str] | None, typer.Option(metavar="PHASE", help="Leave a phase out; several times.")] = None

    def run(self) -> None:
        """Run the phases and show the verdicts; a CacheError if unfaithful, an InputError if nobody can tell."""
        trial = import_with_extra("unified_cache.sizing.faithful.trial", "faithful", "faithful")
        server = import_with_extra("unified_cache.sizing.faithful.server", "faithful", "faithful")
        if unknown := {*(self.skip or ())} - set(trial.PHASES):
            raise InputError(f"--skip takes one of {', '.join(trial.PHASES)}, found {', '.join(sorted(unknown))}")
        try:
            restart = shlex.split(self.restart_command or "")
        except ValueError as error:
            raise InputError(f"--restart-command: {error}") from error
        if self.restart_command is not None and not restart:
            raise InputError("--restart-command must name a program, found none")
        left_out = {*(self.skip or ()), *(() if self.host_tokens else ["storage"]), *(() if restart else ["restart"])}
        phases = [name for name in trial.PHASES if name not in left_out]
        sizes = (self.documents, self.facts, self.device_tokens, self.host_tokens)
        try:
            with (
                server.connected(self.url, self.model) as asked,
                watched(sys.stderr, "faithful", len(phases), "phases") as on_progress,
            ):
                found = trial.FaithfulTrial(asked, *sizes, restart).run(phases, on_progress)
        except InputError:
            raise
        except CacheError as error:  # status 1 is for answers that are wrong
            raise InputError(f"cannot tell: {error}") from error
        if not self.shown_as_json("faithful", found.as_json()):
            for phase in found.phases:
                console_on(sys.stdout).print_line(f"{phase.name}: {phase.verdict}, {phase.hit_tokens} tokens cached")
        if found.verdict != "faithful":
            raise (CacheError if found.verdict == "unfaithful" else InputError)(found.headline)


faithful_app.command("faithful", epilog=example(EXAMPLE))(FaithfulCommand)

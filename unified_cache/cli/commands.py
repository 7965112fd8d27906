"""The commands by name. Each is imported when it is run, so that help and other commands do not wait for what it needs.

``DEFERRED`` is what ``unified-cache --help`` shows: where each command is, as ``MODULE:TYPER``, and the first paragraph
of its own help.
"""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from typer import Context, Typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command, get_group

from unified_cache.cli.text import copyable

if TYPE_CHECKING:
    from typer._click import Command
    from typer._click import Context as AnyContext

HELP_NAMES = ["-h", "--help"]
"""Options that ask any command for help."""

_ROOM = "unified_cache.cli"

DEFERRED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Try and size": {
        "demo": (
            "demo:demo_app",
            "Ask a model about a long document, while the cache loses its device, its process and a byte of its store.",
        ),
        "samples": (
            "samples:samples_app",
            "Copy a trace of 1,000 requests, the examples, and what deploys and watches a service into a directory.",
        ),
        "layout": (
            "layout:layout_app",
            "Show the pools of a model, their bytes per page and per token, and what a million tokens cost per tier.",
        ),
        "plan": (
            "plan:plan_app",
            "Show what to buy: the hit ratio of a trace for every combination of tier sizes, and what it brings.",
        ),
        "replay": (
            "replay:replay_app",
            "Replay a request trace against a cache of given tier sizes and print the hits of each tier.",
        ),
        "faithful": (
            "faithful:faithful_app",
            "Ask a server for what its cache holds, and compare the answers with cold ones.",
        ),
    },
    "Stores": {
        "storage": ("storage:storage_app", "Look at a store, verify it, and keep it in order, without an engine."),
        "backup": (
            "backup:backup_app",
            "Copy everything of a store, or of one identity, or the pages of some prompts, into another store.",
        ),
        "prefetch": (
            "backup:backup_app",
            "Copy what the longest restorable prefixes of some prompts need from one store into another.",
        ),
        "explain": (
            "explain:explain_app",
            "Explain how long a prefix of each prompt in a file a store can restore, and which page is missing "
            "for more.",
        ),
        "conformance": (
            "conformance:conformance_app",
            "Run the storage contract over a backend and show which promises it keeps.",
        ),
    },
    "Service": {
        "serve": (
            "serve:serve_app",
            "Serve a store over gRPC, safe by default: to this machine alone, unless client certificates are asked "
            "for.",
        ),
        "config": ("config:config_app", "Explain a file of settings."),
        "token": ("serve:token_app", "Make and revoke the tokens that tenants of a service show."),
        "ping": (
            "remote:remote_app",
            "Ask every server of a service whether it answers, your tenant, what it holds for you, and how fast.",
        ),
        "drain": (
            "remote:remote_app",
            "End a service as SIGTERM does: its servers refuse new calls and finish those in flight. For admins.",
        ),
    },
}
"""By the heading that help shows them under."""


class DeferredCommand(TyperCommand):
    """A command or a group of commands that is imported when its arguments are parsed."""

    def __init__(self, name: str, home: str, summary: str, heading: str) -> None:
        super().__init__(name, help=summary, rich_help_panel=heading)
        self.home = home

    def load(self) -> "Command":
        """Import the command itself."""
        typer_app: Typer = resolve_name(f"{_ROOM}.{self.home}")
        group = get_group(typer_app)
        command = group if group.name == self.name else group.commands[self.name or ""]
        for each in (command, *(command.commands.values() if isinstance(command, TyperGroup) else ())):
            each.epilog = copyable(each.epilog or "")
            _show_flags_alone(each)
        return command

    def make_context(
        self, info_name: str | None, args: list[str], parent: "AnyContext | None" = None, **extra: bool
    ) -> "AnyContext":
        """Import the command and parse its arguments with it; it is invoked from here on."""
        return self.load().make_context(info_name, args, parent, **extra)


def command_line(root: Typer) -> TyperGroup:
    """Return the whole command line: the options of ``root``, and every command, not yet imported."""
    group = get_command(root)
    assert isinstance(group, TyperGroup)
    _show_flags_alone(group)
    for heading, commands in DEFERRED.items():
        for name, (home, summary) in commands.items():
            group.add_command(DeferredCommand(name, home, summary, heading))
    return group


def _show_flags_alone(command: "Command") -> None:
    """Hide the type of flags in help, as they take no value; help's own flag is one."""
    for option in (*command.params, command.get_help_option(Context(command, help_option_names=HELP_NAMES))):
        if isinstance(option, TyperOption) and option.is_flag:
            option.metavar = ""

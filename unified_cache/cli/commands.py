"""The commands by name. Each is imported when it is run, so that help and other commands do not wait for what it needs.

``DEFERRED`` is what ``unified-cache --help`` shows: where each command is, as ``MODULE:TYPER``, and the first paragraph
of its own help.
"""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from typer import Typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command, get_group

from unified_cache.cli.text import copyable

if TYPE_CHECKING:
    from typer._click import Command, Context

__all__ = ["DEFERRED", "DeferredCommand", "command_line"]

_ROOM = "unified_cache.cli"

DEFERRED: Mapping[str, tuple[str, str]] = {
    "replay": (
        "replay:replay_app",
        "Replay a request trace against a cache of given tier sizes and print the hits of each tier.",
    ),
    "plan": (
        "plan:plan_app",
        "Say what to buy: the hit ratio of a trace for every combination of tier sizes, and what it brings.",
    ),
    "trace": ("trace:trace_app", "Show figures of a request trace or a recording, cut it, and convert it."),
    "compare": (
        "compare:compare_app",
        "Compare the results of two replays: what the second hits and moves, held against the first, and why.",
    ),
    "demo": (
        "demo:demo_app",
        "Serve conversations with a small engine, restart it on the same store, and compare with computing everything.",
    ),
    "layout": (
        "layout:layout_app",
        "Show the pools of a model, their bytes per page and per token, and what a million tokens cost per tier.",
    ),
    "samples": (
        "samples:samples_app",
        "Copy a trace of 1,000 requests, the examples and the dashboard for Grafana into a directory.",
    ),
    "storage": ("storage:storage_app", "Look at a store, verify it, and keep it in order, without an engine."),
    "backup": (
        "backup:backup_app",
        "Copy everything of a store, or of one identity, or the pages of some prompts, into another store.",
    ),
    "prefetch": (
        "backup:backup_app",
        "Warm a store with single prompts: make their longest restorable prefixes restorable from it.",
    ),
    "explain": (
        "explain:explain_app",
        "Say why the hit of each prompt in a file would be as long as it is from a store alone, and show its pages.",
    ),
    "conformance": (
        "conformance:conformance_app",
        "Run the storage contract over a backend and show which promises it keeps.",
    ),
    "config": ("config:config_app", "Explain a file of settings, or write one to begin with."),
    "serve": (
        "serve:serve_app",
        "Serve a store over gRPC, safe by default: to this machine alone, unless client certificates are asked for.",
    ),
    "top": (
        "top:top_app",
        "Show what a cache or a service holds and does now, as its live page does.",
    ),
    "token": ("serve:token_app", "Make and revoke the tokens that tenants of a service show."),
    "ping": (
        "remote:remote_app",
        "Say Hello to every server of a service: whom they take you for, and how long it takes.",
    ),
    "stat": ("remote:remote_app", "Show what each server of a service holds for you."),
    "lookup": (
        "remote:remote_app",
        "Tell how much of each prompt in a file a service can restore, in tokens.",
    ),
    "get": (
        "remote:remote_app",
        "Get one object of a service, verified, into a file of its owner alone: header and payload "
        "as stores keep them.",
    ),
    "put": ("remote:remote_app", "Put one object, in a file as get writes it, into a service under its name."),
    "clear": (
        "remote:remote_app",
        "Remove every page of one identity of yours from a service, its memory included. "
        "Without --yes nothing is removed.",
    ),
    "drain": (
        "remote:remote_app",
        "End a service as SIGTERM does: its servers refuse new calls and let those in flight finish. An admin's to do.",
    ),
    "cluster": (
        "cluster:cluster_app",
        "Run a Mooncake cluster on this machine, for development: one master and some storage nodes.",
    ),
    "router": (
        "router:router_app",
        "Follow the KV events of engines, and tell how much of a prompt each of them could resume.",
    ),
    "node": (
        "node:node_app",
        "Give memory of this machine to a Mooncake cluster until SIGTERM; log each event as one line of JSON.",
    ),
}


class DeferredCommand(TyperCommand):
    """A command or a group of commands that is imported when its arguments are parsed."""

    def __init__(self, name: str, home: str, summary: str) -> None:
        super().__init__(name, help=summary)
        self.home = home

    def load(self) -> "Command":
        """Import the command itself."""
        typer_app: Typer = resolve_name(f"{_ROOM}.{self.home}")
        group = get_group(typer_app)
        command = group if group.name == self.name else group.commands[self.name or ""]
        for each in (command, *(command.commands.values() if isinstance(command, TyperGroup) else ())):
            each.epilog = copyable(each.epilog or "")
            for option in each.params:
                if isinstance(option, TyperOption) and option.is_flag:
                    option.metavar = ""  # a flag takes no value, whatever the type of its variable
        return command

    def make_context(
        self, info_name: str | None, args: list[str], parent: "Context | None" = None, **extra: bool
    ) -> "Context":
        """Have the command itself parse its arguments; what is invoked from here on is that command."""
        return self.load().make_context(info_name, args, parent, **extra)


def command_line(root: Typer) -> TyperGroup:
    """Return the whole command line: the options of ``root``, and every command, not yet imported."""
    group = get_command(root)
    assert isinstance(group, TyperGroup)
    for name, (home, summary) in DEFERRED.items():
        group.add_command(DeferredCommand(name, home, summary))
    return group

"""``unified-cache cluster``: a Mooncake cluster on this machine, for development."""

import os
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from unified_cache.byte_sizes import size_text
from unified_cache.cli.json_output import shown_as_json
from unified_cache.cli.options import JsonFileOption, JsonOption
from unified_cache.cli.setting_options import ConfigOption, SetOption, given_flags, setting_option
from unified_cache.cli.text import console_on, example, table
from unified_cache.cluster.directory import ClusterDirectory, ClusterState
from unified_cache.cluster.event_log import EventLog
from unified_cache.cluster.host_port import HostPort
from unified_cache.cluster.local import ClusterPlan
from unified_cache.cluster.restarts import ProcessPhase
from unified_cache.cluster.supervisor import end_supervisor, start_supervisor, supervise
from unified_cache.errors import CacheError
from unified_cache.settings.loading import read_settings
from unified_cache.settings.mooncake import ClusterChoices
from unified_cache.storage_backends.mooncake.admin import MasterAdmin

__all__ = ["DownCommand", "StatusCommand", "UpCommand", "cluster_app"]

CLUSTER_EPILOG = """**Examples**

    unified-cache cluster up --nodes 3 --segment-bytes 1GiB

    unified-cache cluster status --json

    unified-cache cluster down
"""

cluster_app = typer.Typer(
    name="cluster",
    epilog=CLUSTER_EPILOG,
    help="Run a Mooncake cluster on this machine, for development: one master and some storage nodes.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def default_directory() -> Path:
    """Return where this user's cluster keeps its state unless told otherwise."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "unified-cache" / "cluster"


DirectoryOption = Annotated[Path | None, setting_option(ClusterChoices, "dir", "DIR")]


@dataclass(frozen=True, slots=True)
class UpCommand:
    """Start a cluster and print its storage URL once a page has travelled to every node and back.

    A supervisor process owns the cluster and stays. It restarts processes that die; all of them die with it.
    """

    nodes: Annotated[int | None, setting_option(ClusterChoices, "nodes", "N")] = None
    segment_bytes: Annotated[str | None, setting_option(ClusterChoices, "segment_bytes")] = None
    directory: DirectoryOption = None
    config: ConfigOption = None
    assigned: SetOption = None
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay until Ctrl-C, and log here.")] = False

    def run(self) -> None:
        """Start and print.

        Raises:
            ConfigError: the plan cannot be, a cluster runs there already, or Mooncake is not installed.
            StorageError: the cluster does not start.
        """
        flags = given_flags({"nodes": self.nodes, "segment_bytes": self.segment_bytes, "dir": self.directory})
        found = read_settings(ClusterChoices, self.config, flags, self.assigned or ()).settings
        plan = ClusterPlan(found.nodes, found.segment_bytes)
        directory = ClusterDirectory.create(found.dir or default_directory())
        if self.foreground:
            supervise(plan, directory, EventLog(sys.stderr, time.time), _print_url)
            return
        started_s = time.monotonic()
        _print_url(start_supervisor(plan, directory).url)
        console_on(sys.stderr).print_line(
            f"{plan.nodes_count} nodes of {size_text(plan.segment_bytes)} ready in "
            f"{time.monotonic() - started_s:.1f} s; state and logs in {directory.path}"
        )


@dataclass(frozen=True, slots=True)
class StatusCommand:
    """Show a cluster's processes, and whether its master serves and counts on each node. Fails unless all is well."""

    directory: DirectoryOption = None
    config: ConfigOption = None
    as_json: JsonOption = False
    json_file: JsonFileOption = None

    def run(self) -> None:
        """Ask and show.

        Raises:
            ConfigError: the directory is not this user's alone.
            CacheError: no cluster runs there, or not all of it is well.
        """
        directory = ClusterDirectory.at(_directory(self.directory, self.config))
        supervised = directory.is_supervised
        state = directory.read()
        if state is None or not supervised:
            nothing: dict[str, object] = {"ready": False, "directory": str(directory.path)}
            shown_as_json("cluster status", nothing, on_stdout=self.as_json, file=self.json_file)
            what = "its supervisor died" if state else "it is being started" if supervised else "no cluster runs there"
            raise CacheError(f"no cluster is ready in {directory.path}: {what}")
        well = _who_is_well(state)
        ready = len(well) == len(state.members)
        members = [{**asdict(member), "ready": member.name in well} for member in state.members]
        fields = {"ready": ready, "directory": str(directory.path), "supervisor_pid": directory.supervisor_pid}
        value = {**fields, **asdict(state), "members": members}
        if not shown_as_json("cluster status", value, on_stdout=self.as_json, file=self.json_file):
            _print_state(state, well)
        if not ready:
            ill = ", ".join(member.name for member in state.members if member.name not in well)
            raise CacheError(f"all of the cluster in {directory.path} must be ready, found not ready: {ill}")


@dataclass(frozen=True, slots=True)
class DownCommand:
    """End a cluster. All its pages are lost; its logs stay."""

    directory: DirectoryOption = None
    config: ConfigOption = None

    def run(self) -> None:
        """End it, or say that there is none.

        Raises:
            ConfigError: the directory is not this user's alone.
            CacheError: it does not end.
        """
        directory = ClusterDirectory.at(_directory(self.directory, self.config))
        ended = end_supervisor(directory)
        console_on(sys.stdout).print_line(
            f"{'the cluster has ended' if ended else 'no cluster runs'} in {directory.path}"
        )


def _directory(named: Path | None, file: Path | None) -> Path:
    """Return where a cluster keeps its state: as an option says, a variable, a file, or the usual place.

    Raises:
        ConfigError: the file of settings makes no sense.
    """
    return read_settings(ClusterChoices, file, given_flags({"dir": named})).settings.dir or default_directory()


def _print_url(url: str) -> None:
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()


def _who_is_well(state: ClusterState) -> set[str]:
    """Name the members that run and, by the master's word, serve."""
    address = HostPort.parse("the state's admin address", state.admin)
    admin = MasterAdmin(address.host, address.port)
    master, *nodes = state.members
    serving = {master.address} if admin.is_serving() else frozenset[str]()
    there = admin.segments() | serving
    return {
        member.name
        for member in (master, *nodes)
        if member.phase == ProcessPhase.RUNNING.value and member.address in there
    }


def _print_state(state: ClusterState, well: set[str]) -> None:
    _print_url(state.url)
    shown = table("member", "address", "state", "pid", "restarts", left=3)
    for member in state.members:
        running = "ready" if member.name in well else "does not answer"
        phase = running if member.phase == ProcessPhase.RUNNING.value else member.phase
        shown.add_row(member.name, member.address, phase, str(member.pid), str(member.restarts_count))
    console_on(sys.stdout).print(shown)
    up = timedelta(seconds=int(time.time() - state.started_s))
    console_on(sys.stdout).print_line(f"segments of {size_text(state.segment_bytes)}, up for {up}")


for _name, _command, _options in (
    ("up", UpCommand, " --nodes 3 --segment-bytes 1GiB"),
    ("status", StatusCommand, " --json"),
    ("down", DownCommand, ""),
):
    cluster_app.command(_name, epilog=example(f"unified-cache cluster {_name}{_options}"))(_command)

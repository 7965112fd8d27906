"""Support of the tests of clusters and nodes: commands as processes, and whether what they started is gone."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import psutil

from tests.support.base_install import without_torch
from unified_cache.cli.main import run
from unified_cache.cluster.child import wait_until
from unified_cache.cluster.host_port import HostPort
from unified_cache.storage_backends.mooncake.admin import MasterAdmin

__all__ = [
    "COMMAND",
    "TIMEOUT_S",
    "CommandResult",
    "RunningCommand",
    "all_end",
    "ask",
    "ask_apart",
    "descendants",
    "has_ended",
    "mounted",
    "slowness",
]

COMMAND = (sys.executable, "-c", "from unified_cache.cli.main import main; main()")
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Output of a command, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what went wrong."""
        (line,) = (line for line in self.err.splitlines() if line.startswith("error: "))
        return line


def ask(*arguments: str | Path) -> CommandResult:
    """Run a command here."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = run(list(map(str, arguments)))
    return CommandResult(status, out.getvalue(), err.getvalue())


def ask_apart(
    *arguments: str | Path, environment: Mapping[str, str] = os.environ, before: Sequence[str] = ()
) -> CommandResult:
    """Run a command in a process of its own, through the program ``before``."""
    result = subprocess.run(
        [*before, *COMMAND, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=without_torch(environment),
    )
    return CommandResult(result.returncode, result.stdout, result.stderr)


def slowness() -> float:
    """Say how many processes wait for each processor, at least 1: how much longer than alone something may take."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class RunningCommand:
    """A command that goes on; ``events`` are the lines of JSON that it logged so far."""

    def __init__(self, *arguments: str | Path, environment: Mapping[str, str] = os.environ) -> None:
        self.popen = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=without_torch(environment),
            start_new_session=True,
        )
        self.events: list[dict[str, object]] = []
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def logged(self, event: str) -> dict[str, object]:
        """Wait until the command logs ``event``; return the first such line."""
        assert wait_until(lambda: any(line["event"] == event for line in self.events), TIMEOUT_S), self.lines
        return next(line for line in self.events if line["event"] == event)

    def end(self) -> int:
        """Wait until the command ends; return its exit status."""
        status = self.popen.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return status

    def _read(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as lines:
            for line in lines:
                self.lines.append(line)
                if line.startswith("{"):
                    self.events.append(json.loads(line))


def mounted(admin: HostPort) -> frozenset[str]:
    """Return the nodes that a master counts on, by their addresses."""
    return MasterAdmin(admin.host, admin.port).segments()


def descendants(pid: int) -> list[psutil.Process]:
    """Return the processes that a process started, and theirs."""
    return psutil.Process(pid).children(recursive=True)


def all_end(processes: Iterable[psutil.Process]) -> bool:
    """Wait until none of the processes runs; one that nobody has asked for its status yet has ended, too."""
    left = list(processes)
    return wait_until(lambda: all(has_ended(each) for each in left), TIMEOUT_S)


def has_ended(started: psutil.Process) -> bool:
    try:
        return not started.is_running() or started.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

"""Commands of ours, run here or as processes, and whether processes have ended."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import psutil

from tests.support.base_install import without_torch
from tests.support.waiting import wait_until
from unified_cache.cli.main import run

__all__ = [
    "COMMAND",
    "TIMEOUT_S",
    "CommandResult",
    "RunningCommand",
    "all_end",
    "ask",
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


class RunningCommand:
    """A command that goes on; ``lines`` are those that it logged so far."""

    def __init__(self, *arguments: str | Path) -> None:
        self.popen = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=without_torch(os.environ),
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def end(self) -> int:
        """Wait until the command ends; return its exit status."""
        status = self.popen.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return status

    def _read(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as lines:
            self.lines.extend(lines)


def all_end(processes: Iterable[psutil.Process]) -> bool:
    """Wait until none of the processes runs; one that nobody has asked for its status yet has ended, too."""
    left = list(processes)
    return wait_until(lambda: all(_has_ended(each) for each in left), TIMEOUT_S)


def _has_ended(started: psutil.Process) -> bool:
    try:
        return not started.is_running() or started.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

"""Commands of ours, run here or as processes, and whether processes have ended."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import psutil

from tests.support.base_install import without_torch
from tests.support.waiting import wait_until
from unified_cache.cli.main import run

COMMAND = (sys.executable, "-c", "from unified_cache.cli.main import main; main()")
TIMEOUT_S = 30.0
PORT = re.compile(r"(?:^|metrics )\S+:([0-9]+)\b")


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


STARTS_MAX = 5
"""Starts of a server on the port of one that was killed: a client that looks for it may have been given that port."""


class ServeProcess:
    """``unified-cache serve`` as a process, on ports of its own; it is started once it has said where it listens.

    ``variables`` are its settings by their names in the environment. It can be killed and started again at its port.
    """

    def __init__(self, *arguments: str, variables: Mapping[str, str], directory: Path | None = None) -> None:
        self._command = [*COMMAND, "serve", *arguments]
        self._variables = {"METRICS__LISTEN": "127.0.0.1:0", **variables}
        self._directory = directory
        self.port = 0
        self.first: dict[str, str] = {}
        """Line that said where it listens."""
        self.start()

    def __enter__(self) -> "ServeProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def address(self) -> str:
        """Address that it listens at."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it."""
        settings = {"LISTEN": self.address, **self._variables}
        variables = {f"UNIFIED_CACHE_SERVE_{name}": value for name, value in settings.items()}
        environment = without_torch({**os.environ, **variables})
        for _ in range(STARTS_MAX):
            self.child = subprocess.Popen(
                self._command, cwd=self._directory, env=environment, stderr=subprocess.PIPE, text=True
            )
            assert self.child.stderr is not None
            self.log = self.child.stderr
            # Mooncake's client writes lines of its own before ours, and a warning may come first.
            lines = (json.loads(line) for line in self.log if line.startswith("{"))
            said = next((line for line in lines if line["level"] != "warning"), None)
            if said is not None:
                break
            self.kill()
        assert said is not None, f"{self._command} ended with status {self.child.wait(TIMEOUT_S)}"
        self.first = said
        assert said["kind"] == "serving", said
        self.port, self.metrics_port = map(int, PORT.findall(said["text"]))

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would; one that has ended stays so."""
        self.child.kill()
        self.child.wait()
        self.log.close()

    def freeze(self) -> None:
        """Send SIGSTOP and wait until it has stopped: it holds its ports, and answers nobody."""
        self.child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Send SIGCONT, after ``freeze`` or not."""
        self.child.send_signal(signal.SIGCONT)

    def ended(self) -> tuple[int, list[str]]:
        """Wait for the end; return the exit status and the kinds of lines logged since the start."""
        lines = self.log.read().splitlines()
        return self.child.wait(TIMEOUT_S), [json.loads(line)["kind"] for line in lines if line.startswith("{")]


def all_end(processes: Iterable[psutil.Process]) -> bool:
    """Wait until none of the processes runs; one that nobody has asked for its status yet has ended, too."""
    left = list(processes)
    return wait_until(lambda: all(_has_ended(each) for each in left), TIMEOUT_S)


def _has_ended(started: psutil.Process) -> bool:
    try:
        return not started.is_running() or started.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

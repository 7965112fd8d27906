"""Processes that die with the one that started them, and the report of their start."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from unified_cache.errors import ConfigError, StorageError

__all__ = ["PYTHON", "STOP_SIGNALS", "Child", "StartReport", "report_stream", "wait_until"]

POLL_S = 0.01
LOG_TAIL_BYTES = 2048

TETHER = Path(__file__).with_name("tether.py")
ROOT = Path(__file__).parents[2]
"""Working directory of this package's programs: ``python -m`` finds there the package that this process imported."""

PYTHON = (sys.executable, "-m")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a process of ours to end. Processes block and await them, so that no call is interrupted."""


@dataclass(frozen=True, slots=True)
class StartReport:
    """Result of starting a process. ``failure`` is empty if it started; with ``refused`` trying again cannot help."""

    failure: str = ""
    refused: bool = False

    def send(self, stream: int) -> None:
        """Write to the file descriptor from ``report_stream``, as one line, and close it.

        Raises:
            BrokenPipeError: the process that waited for the report is gone.
        """
        try:
            os.write(stream, (json.dumps(asdict(self)) + "\n").encode())
        finally:
            os.close(stream)

    @classmethod
    def read(cls, line: bytes) -> "StartReport":
        """Read a report that ``send`` wrote."""
        return cls(**json.loads(line))

    def check(self) -> None:
        """Raise the failure that is reported, if there is one.

        Raises:
            ConfigError: the process refused its settings.
            StorageError: the process failed; trying again may help.
        """
        if self.refused:
            raise ConfigError(self.failure)
        if self.failure:
            raise StorageError(self.failure, retryable=True)


def report_stream() -> int:
    """Take standard output for the report alone: whatever else prints goes to standard error from now on."""
    stream = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return stream


def wait_until(reached: Callable[[], bool], timeout_s: float) -> bool:
    """Ask every 10 ms, for at most ``timeout_s``; tell whether it was reached."""
    deadline_s = time.monotonic() + timeout_s
    while not reached():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(POLL_S)
    return True


class Child:
    """A process in a session of its own, killed by the kernel if the thread that started it dies.

    ``name`` appears in logs and messages; ``address`` is how other processes reach it.
    """

    def __init__(self, name: str, address: str, popen: "subprocess.Popen[bytes]", log: Path | None) -> None:
        self.name = name
        self.address = address
        self._popen = popen
        self._log = log

    @classmethod
    def start(
        cls,
        name: str,
        address: str,
        command: Sequence[str],
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> "Child":
        """Run ``command``; its output is appended to ``log``, or goes to our standard error.

        A program of this package reports on its standard output, see ``await_report``.
        """
        tethered = (sys.executable, "-I", "-S", str(TETHER), str(os.getpid()), *command)
        return cls(name, address, _popen(tethered, log, environment, reports=tuple(command[:2]) == PYTHON), log)

    @classmethod
    def start_detached(cls, name: str, program: Sequence[str], *, log: Path) -> "Child":
        """Run a module of this package, with arguments, in a process that outlives this one."""
        return cls(name, "", _popen((*PYTHON, *program), log, None, reports=True), log)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """Exit status, the negative number of the signal that killed it, or None while it lives."""
        return self._popen.poll()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended; one that is stopped lives."""
        return self.status is None

    def await_report(self, timeout_s: float) -> None:
        """Wait until the program reports a good start; on any failure it is killed.

        Raises:
            ConfigError: the program refuses its settings.
            StorageError: it failed, ended, or did not report in time.
        """
        try:
            line = self._first_line(timeout_s)
            if not line:
                raise StorageError(self.ending(), retryable=True)
            StartReport.read(line).check()
        except BaseException:
            self.kill()
            raise

    def ending(self) -> str:
        """Say how it ended, with the last line of its log; or that it still runs."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(1)
        if self.is_alive:
            return f"{self.name} (process {self.pid}) still runs"
        return f"{self.name} ended with status {self.status}{self._last_line()}"

    def kill(self) -> None:
        """Send SIGKILL and wait for the end, which is at once; one that has ended stays so."""
        self._popen.kill()
        self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()

    def release(self) -> None:
        """Let a detached process live on after this one; it is not waited for."""
        self._popen.returncode = 0  # otherwise Popen complains, at its end, that nobody waits for the process

    def stop(self) -> None:
        """Send SIGSTOP: it holds its ports and memory, and answers nobody."""
        self._popen.send_signal(signal.SIGSTOP)

    def cont(self) -> None:
        """Send SIGCONT, after ``stop``."""
        self._popen.send_signal(signal.SIGCONT)

    def terminate(self, timeout_s: float) -> int:
        """Send SIGTERM, kill what still runs after ``timeout_s``; return the exit status."""
        self._popen.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)
        self.kill()
        return self._popen.wait()

    def _first_line(self, timeout_s: float) -> bytes:
        """Return what the program reports; empty if it ended before that."""
        stream = self._popen.stdout
        assert stream is not None, f"{self.name} reports nothing"
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        deadline_s = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            if not poll.poll(max(left_s, 0) * 1000):
                raise StorageError(f"{self.name} did not report within {timeout_s:.1f} s", retryable=True)
            piece = os.read(stream.fileno(), 4096)
            if not piece:
                return b""
            line += piece
        stream.close()
        return line

    def _last_line(self) -> str:
        if self._log is None:
            return ""
        with self._log.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(log.tell() - LOG_TAIL_BYTES, 0))
            lines = log.read().decode(errors="replace").split("\n")
        return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


def _popen(
    command: Sequence[str], log: Path | None, environment: Mapping[str, str] | None, *, reports: bool
) -> "subprocess.Popen[bytes]":
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    stream = os.dup(sys.stderr.fileno()) if log is None else os.open(log, flags, 0o600)
    try:
        return subprocess.Popen(  # noqa: S603  # our own programs, no shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if reports else stream,
            stderr=stream,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
    finally:
        os.close(stream)

"""A command on a terminal of its own: what it shows there, an interruption as by Ctrl-C, and how it ends."""

import os
import pty
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.support.cluster import COMMAND

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")
CTRL_C = b"\x03"


class TerminalCommand:
    """A command whose standard streams are a terminal of 100 columns."""

    def __init__(self, *arguments: str | Path, environment: Mapping[str, str] = os.environ) -> None:
        self._master, terminal = pty.openpty()
        self.popen = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**environment, "COLUMNS": "100", "TERM": "xterm"},
            start_new_session=True,
            preexec_fn=_take_terminal,  # noqa: PLW1509  # the child has one thread
        )
        os.close(terminal)
        self.shown = ""

    def until(self, pattern: str) -> None:
        """Wait until what is shown, without controls, has a match of the pattern.

        Raises:
            AssertionError: the command ended.
        """
        try:
            while re.search(pattern, self.text) is None:
                assert self._read(), f"it ended without {pattern!r}: {self.text}"
        except BaseException:
            self.popen.kill()  # nobody ends it any more
            self.popen.wait()
            raise

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.write(self._master, CTRL_C)

    def ended(self) -> tuple[int, str]:
        """Wait for the end; return the status, and the last line that was left on the terminal."""
        while self._read():
            pass
        os.close(self._master)
        status = self.popen.wait()
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return status, lines[-1] if lines else ""

    @property
    def text(self) -> str:
        """All that was shown, without controls."""
        return CONTROL.sub("", self.shown)

    def _read(self) -> bool:
        """Take what is shown next; tell whether there was anything."""
        found = b""
        with suppress(OSError):  # as Linux says that nobody has the terminal open any more
            found = os.read(self._master, 1 << 16)
        self.shown += found.decode("utf-8", "replace")
        return bool(found)


def _take_terminal() -> None:
    """Make the terminal that of this session, so that Ctrl-C reaches it."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))

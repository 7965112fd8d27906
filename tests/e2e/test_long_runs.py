"""Commands that may take long: a bar on a terminal, nothing in a pipe, one line of what they had after Ctrl-C."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.cluster import COMMAND
from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, fill
from tests.support.store_calls import HELD_VARIABLE
from tests.support.terminal import TerminalCommand
from unified_cache.cli.progress import objects_watched
from unified_cache.core.page import Prompt
from unified_cache.storage_backends.url import open_storage

TRACE = ROOT / "traces" / "mooncake_conversation.jsonl.gz"
PROMPTS = 8

HELD = "tests.support.store_calls:held"
LONG: Mapping[str, tuple[tuple[str, ...], str]] = {
    "storage stat": ((f"{HELD}:scan,2:DIR/kept",), "stat .*[1-9][0-9,]* "),
    "storage verify": ((f"{HELD}:get,2:DIR/kept",), "verify .*[1-9][0-9,]* "),
    "replay": ((str(TRACE), "--device-pages", "100"), "replay .*hit ratio"),
}
"""One that scans, one that reads and one that replays, as all do over ``unified_cache.cli.progress``: arguments with
which it stops in the middle or takes long, and what its bar shows."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a directory with a store of two identities."""
    path = tmp_path_factory.mktemp("long")
    tokens = [list(range(n, n + PAGES * PAGE_SIZE)) for n in range(0, 1000 * PROMPTS, 1000)]
    for layout in ("full", "full_swa"):
        prompts = [Prompt.of(each, PAGE_SIZE, whole=True) for each in tokens]
        fill(open_storage(f"file:{path / 'kept'}"), LAYOUTS[layout], prompts)
    return str(path)


@pytest.mark.parametrize("command", LONG)
def test_a_long_command_shows_a_bar_and_says_what_it_had_when_interrupted(command: str, directory: str) -> None:
    arguments, shown = LONG[command]
    words = [each.replace("DIR", directory) for each in arguments]
    terminal = TerminalCommand(*command.split(), *words)
    terminal.until(shown)
    terminal.interrupt()
    status, line = terminal.ended()
    assert (status, line.startswith(f"interrupted: {command.split()[-1]} had ")) == (130, True), line
    assert "Traceback" not in terminal.text


def test_wherever_an_interruption_comes_between_the_first_bar_and_the_work_the_run_says_what_it_had() -> None:
    calls = _calls_after_the_first_bar(None)
    assert calls > 1
    for call in range(1, calls + 1):
        error_stream = sys.stderr
        with pytest.raises(KeyboardInterrupt, match="scrub had 0 of 96 objects"):
            _calls_after_the_first_bar(call)
        assert sys.stderr is error_stream


def _calls_after_the_first_bar(interrupted: int | None) -> int:
    """Count the calls that return between the first bar on a terminal and the work; interrupt one as it returns."""
    terminal = Terminal()
    calls = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        if event == "c_return" and "scrub" in terminal.getvalue():
            calls += 1
            if calls == interrupted:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        with objects_watched(terminal, "scrub", 96):
            sys.setprofile(None)
    finally:
        sys.setprofile(None)
    return calls


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_in_a_pipe_there_is_no_bar_and_the_one_line_alone(directory: str, tmp_path: Path) -> None:
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    (url,), _ = LONG["storage verify"]
    words = [*COMMAND, "storage", "verify", url.replace("DIR", directory), "--json"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, HELD_VARIABLE: str(fifo)}
    ) as child:
        assert fifo.read_bytes() == b"h"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (130, "")
    assert err.startswith("interrupted: verify had ")
    assert err.count("\n") == 1

"""Commands that may take long: a bar on a terminal, nothing in a pipe, one line of what they had after Ctrl-C."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.test_help import command_names
from tests.sources import ROOT
from tests.support.cluster import COMMAND, ask
from tests.support.held_store import HELD_VARIABLE
from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, fill
from tests.support.running_service import running
from tests.support.terminal import TerminalCommand
from tests.support.toy_completions import toy_server
from unified_cache.cli.progress import objects_watched
from unified_cache.core.page import Prompt
from unified_cache.storage_backends.url import open_storage

TRACE = ROOT / "traces" / "mooncake_conversation.jsonl.gz"
PROMPTS = 8

HELD = "tests.support.held_store:held"
LONG: Mapping[str, tuple[tuple[str, ...], str, str]] = {
    "storage stat": ((f"{HELD}:scan,2:DIR/kept",), "stat .*[1-9][0-9,]* ", "stat had "),
    "storage gc": ((f"{HELD}:scan,2:DIR/kept",), "gc .*[1-9][0-9,]* ", "gc had "),
    "storage verify": ((f"{HELD}:get,2:DIR/kept",), "verify .*[1-9][0-9,]* ", "verify had "),
    "storage scrub": ((f"{HELD}:get,2:DIR/kept",), "scrub .*[1-9][0-9,]* ", "scrub had "),
    "storage clear": ((f"{HELD}:scan,4:DIR/cleared", "--all", "--yes"), "clear .*[1-9][0-9,]* ", "clear had "),
    "backup": ((f"{HELD}:get,2:DIR/kept", "file:DIR/copy"), "backup .*[1-9][0-9,]* ", "backup had "),
    "prefetch": (
        (f"{HELD}:get,2:DIR/kept", "--into", "file:DIR/warm", "--tokens", "DIR/prompts", "--identity", "FULL"),
        "prefetch .*[1-9][0-9,]* ",
        "prefetch had ",
    ),
    "explain": (
        ("--storage", f"{HELD}:exists,3:DIR/kept", "--tokens", "DIR/prompts", "--identity", "FULL"),
        "explain .*[1-9][0-9,]* ",
        "explain had ",
    ),
    "conformance": (("tests.support.held_store:third_open",), "conformance .*[1-9][0-9,]* ", "conformance had "),
    "faithful": (
        ("http://TOY", "--facts", "3", "--device-tokens", "1000000000"),
        "faithful .*[1-9] .*host",
        "faithful had ",
    ),
    "trace info": (("FIFO",), "read .*[1-9][0-9,]* ", "read had "),
    "replay": ((str(TRACE), "--device-pages", "100"), "replay .*hit ratio", "replay had "),
    "plan": (
        (str(TRACE), "--limit", "3000", "--model", "gpt-oss-120b", "--sweep", "host=256GiB..2TiB:90"),
        "plan .*hit ratio",
        "plan had ",
    ),
    "demo": (("--model", "tiny-llama", "--report", "DIR/demo"), "question 2 .*s ", "demo had "),
}
"""Arguments with which the command stops in the middle or takes long, what its bar shows, and the line after Ctrl-C."""

UNTIL_ENDED = frozenset({"serve"})
"""Commands that go on until somebody ends them: their log is their progress."""

SHORT = frozenset(
    {
        *("layout", "samples", "config check"),
        *("ping", "drain"),
        *("token new", "token list", "token revoke"),
    }
)
"""Commands that read one file, or ask each server once."""


def test_every_command_is_long_short_or_goes_on_until_ended() -> None:
    assert set(command_names()) == SHORT | UNTIL_ENDED | LONG.keys()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield what stands for the words of ``LONG``: stores of three identities, prompts, and a service."""
    path = tmp_path_factory.mktemp("long")
    tokens = [list(range(n, n + PAGES * PAGE_SIZE)) for n in range(0, 1000 * PROMPTS, 1000)]
    prompts = [Prompt.of(each, PAGE_SIZE, whole=True) for each in tokens]
    for name in ("kept", "cleared", "gone"):
        for layout in ("full", "full_swa"):
            fill(open_storage(f"file:{path / name}"), LAYOUTS[layout], prompts)
    (path / "prompts").write_text("\n".join(map(json.dumps, tokens)), encoding="utf-8")
    found = json.loads(ask("storage", "stat", f"file:{path / 'kept'}", "--json").out)["identities"]
    full = next(each["identity"] for each in found if len(each["pools"]) == 1)
    with running(storage=f"file:{path / 'served'}", access={"local_role": "admin"}) as server:
        url = f"grpc://{server.address}"
        fill(open_storage(url), LAYOUTS["full"], prompts)
        with toy_server() as toy:
            yield {"DIR": str(path), "URL": url, "FULL": full, "http://TOY": toy}


def filled_in(argument: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        argument = argument.replace(word, value)
    return argument


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[str]:
    """Yield a FIFO that holds the beginning of a trace, and does not end."""
    fifo = tmp_path / "fifo.jsonl"
    os.mkfifo(fifo)
    ended = os.open(fifo, os.O_RDWR)
    request = '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
    feeder = subprocess.Popen(["sh", "-c", f"yes '{request.strip()}' | head -n 1024 > {fifo}"])
    yield str(fifo)
    feeder.kill()
    feeder.wait()
    os.close(ended)


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=pytest.mark.long if name == "demo" else ()) for name in LONG]
)
def test_a_long_command_shows_a_bar_and_says_what_it_had_when_interrupted(
    command: str, place: dict[str, str], fed: str, tmp_path: Path
) -> None:
    arguments, shown, said = LONG[command]
    json_file = tmp_path / "figures.json"
    words = {**place, "FIFO": fed}
    terminal = TerminalCommand(
        *command.split(), *(filled_in(each, words) for each in arguments), "--json-file", json_file
    )
    terminal.until(shown)
    terminal.interrupt()
    status, line = terminal.ended()
    assert (status, line.startswith(f"interrupted: {said}")) == (130, True), line
    assert "Traceback" not in terminal.text
    assert not list(tmp_path.glob(".*.part"))
    assert command == "plan" or not json_file.exists()
    assert not (Path(place["DIR"]) / "cut.jsonl").exists()


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


def test_in_a_pipe_there_is_no_bar_and_the_one_line_alone(place: dict[str, str], tmp_path: Path) -> None:
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    arguments, _, said = LONG["storage verify"]
    words = [*COMMAND, "storage", "verify", *(filled_in(each, place) for each in arguments), "--json"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, HELD_VARIABLE: str(fifo)}
    ) as child:
        assert fifo.read_bytes() == b"h"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (130, "")
    assert err.startswith(f"interrupted: {said}")
    assert err.count("\n") == 1

"""Habits of a command line: -h, completion, a log level, help after a slip, and no word of what is secret."""

import logging
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.cluster import COMMAND, ask
from tests.support.offline import LAYOUTS, PAGE_SIZE, fill, open_store
from unified_cache.core.page import Prompt

TIMEOUT_S = 60


@pytest.mark.parametrize("arguments", [(), ("storage",), ("storage", "stat"), ("replay",)])
def test_h_is_help(arguments: tuple[str, ...]) -> None:
    short, long = ask(*arguments, "-h"), ask(*arguments, "--help")
    assert (short.status, short.out) == (0, long.out)
    assert "Usage" in short.out


@pytest.mark.parametrize(
    ("words", "expected"), [("unified-cache stor", "storage"), ("unified-cache storage st", "stat")]
)
def test_a_shell_can_complete_commands(words: str, expected: str) -> None:
    asked = {"_UNIFIED_CACHE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    ended = subprocess.run(
        COMMAND, check=False, capture_output=True, text=True, env={**os.environ, **asked}, timeout=TIMEOUT_S, cwd=ROOT
    )
    assert expected in ended.stdout.split(), ended.stderr


@pytest.fixture
def library_log() -> Iterator[None]:
    logger = logging.getLogger("unified_cache")
    before = (logger.handlers, logger.level)
    yield
    logger.handlers, level = before
    logger.setLevel(level)


@pytest.mark.usefixtures("library_log")
@pytest.mark.parametrize(("level", "is_shown"), [("warning", True), ("debug", True), ("error", False)])
def test_the_log_is_shown_from_a_level_on(level: str, is_shown: bool) -> None:
    said = ask("--log-level", level, "storage", "stat", "grpc://127.0.0.1:1?timeout_s=2")
    assert said.status == 1
    assert ("WARNING unified_cache.storage_backends.common.breaker: a breaker opens" in said.err) == is_shown


@pytest.mark.parametrize("group", ["storage", "token", "config"])
def test_a_group_without_a_command_prints_its_help_and_no_error_without_words(group: str) -> None:
    said = ask(group)
    assert (said.status, said.err) == (2, "")
    assert "Usage" in said.out


@pytest.mark.parametrize("words", ["conformance keys_only: --keys-only", "--help", "storage stat --help", "--version"])
def test_whoever_stops_reading_ends_a_command_as_shells_expect(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [*COMMAND, *words.split()]
    ended = subprocess.run(command, check=False, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, timeout=TIMEOUT_S)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"" if "help" in words else ended.stderr)


@pytest.mark.parametrize(
    "words",
    [
        "nothing",
        "replay",
        "replay none.jsonl",
        "plan none.jsonl --model gpt-oss-120b --hardware none.toml",
        "demo none.txt --model tiny-llama",
        "layout none",
        "samples samples.toml/there",
        "explain --storage file:kv --tokens none.json",
        "storage stat file:none",
        "storage clear file:kv",
        "storage clear file:kv --identity '' --yes",
        "storage stat file:kv --identity ''",
        "backup file:kv file:kv",
        "config check --config none.toml",
        "config check --config pipe",
        "serve --config pipe",
        "ping nowhere",
        "--log-level loud",
    ],
)
def test_what_cannot_be_asked_ends_with_status_2_and_one_line(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(open_store("file", tmp_path / "kv"), LAYOUTS["full"], [Prompt.of(range(PAGE_SIZE), PAGE_SIZE)])
    Path("samples.toml").touch()
    os.mkfifo("pipe")
    said = ask(*shlex.split(words))
    assert (said.status, said.out, said.err.count("\n")) == (2, "", 1), said.err


@pytest.mark.parametrize("words", ["conformance", "storage stat", "storage verify", "serve --storage"])
@pytest.mark.parametrize(
    "store",
    [
        *("of_one", "away:there", "Speechless", "Confused", "Failing", "NoManifests", "NoScan", "NoCount", "NoClose"),
        *("os.path:join", "tests.support.third_party_absent:x"),
    ],
)
def test_a_store_that_goes_wrong_ends_a_command_with_one_line(words: str, store: str) -> None:
    opens = {"NoManifests", "NoScan", "NoCount", "NoClose"}
    if (words.startswith("serve") and store in opens) or (words.startswith("storage") and store == "NoCount"):
        pytest.skip("it does what was asked")
    said = ask(*words.split(), store if "." in store else f"tests.support.third_party:{store}")
    assert (said.status in (1, 2), said.err.count("\n")) == (True, 1), said.err


KEY = "9f" * 32
SECRET = "wJalrXUtnFEMI/K7MDENG"
SECRET_URLS = (
    f"file:nowhere#keys={KEY}",
    f"file:nowhere#keys=file:{KEY}",
    f"file:nowhere#keys=env:{KEY}",
    f"file:nowhere#compress=lossless&keys={SECRET}",
    f"s3a://AKIA:{SECRET}@bucket",
    f"s3://AKIA:{SECRET}@bucket",
    f"grpc://user:{SECRET}@host",
    f"grpc://host:1?token={SECRET}",
    f"mooncake://user:{SECRET}@host",
    f"no.such.module:factory:redis://:{SECRET}@host?password={SECRET}",
    f"os.path:no_such:{SECRET}@host",
)


@pytest.mark.threat("leaked credentials")
@pytest.mark.parametrize("url", SECRET_URLS)
@pytest.mark.parametrize(
    "words",
    [
        "storage stat URL --json",
        "storage verify URL",
        "storage clear URL --all --yes",
        "storage gc URL",
        "backup URL file:there",
        "backup file:there URL",
        "backup URL URL",
        "explain --storage URL --tokens /dev/null",
        "conformance URL",
        "config check",
        "ping URL",
    ],
)
def test_no_command_prints_what_is_secret_in_the_url_of_a_store(
    words: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNIFIED_CACHE_SERVE_STORAGE", url)
    said = ask(*(url if word == "URL" else word for word in words.split()))
    for secret in (KEY, SECRET):
        assert secret not in said.out + said.err

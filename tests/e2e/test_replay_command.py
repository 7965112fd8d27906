"""The replay as a command: exit status, standard error, and what is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.cluster import ask
from tests.support.terminal import TerminalCommand

TRACE = ROOT / "traces" / "mooncake_conversation.jsonl.gz"
COMMAND = (sys.executable, "-c", "from unified_cache.cli.main import main; main()")
TIMEOUT_S = 120

SMALL = ("--device-pages", "300", "--host-pages", "600", "--page-bytes", "512")

MEDIUM = ("--device-pages", "200", "--host-pages", "4000", "--page-bytes", "512")

IS_ROOT = os.geteuid() == 0


def unified_cache(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)


def reason_of(standard_error: str) -> str:
    """Return the one line that says why."""
    lines = standard_error.splitlines()
    assert len(lines) == 1, standard_error
    assert lines[-1].startswith("error: ")
    return lines[-1]


def refused(status: int, *arguments: str | Path) -> str:
    """Run a command that must fail; return its one line. Here: a process of its own would import torch for each."""
    result = ask(*arguments)
    assert result.status == status, result.err
    assert result.out == ""
    return reason_of(result.err)


@pytest.fixture
def bad_trace(tmp_path: Path) -> Path:
    path = tmp_path / "bad.jsonl"
    good = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}'
    path.write_text(f"{good}\n{good.replace('[1, 2]', '[1]')}\n", encoding="utf-8")
    return path


def test_the_table_the_json_and_the_page_tell_of_one_run(tmp_path: Path) -> None:
    report = tmp_path / "deep" / "report"
    result = ask(
        *("replay", TRACE, "--limit", "400", *MEDIUM, "--storage", f"file:{tmp_path}/store"),
        *("--report", report, "--json-file", tmp_path / "run.json"),
    )
    assert result.status == 0, result.err
    found = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert found["requests"] == 400
    assert set(found["hit_blocks"]) == {"device", "host", "storage"}
    assert min(found["hit_blocks"].values()) > 0
    assert found["block_hit_ratio"] == sum(found["hit_blocks"].values()) / found["blocks"]
    assert found["pages_verified"] == sum(found["hit_blocks"].values())
    assert (found["wrong_pages"], found["leaked_slots"]) == (0, 0)
    assert set(found["bytes_moved"]) == {"backup", "load", "store", "prefetch"}
    assert {"token_hit_ratio", "seconds", "requests_per_s", "settings", "environment", "series"} <= set(found)
    assert found["token_hit_ratio"] == sum(found["hit_tokens"].values()) / found["tokens"]
    for tier in found["hit_tokens"]:
        assert re.search(rf"^ {tier} .* {found['hit_tokens'][tier]:,} ", result.out, re.MULTILINE)
    assert f"{found['pages_verified']:,} pages verified, 0 wrong, 0 slots leaked" in result.out
    assert max(len(line) for line in result.out.splitlines()) <= 90
    assert [path.name for path in report.iterdir()] == ["index.html"]
    page = (report / "index.html").read_text(encoding="utf-8")
    assert f"<td>{found['hit_tokens']['storage']:,}</td>" in page
    assert f"{found['block_hit_ratio']:.2%} of {found['blocks']:,}" in page
    assert f"<h1>{found['token_hit_ratio']:.2%} of the tokens asked for were handed back" in page
    assert "%" not in result.err, "no progress where nobody watches"


def test_json_on_standard_output_is_alone_there() -> None:
    result = unified_cache("replay", TRACE, "--limit", "20", *SMALL, "--no-bytes", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["pages_verified"] == 0


def test_version_and_help_answer_and_no_arguments_ask_for_help() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", unified_cache("--version").stdout)
    for arguments in (("--help",), (), ("replay", "--help")):
        result = ask(*arguments)
        assert result.status == 0, result.err
        assert "replay" in result.out


USAGE = (
    (("nonsense",), "nonsense"),
    (("--nonsense",), "--nonsense"),
    (("replay",), "trace"),
    (("replay", TRACE, "--nonsense"), "--nonsense"),
    (("replay", TRACE, "--device-pages", "many"), "'--device-pages'"),
    (("replay", TRACE, "--device-pages", "0"), "--device-pages must be at least 1, found 0"),
    (("replay", TRACE, "--device-pages", "-5"), "--device-pages must be at least 1, found -5"),
    (("replay", TRACE, "--host-pages", "-1"), "--host-pages must be at least 0, found -1"),
    (("replay", TRACE, "--page-bytes", "0"), "--page-bytes must be at least 1, found '0'"),
    (("replay", TRACE, "--page-bytes", "4 furlongs"), "--page-bytes must be bytes as in 4096, 500MB or 4GiB"),
    (("replay", TRACE, "--page-bytes", "1TiB"), "the tiers need"),
    (("replay", TRACE, "--host-pages", "2000000000"), "the tiers need"),
    (("replay", TRACE, "--storage", "memory:", "--storage-bytes", "900TB"), "the tiers need"),
    (("replay", TRACE, "--storage", "memory:", "--storage-bytes", "-1"), "--storage-bytes must be bytes"),
    (("replay", TRACE, "--page-size", "0"), "--page-size must be at least 1, found 0"),
    (("replay", TRACE, "--evict-device", "lifo"), "'--evict-device'"),
    (("replay", TRACE, "--host-pages", "0", "--write", "back"), "the write policy back needs host memory, found none"),
    (("replay", TRACE, "--prefetch-host-share", "0"), "host_share must be in (0, 1], found 0"),
    (("replay", TRACE, "--storage", "none", "--storage-bytes", "1GiB"), "storage bytes cap a store"),
    (("compare", ROOT / "README.md", ROOT / "README.md"), "README.md must hold the JSON of a replay, found something"),
    (("replay", TRACE, "--limit", "0"), "--limit must be at least 1, found 0"),
    (("replay", "/nowhere/trace.jsonl"), "/nowhere/trace.jsonl: expected a trace, found no such file"),
    (("replay", "/"), "/: expected a trace, found a directory"),
    (("replay", ROOT / "README.md"), "README.md:1: expected a JSON object"),
)


@pytest.mark.parametrize(("arguments", "reason"), USAGE)
def test_what_cannot_be_asked_for_is_refused_in_one_line(arguments: tuple[str | Path, ...], reason: str) -> None:
    assert reason in refused(2, *arguments)


def test_a_malformed_trace_touches_neither_store_nor_report(bad_trace: Path) -> None:
    around = bad_trace.parent
    reason = refused(2, "replay", bad_trace, "--storage", f"file:{around}/s", "--report", around / "r")
    assert f"{bad_trace}:2: expected 2 hash_ids for an input_length of 600" in reason
    assert list(around.iterdir()) == [bad_trace]


def test_an_unknown_storage_scheme_is_refused_in_one_line() -> None:
    assert "must begin with one of" in refused(2, "replay", TRACE, *SMALL, "--storage", "nonsense:x")
    assert "must begin with one of" in refused(2, "replay", TRACE, *SMALL, "--storage", "nonsense:x", "--no-bytes")


def test_a_report_without_jinja2_says_what_to_install_before_the_run() -> None:
    code = f"import sys; sys.modules['jinja2'] = None; {COMMAND[2]}"
    command = [sys.executable, "-c", code, "replay", str(TRACE), *SMALL, "--report", "/nowhere/report"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert result.returncode == 2
    assert result.stderr.startswith("error: --report needs jinja2")
    assert "pip install 'unified-cache[report]'" in result.stderr
    assert result.stderr.count("\n") == 1


# ---- failures ------------------------------------------------------------------------------------------------


def test_a_storage_directory_that_cannot_be_made_is_a_failure() -> None:
    # Nobody can make a directory there, not even root.
    assert "/sys/unified-cache" in refused(1, "replay", TRACE, *SMALL, "--storage", "file:/sys/unified-cache")


def test_a_storage_directory_that_holds_something_else_is_a_failure_and_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear", encoding="utf-8")
    assert "must be empty or a file store" in refused(1, "replay", TRACE, *SMALL, "--storage", f"file:{tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.skipif(not IS_ROOT, reason="only root can give a directory away")
def test_a_storage_directory_of_somebody_else_is_a_failure_and_stays_as_it_was(tmp_path: Path) -> None:
    os.chown(tmp_path, 54321, 54321)
    assert "must belong to user 0" in refused(1, "replay", TRACE, *SMALL, "--storage", f"file:{tmp_path}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--report", "--json-file"])
def test_results_that_could_not_be_written_are_refused_before_the_run(option: str) -> None:
    reason = refused(1, "replay", TRACE, *SMALL, option, "/sys/unified-cache/result")
    assert "/sys/unified-cache" in reason


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(path)]
    try:
        made = subprocess.run(mount, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if made.returncode:
        pytest.skip(f"a file system of 1 MiB cannot be mounted here: {made.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True, timeout=TIMEOUT_S)


def test_a_disk_without_room_costs_hits_which_is_said_and_leaves_nothing_half_written(small_disk: Path) -> None:
    # A store in a directory of its own; the file system's root has the mount's owner and mode too.
    result = ask("replay", TRACE, "--limit", "200", *SMALL, "--storage", f"file:{small_disk}/store")
    assert result.status == 0, result.err
    assert "pages were backed up and not stored: the store had no room" in result.out
    assert "0 wrong, 0 slots leaked" in result.out
    assert [path for path in (small_disk / "store" / "tmp").rglob("*") if path.is_file() and path.name != "lock"] == []
    assert [path for path in small_disk.rglob("*.kv") if path.is_file()] == []


def started(*arguments: str | Path) -> TerminalCommand:
    """Start a run and wait until it has served a tenth of its thousand requests."""
    run = TerminalCommand(*arguments)
    run.until("replay .*[1-9][0-9]{2} of 1,000 .*hit ratio")
    return run


def test_a_run_killed_midway_leaves_a_store_that_serves_the_next_one(tmp_path: Path) -> None:
    arguments = ("replay", TRACE, "--limit", "1000", *SMALL, "--storage", f"file:{tmp_path}/store")
    run = started(*arguments)
    run.popen.kill()
    assert run.ended()[0] == -signal.SIGKILL
    again = ask(*arguments, "--json")
    assert again.status == 0, again.err
    found = json.loads(again.out)
    assert found["wrong_pages"] == 0
    assert found["leaked_slots"] == 0
    # The first tenth of the requests comes from the store alone, also what the trace had not asked for before.
    first = found["series"][0]
    assert first["hit_blocks"]["storage"] > first["seen_blocks"]

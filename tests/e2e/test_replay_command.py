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
from tests.support.cluster import COMMAND, ask
from tests.support.terminal import TerminalCommand

TRACE = ROOT / "traces" / "mooncake_conversation.jsonl.gz"
TIMEOUT_S = 120

SMALL = ("--device-pages", "300", "--host-pages", "600", "--page-bytes", "512")

MEDIUM = ("--device-pages", "200", "--host-pages", "4000", "--page-bytes", "512")

IS_ROOT = os.geteuid() == 0


def refused(status: int, *arguments: str | Path) -> str:
    """Run a command that must fail; return its one line."""
    result = ask(*arguments)
    assert (result.status, result.out, result.err.count("\n")) == (status, "", 1), result.err
    return result.error


@pytest.fixture
def bad_trace(tmp_path: Path) -> Path:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n', encoding="utf-8")
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
    assert found["token_hit_ratio"] == sum(found["hit_tokens"].values()) / found["tokens"]
    assert max(len(line) for line in result.out.splitlines()) <= 90
    assert [path.name for path in report.iterdir()] == ["index.html"]
    page = (report / "index.html").read_text(encoding="utf-8")
    assert f"<td>{found['hit_tokens']['storage']:,}</td>" in page
    assert f"{found['block_hit_ratio']:.2%} of {found['blocks']:,}" in page
    assert f"<h1>{found['token_hit_ratio']:.2%} of the tokens asked for were handed back" in page
    assert "%" not in result.err, "no progress where nobody watches"


def test_version_and_help_answer_and_no_arguments_ask_for_help() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", ask("--version").out)
    for arguments in (("--help",), (), ("replay", "--help")):
        result = ask(*arguments)
        assert result.status == 0, result.err
        assert "replay" in result.out


def test_a_malformed_trace_touches_neither_store_nor_report(bad_trace: Path) -> None:
    around = bad_trace.parent
    assert str(bad_trace) in refused(2, "replay", bad_trace, "--storage", f"file:{around}/s", "--report", around / "r")
    assert list(around.iterdir()) == [bad_trace]


def test_a_report_without_jinja2_says_what_to_install_before_the_run() -> None:
    code = f"import sys; sys.modules['jinja2'] = None; {COMMAND[2]}"
    words = [sys.executable, "-c", code, "replay", str(TRACE), *SMALL, "--report", "/nowhere/report"]
    result = subprocess.run(words, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert result.returncode == 2
    assert result.stderr.startswith("error: --report needs jinja2")
    assert "pip install 'unified-cache[report]'" in result.stderr
    assert result.stderr.count("\n") == 1


# ---- failures ------------------------------------------------------------------------------------------------


def test_a_storage_directory_that_holds_something_else_is_a_failure_and_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear", encoding="utf-8")
    assert "must be empty or a file store" in refused(1, "replay", TRACE, *SMALL, "--storage", f"file:{tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.skipif(not IS_ROOT, reason="only root can give a directory away")
def test_a_storage_directory_of_somebody_else_is_a_failure_and_stays_as_it_was(tmp_path: Path) -> None:
    os.chown(tmp_path, 54321, 54321)
    assert "must belong to user 0" in refused(1, "replay", TRACE, *SMALL, "--storage", f"file:{tmp_path}")
    assert list(tmp_path.iterdir()) == []


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

"""The guide to the live page: its program runs, and its command starts a service that has one."""

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.sources import ROOT
from tests.support.cluster import RunningCommand
from tests.support.documents import code_blocks, shell_commands
from tests.support.waiting import wait_until
from unified_cache.observe.live.page import LivePage

GUIDE = (ROOT / "docs" / "live.md").read_text(encoding="utf-8")
START_S = 60.0
STORE = "file:/var/cache/kv"


def figures(page: str) -> Any:
    with urllib.request.urlopen(f"{page}figures.json", timeout=START_S) as answer:
        return json.loads(answer.read())


def test_the_program_of_the_guide_serves_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = (block.text for block in code_blocks(GUIDE) if block.language == "python")
    names: dict[str, object] = {}
    exec(compile(program, "docs/live.md", "exec"), names)
    page = names["page"]
    assert isinstance(page, LivePage)
    with page:
        assert page.url in capsys.readouterr().out
        capacities = {(each["tier"], each["component"]): each["capacity"] for each in figures(page.url)["components"]}
        assert capacities == {("device", "full"): 64, ("host", "full"): 256}


def test_the_command_of_the_guide_starts_a_service_with_a_page(tmp_path: Path) -> None:
    (serve,) = [arguments[1:] for arguments in shell_commands(GUIDE)]
    here = [f"file:{tmp_path / 'kv'}" if each == STORE else "0" if each == "8765" else each for each in serve]
    running = RunningCommand(*here, "--listen", "127.0.0.1:0")
    try:
        assert wait_until(lambda: any('"live_page"' in line for line in running.lines), START_S), running.lines
        (line,) = (line for line in running.lines if '"live_page"' in line)
        found = re.search(r"127\.0\.0\.1:(\d+)", line)
        assert found is not None
        assert figures(f"http://127.0.0.1:{found[1]}/")["kind"] == "service"
    finally:
        running.popen.terminate()
        assert running.end() == 0

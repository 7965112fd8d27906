"""The guide to the live page: its program runs, and its commands show a service that its command has started."""

import json
import re
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.cluster import RunningCommand, ask
from tests.support.documents import code_blocks, shell_commands
from unified_cache.cluster.child import wait_until
from unified_cache.live.page import LivePage

GUIDE = (ROOT / "docs" / "live.md").read_text(encoding="utf-8")
START_S = 60.0
PAGE = "http://127.0.0.1:8765"
STORE = "file:/var/cache/kv"


def test_the_program_of_the_guide_serves_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = (block.text for block in code_blocks(GUIDE) if block.language == "python")
    names: dict[str, object] = {}
    exec(compile(program, "docs/live.md", "exec"), names)
    page = names["page"]
    assert isinstance(page, LivePage)
    with page:
        assert page.url in capsys.readouterr().out
        said = ask("top", page.url, "--once", "--json")
        lanes = {(lane["tier"], lane["component"]): lane["capacity"] for lane in json.loads(said.out)["lanes"]}
        assert lanes == {("device", "full"): 64, ("host", "full"): 256}


def test_the_commands_of_the_guide_show_a_service(tmp_path: Path) -> None:
    serve, *shown = [arguments[1:] for arguments in shell_commands(GUIDE)]
    here = [f"file:{tmp_path / 'kv'}" if each == STORE else "0" if each == "8765" else each for each in serve]
    running = RunningCommand(*here, "--listen", "127.0.0.1:0")
    try:
        assert wait_until(lambda: any('"live_page"' in line for line in running.lines), START_S), running.lines
        (line,) = (line for line in running.lines if '"live_page"' in line)
        found = re.search(r"port (\d+)", line)
        assert found is not None
        page = f"http://127.0.0.1:{found[1]}"
        ends = [ask(*(page if each == PAGE else each for each in arguments)) for arguments in shown]
        # The first shows figures until it is interrupted, on a terminal, which a test does not have.
        assert [(said.status, "needs a terminal" in said.err) for said in ends] == [(2, True), (0, False)]
        assert json.loads(ends[1].out)["kind"] == "service"
    finally:
        running.popen.terminate()
        assert running.end() == 0

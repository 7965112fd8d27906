"""The guide to traces: its program records, and its commands look at and replay what was recorded."""

from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.cluster import ask
from tests.support.documents import code_blocks, shell_commands
from tests.support.live import settings_of_a_small_replay, trace_of
from unified_cache.sizing.replay.player import Player
from unified_cache.storage_backends.memory import KeysOnlyStorage

GUIDE = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8")
SERVING = "# ... the engine serves requests ..."
REQUESTS = 100


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Run the program of the guide over a replay, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    (program,) = (block.text for block in code_blocks(GUIDE) if block.language == "python")
    before, found, after = program.partition(SERVING)
    assert found
    plan = settings_of_a_small_replay().plan
    with Player.open(plan, KeysOnlyStorage(plan.storage_bytes, plan.objects())) as player:
        names: dict[str, object] = {"cache": player.cache}
        exec(compile(before, "docs/traces.md", "exec"), names)
        for request in trace_of(REQUESTS):
            player.serve(request)
        player.wait_all()
        exec(compile(after, "docs/traces.md", "exec"), names)
    assert f"{REQUESTS} requests written, 0 dropped, 0 not written" in capsys.readouterr().out
    return tmp_path


def test_the_program_and_the_commands_of_the_guide_run(recorded: Path) -> None:
    for arguments in shell_commands(GUIDE):
        said = ask(*arguments[1:])
        assert said.status == 0, (arguments, said.err)
    assert {each.name for each in recorded.iterdir()} == {"trace.jsonl.gz", "out"}

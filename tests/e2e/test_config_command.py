"""Commands do as a file, variables and flags say; ``config check`` names the place of each value."""

import json
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.cluster import ask

TRACE = ROOT / "traces" / "mooncake_conversation_1000.jsonl.gz"


def test_a_replay_does_what_file_variable_and_flag_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "device_pages = 300\nhost_pages = 0\nlimit = 20\n[eviction]\ndevice = 'priority'\n[replay]\n"
    text += "bytes = false\nreport = 'out'\nexplain = false\n"
    Path("unified-cache.toml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("UNIFIED_CACHE_REPLAY_LIMIT", "30")
    said = ask("replay", TRACE, "--device-pages", "200", "--json")
    assert said.status == 0, said.err
    found = json.loads(said.out)
    settings = found["settings"]
    assert (settings["device_pages"], settings["host_pages"], settings["with_bytes"]) == (200, 0, False)
    assert settings["policies"]["evict_device"] == "priority"
    assert (found["requests"], found["missed"]) == (30, None)
    assert (tmp_path / "out" / "index.html").exists()
    checked = json.loads(ask("config", "check", "--json").out)["settings"]
    places = {each["place"]: each["sections"] for each in checked if each["name"] == "limit"}
    assert places == {"UNIFIED_CACHE_REPLAY_LIMIT": ["replay"], "unified-cache.toml:3": ["plan"]}

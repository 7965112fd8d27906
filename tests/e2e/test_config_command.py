"""Commands do as a file, variables and flags say; ``config check`` names the place of each value."""

import json
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.cluster import ask

TRACE = ROOT / "traces" / "mooncake_conversation_1000.jsonl.gz"


def test_a_service_and_a_cache_do_what_file_variable_and_flag_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "storage = 'memory:'\nstorage_bytes = '2GiB'\n[guard]\ndeadline_s = 3\n[serve]\ninsecure = true\n"
    Path("unified-cache.toml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("UNIFIED_CACHE_SERVE_STORAGE_BYTES", "3GiB")
    said = ask("config", "check", "--all", "--json")
    assert said.status == 0, said.err
    settings = json.loads(said.out)["settings"]
    found = {(each["section"], each["name"]): (each["value"], each["place"]) for each in settings}
    assert found["serve", "storage_bytes"] == (3 << 30, "UNIFIED_CACHE_SERVE_STORAGE_BYTES")
    assert found["cache", "storage_bytes"] == (2 << 30, "unified-cache.toml")
    assert found["cache", "guard.deadline_s"] == found["serve", "guard.deadline_s"] == (3.0, "unified-cache.toml")
    assert (found["serve", "insecure"], found["serve", "listen"][1]) == ((True, "unified-cache.toml"), "default")


def test_a_replay_has_its_options_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("unified-cache.toml").write_text("storage = 'packed:kv'\n[eviction]\nhost = 'priority'\n", encoding="utf-8")
    monkeypatch.setenv("UNIFIED_CACHE_HOST_BYTES", "1GiB")
    options = ("--device-pages", "200", "--host-pages", "0", "--limit", "20", "--no-bytes")
    said = ask("replay", TRACE, *options, "--report", "out", "--json")
    assert said.status == 0, said.err
    found = json.loads(said.out)
    settings = found["settings"]
    assert (settings["device_pages"], settings["host_pages"]) == ({"full": 200}, {"full": 0})
    assert (settings["storage"], settings["with_bytes"], found["requests"]) == (None, False, 20)
    assert (tmp_path / "out" / "index.html").exists()

"""Commands do as a file, variables and flags say; ``config check`` names the place of each value."""

import json
import tomllib
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
    said = ask("serve", "--listen", "127.0.0.1:7", "--print-config")
    assert said.status == 0, said.err
    printed = tomllib.loads(said.out)
    assert (printed["storage"], printed["storage_bytes"], printed["listen"]) == ("memory:", 3 << 30, "127.0.0.1:7")
    assert (printed["guard"]["deadline_s"], printed["insecure"]) == (3.0, True)
    checked = json.loads(ask("config", "check", "--json").out)["settings"]
    places = {each["place"]: each["sections"] for each in checked if each["name"] == "storage_bytes"}
    assert places == {"UNIFIED_CACHE_SERVE_STORAGE_BYTES": ["serve"], "unified-cache.toml:2": ["cache"]}


def test_a_replay_has_its_options_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("unified-cache.toml").write_text("storage = 'packed:kv'\n[eviction]\nhost = 'priority'\n", encoding="utf-8")
    monkeypatch.setenv("UNIFIED_CACHE_HOST_BYTES", "1GiB")
    options = (
        "--device-pages",
        "200",
        "--host-pages",
        "0",
        "--evict-device",
        "priority",
        "--limit",
        "20",
        "--no-bytes",
    )
    said = ask("replay", TRACE, *options, "--report", "out", "--no-explain", "--json")
    assert said.status == 0, said.err
    found = json.loads(said.out)
    settings = found["settings"]
    assert (settings["device_pages"], settings["host_pages"], settings["with_bytes"]) == (200, 0, False)
    assert (settings["storage"], found["requests"], found["missed"]) == (None, 20, None)
    assert (settings["policies"]["evict_device"], settings["policies"]["evict_host"]) == ("priority", "lru")
    assert (tmp_path / "out" / "index.html").exists()

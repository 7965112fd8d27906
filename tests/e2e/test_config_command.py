"""``unified-cache config``: what it says of a file, in words and as JSON, and that commands do as the file says."""

import json
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.cluster import ask

TRACE = ROOT / "traces" / "mooncake_conversation_1000.jsonl.gz"

FILE = """\
model = "gpt-oss-120b"
host_bytes = "64GiB"
device_bytes = "8GiB"

[eviction]
preferred_share = 0.5

[quota.tenants.acme]
calls_max = 4

[quota.tenants.beta]

[replay]
engines = 2
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("unified-cache.toml")
    path.write_text(FILE, encoding="utf-8")
    return path


@pytest.mark.usefixtures("file")
def test_a_file_is_explained_with_the_line_of_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_CACHE_REPLAY_LIMIT", "5")
    said = ask("config", "check", "--json")
    assert said.status == 0, said.err
    found = json.loads(said.out)
    places = {(each["name"], tuple(each["sections"])): each["place"] for each in found["settings"]}
    assert places["host_bytes", ("cache", "replay")] == "unified-cache.toml:2"
    assert places["engines", ("replay",)] == "unified-cache.toml:14"
    assert places["quota.tenants.acme.calls_max", ("serve",)] == "unified-cache.toml:9"
    assert places["quota.tenants.beta.calls_max", ("serve",)] == "unified-cache.toml:11", (
        "an empty table says something"
    )
    assert places["limit", ("replay",)] == "UNIFIED_CACHE_REPLAY_LIMIT"
    assert places["limit", ("plan",)] == "default"
    values = {each["name"]: each["value"] for each in found["settings"] if each["place"] != "default"}
    assert values["host_bytes"] == 64 << 30


def test_a_replay_does_what_file_variable_and_flag_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "device_pages = 300\nhost_pages = 0\nlimit = 20\n[eviction]\ndevice = 'priority'\n[replay]\nbytes = false\n"
    Path("unified-cache.toml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("UNIFIED_CACHE_LIMIT", "30")
    said = ask("replay", TRACE, "--device-pages", "200", "--json")
    assert said.status == 0, said.err
    found = json.loads(said.out)
    settings = found["settings"]
    assert (settings["device_pages"], settings["host_pages"], settings["with_bytes"]) == (200, 0, False)
    assert settings["policies"]["evict_device"] == "priority"
    assert found["requests"] == 30


def test_a_replay_explains_and_writes_its_page_as_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "limit = 20\n[replay]\ndevice_pages = 300\nhost_pages = 0\nbytes = false\nreport = 'out'\n"
    Path("unified-cache.toml").write_text(text, encoding="utf-8")
    explained = json.loads(ask("replay", TRACE, "--json").out)
    assert explained["missed"]["tokens"] > 0, "a report explains unless it is told not to"
    assert (tmp_path / "out" / "index.html").exists()
    Path("unified-cache.toml").write_text(text + "explain = false\n", encoding="utf-8")
    assert json.loads(ask("replay", TRACE, "--json").out)["missed"] is None

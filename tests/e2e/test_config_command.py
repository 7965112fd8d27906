"""``unified-cache config``: what it says of a file, in words and as JSON, and that commands do as the file says."""

import json
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.support.cluster import ask

DOCUMENT = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
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
    assert found["derived"]["cache device of gpt-oss-120b"].startswith("8.00 GiB are pages ")
    texts = [each["text"] for each in found["warnings"]]
    assert any("quota.tenants names tenants" in text for text in texts)
    (row,) = (line for line in DOCUMENT.splitlines() if line.startswith("| `config check`"))
    fields = {*found, *(field for each in ("settings", "warnings") for one in found[each] for field in one)}
    assert [field for field in fields - {"command", "format"} if f"`{field}`" not in row] == []


@pytest.mark.usefixtures("file")
def test_words_say_the_same_and_defaults_are_shown_when_asked() -> None:
    said = ask("config", "check")
    assert said.status == 0, said.err
    assert "unified-cache.toml:2" in said.out
    assert "64GiB" in said.out
    assert "listen" not in said.out
    assert "warning (" in said.out
    assert "listen" in ask("config", "check", "--for", "serve", "--all").out


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ('storage = "file:kv"\ndevice_pages = 9\n', "nothing will be stored; set host_bytes"),
        ("[cache]\ndevice_pages = 9\ndevice_bytes = 9\n", "device_bytes and device_pages are both set"),
        ("[cache]\nhost_pages = 9\nhost_bytes = 9\n", "host_bytes and host_pages are both set"),
        ("storage_workers = 3\n", "neither device_bytes nor device_pages is set"),
        ('device_bytes = "2GiB"\nhost_bytes = "1GiB"\n', "host_bytes is less than device_bytes"),
        ('storage = "memory:"\nstorage_bytes = "1GiB"\nhost_bytes = "2GiB"\n', "storage_bytes is less than host_bytes"),
        ("[cache]\nstorage_bytes = 9\n", "storage_bytes caps a store, and storage is unset"),
        ("dirty_share = 0.1\n", "dirty_share has an effect with write"),
        ("[guard]\ndeadline_s = 90\n", "guard.deadline_s is more than operation_timeout_s"),
        ('[tls]\ncertificate = "none.crt"\nkey = "none.key"\n', "tls.key names none.key, which is not there"),
        ("insecure = true\n", "insecure changes nothing"),
        ("[quota.tenants.a]\n", "quota.tenants names tenants, and every caller is local_tenant"),
        ('[replay]\ndtype = "fp8"\n', "dtype is that of a model, and model is unset"),
    ],
)
def test_settings_that_contradict_each_other_are_warned_of(
    text: str, warning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(text, encoding="utf-8")
    said = ask("config", "check", "a.toml")
    assert said.status == 0, said.err
    assert warning in said.out.replace("\n", " ")


def test_a_sound_file_has_no_warnings(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    text = 'device_bytes = "1GiB"\nhost_bytes = "2GiB"\nstorage = "memory:"\nstorage_bytes = "4GiB"\n'
    path.write_text(text, encoding="utf-8")
    assert json.loads(ask("config", "check", path, "--json").out)["warnings"] == []


def test_a_flaw_ends_with_status_2_and_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("\nengins = 3\n[guard]\ndeadline_s = 'x'\n", encoding="utf-8")
    for arguments in (("config", "check", path), ("replay", TRACE, "--config", path), ("serve", "--config", path)):
        said = ask(*arguments)
        assert (said.status, said.out) == (2, "")
        assert f"{path}:2: there is no setting engins; did you mean engines" in said.error


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


def test_a_setting_that_a_replay_cannot_take_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('device_bytes = "1GiB"\n', encoding="utf-8")
    assert f"device_bytes ({path}:1) need --model" in ask("replay", TRACE, "--config", path).error
    path.write_text("[eviction]\ndevice = ['lru', 'priority']\n", encoding="utf-8")
    assert "eviction.device must be one policy for all components" in ask("replay", TRACE, "--config", path).error


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

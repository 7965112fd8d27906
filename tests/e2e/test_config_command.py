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


STORE_URLS = (
    *("file:", "packed:x?free=12Q", "file:x?much=1", "file:x\\u0000y", "file://host/x", "memory:x", "redis://h"),
    *("grpc://host", "grpc://a:1?timeout_s=no", "mooncake://host:port", "s3://", "s3://kv?requests=no"),
    *("file:x#keys=file:/nope", "file:x#keys=" + "9f" * 32, "file:x#compress=much", "os.path:absent"),
)


@pytest.mark.parametrize("url", [*STORE_URLS, "grpc://127.0.0.1:1'\nstorage_bytes = '1GiB"])
def test_what_serve_refuses_of_a_stores_url_is_an_error_of_a_check_too_and_nothing_is_made(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quote = '"' if "\\" in url else "'"
    Path("service.toml").write_text(f"storage = {quote}{url}{quote}\n", encoding="utf-8")
    served, checked = ask("serve", "--config", "service.toml"), ask("config", "check", "--config", "service.toml")
    assert (served.status, checked.status) == (2, 2), (served.err, checked.err)
    assert checked.err.startswith("error: service.toml: storage")
    assert list(tmp_path.iterdir()) == [tmp_path / "service.toml"]


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

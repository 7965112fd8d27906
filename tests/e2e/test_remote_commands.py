"""A service asked by a person: ping, stat, lookup, get and put, and one line for what goes wrong."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, fill, objects_of, open_store, url_of
from tests.support.running_service import RunningService, running
from unified_cache.cli.main import run
from unified_cache.page import Prompt

TOKENS = list(range(PAGES * PAGE_SIZE))
LAYOUT = LAYOUTS["full"]


@pytest.fixture
def server() -> Iterator[RunningService]:
    with running() as server:
        yield server


@pytest.fixture
def like(tmp_path: Path) -> str:
    fill(open_store("file", tmp_path / "like"), LAYOUT, [Prompt.of(TOKENS, PAGE_SIZE)])
    return url_of("file", tmp_path / "like")


def objects_in(tmp_path: Path) -> dict[str, bytes]:
    storage = open_store("file", tmp_path / "like")
    found = {label.object_name: page for label, page in objects_of(storage, LAYOUT).items()}
    storage.close()
    return found


def test_ping_and_stat_tell_of_each_server(server: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"grpc://{server.address}"
    assert run(["ping", url, "--json"]) == 0
    (pong,) = json.loads(capsys.readouterr().out)
    assert (pong["server"], pong["tenant"], pong["store"], pong["durable"]) == (
        server.address,
        "default",
        "memory",
        False,
    )
    assert run(["stat", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[server.address]["host_pages"] == 0
    assert run(["ping", url]) == 0
    assert run(["stat", url]) == 0
    assert server.address in capsys.readouterr().out


def test_what_is_put_can_be_looked_up_and_got_again(
    server: RunningService, like: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, tokens = f"grpc://{server.address}", tmp_path / "tokens.json"
    tokens.write_text(json.dumps(TOKENS), encoding="utf-8")
    lookup = ["lookup", url, "--like", like, "--tokens", str(tokens), "--json"]
    assert run(lookup) == 0
    assert json.loads(capsys.readouterr().out)[0]["restorable_tokens"] == 0
    file, back = tmp_path / "object", tmp_path / "back"
    for name, page in objects_in(tmp_path).items():
        file.write_bytes(page)
        assert run(["put", url, name, "--like", like, "--input", str(file)]) == 0
        assert run(["get", url, name, "--like", like, "--output", str(back)]) == 0
        assert back.read_bytes() == page
    assert run(lookup) == 0
    assert json.loads(capsys.readouterr().out)[0]["restorable_tokens"] == PAGES * PAGE_SIZE
    assert run([*lookup, "--bigrams"]) == 0
    pairs = json.loads(capsys.readouterr().out)[0]
    assert (pairs["pages_count"], pairs["restorable_tokens"]) == (PAGES - 1, 0)
    assert run(lookup[:-1]) == 0


def test_what_is_got_is_its_owners_alone_and_follows_no_link(
    server: RunningService, like: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, (name, page) = f"grpc://{server.address}", next(iter(objects_in(tmp_path).items()))
    source, back, letter, link = (tmp_path / each for each in ("object", "back", "letter", "link"))
    source.write_bytes(page)
    back.write_bytes(b"former")
    back.chmod(0o644)
    letter.write_bytes(b"dear")
    link.symlink_to(letter)
    assert run(["put", url, name, "--like", like, "--input", str(source)]) == 0
    get = ["get", url, name, "--like", like, "--output"]
    assert run([*get, str(back)]) == 0
    assert (back.read_bytes(), back.stat().st_mode & 0o777) == (page, 0o600)
    for other in (link, tmp_path, Path("/dev/null")):
        assert run([*get, str(other)]) == 2
        assert "--output must name a file, or nothing yet" in capsys.readouterr().err
    assert (letter.read_bytes(), link.is_symlink()) == (b"dear", True)


def test_what_goes_wrong_is_one_line(
    server: RunningService, like: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, name, none = f"grpc://{server.address}", next(iter(objects_in(tmp_path))), str(tmp_path / "none")
    junk = tmp_path / "junk"
    junk.write_bytes(b"junk")
    wrong = {
        ("ping", "file:kv"): (2, "a service is named as"),
        ("ping", "grpc://127.0.0.1:1?timeout_s=2"): (1, "UNAVAILABLE"),
        ("stat", "grpc://127.0.0.1:1?timeout_s=2"): (1, "UNAVAILABLE"),
        ("get", url, name, "--like", like, "--output", none): (1, "found a miss"),
        ("get", url, "x/y.z", "--like", like, "--output", none): (2, "an object is named"),
        ("get", url, name.rsplit(".", 1)[0] + ".nope", "--like", like, "--output", none): (2, "must name a pool"),
        ("put", url, name, "--like", like, "--input", str(junk)): (2, "another length"),
        ("put", url, name, "--like", like, "--input", none): (1, "No such file"),
    }
    for arguments, (status, said) in wrong.items():
        assert run(list(arguments)) == status, arguments
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert said in line
    assert not Path(none).exists()

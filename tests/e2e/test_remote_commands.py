"""A service asked by a person: ping, stat, lookup, get and put, and one line for what goes wrong."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, TOY, fill, objects_of, open_store, url_of
from tests.support.running_service import RunningService, running
from unified_cache.cli.main import run
from unified_cache.offline.stores import identities_of, open_to_read
from unified_cache.page import Prompt
from unified_cache.seal import verify
from unified_cache.storage_backends.url import open_storage
from unified_cache.testing.storage_contract import listing

TOKENS = list(range(PAGES * PAGE_SIZE))
LAYOUT = LAYOUTS["full"]


@pytest.fixture
def server() -> Iterator[RunningService]:
    with running() as server:
        yield server


@pytest.fixture
def like(tmp_path: Path) -> str:
    fill(open_store("file", tmp_path / "like"), LAYOUT, [Prompt.of(TOKENS, PAGE_SIZE, whole=True)])
    return url_of("file", tmp_path / "like")


def objects_in(tmp_path: Path) -> dict[str, bytes]:
    storage = open_store("file", tmp_path / "like")
    found = {label.object_name: page for label, page in objects_of(storage, LAYOUT).items()}
    storage.close()
    return found


def test_ping_and_stat_tell_of_each_server(server: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"grpc://{server.address}"
    assert run(["ping", url, "--json"]) == 0
    (pong,) = json.loads(capsys.readouterr().out)["servers"]
    assert (pong["server"], pong["tenant"], pong["store"], pong["durable"]) == (
        server.address,
        "default",
        "memory",
        False,
    )
    assert run(["stat", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["servers"][0]["stored_bytes"] == 0
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
    assert json.loads(capsys.readouterr().out)["prompts"][0]["restorable_tokens"] == 0
    file, back = tmp_path / "object", tmp_path / "back"
    for name, page in objects_in(tmp_path).items():
        file.write_bytes(page)
        assert run(["put", url, name, "--like", like, "--input", str(file)]) == 0
        assert run(["get", url, name, "--like", like, "--output", str(back)]) == 0
        assert back.read_bytes() == page
    assert run(lookup) == 0
    assert json.loads(capsys.readouterr().out)["prompts"][0]["restorable_tokens"] == PAGES * PAGE_SIZE
    assert run([*lookup, "--bigrams"]) == 0
    pairs = json.loads(capsys.readouterr().out)["prompts"][0]
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


@pytest.mark.parametrize("kind", ["file", "packed"])
def test_the_services_own_store_tells_what_pages_are_like(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, tokens, back = f"{kind}:{tmp_path / 'own'}", tmp_path / "tokens.json", tmp_path / "back"
    tokens.write_text(json.dumps(TOKENS), encoding="utf-8")
    with running(storage=own) as server:
        url = f"grpc://{server.address}"
        fill(open_storage(url), LAYOUT, [Prompt.of(TOKENS, PAGE_SIZE, whole=True)])
        assert run(["lookup", url, "--like", own, "--tokens", str(tokens), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["prompts"][0]["restorable_tokens"] == PAGES * PAGE_SIZE
        with closing(open_to_read(own)) as storage:
            (identity,) = identities_of(storage)
            stored = [found.label for found in listing(storage, identity.digest)]
        assert identity.name == "@default/toy"
        plain = TOY.digest(LAYOUT)
        for name in (stored[0].object_name, stored[0]._replace(identity=plain).object_name):
            assert run(["get", url, name, "--like", own, "--output", str(back)]) == 0
            assert verify(memoryview(back.read_bytes()), stored[0]._replace(identity=plain)) is None
            assert run(["put", url, name, "--like", own, "--input", str(back)]) == 0
        for digest in (identity.digest, plain):
            command = ["lookup", url, "--like", own, "--identity", digest.hex()[:9], "--tokens", str(tokens)]
            assert run(command) == 0


def test_clear_removes_what_one_identity_has_and_says_what_it_would_remove_first(
    like: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(access={"local_role": "admin"}) as server:
        url = f"grpc://{server.address}"
        for options in (["--like", like], ["--all"]):
            fill(open_storage(url), LAYOUT, [Prompt.of(TOKENS, PAGE_SIZE, whole=True)])
            assert run(["clear", url, *options]) == 2
            assert "say so with --yes" in capsys.readouterr().err
            assert run(["clear", url, *options, "--yes", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["servers"][0]["removed_objects"] == len(objects_in(tmp_path))
        assert run(["clear", url, "--yes"]) == 2
        assert "either --model NAME" in capsys.readouterr().err


def test_drain_ends_a_service_for_an_admin_alone(server: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drain", f"grpc://{server.address}"]) == 1
    assert "PERMISSION_DENIED" in capsys.readouterr().err
    assert not server.drain.is_asked
    with running(access={"local_role": "admin"}) as other:
        assert run(["drain", f"grpc://{other.address}"]) == 0
        assert capsys.readouterr().out == f"{other.address}: draining\n"
        assert other.drain.wait(0)


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

"""The servers of a service asked by a person: ping, drain, and one line for what goes wrong."""

import json
from collections.abc import Iterator

import pytest

from tests.support.offline import LAYOUTS, PAGE_SIZE, PAGES, fill
from tests.support.running_service import RunningService, running
from unified_cache.cli.main import run
from unified_cache.core.page import Prompt
from unified_cache.storage_backends.url import open_storage

PROMPT = Prompt.of(range(PAGES * PAGE_SIZE), PAGE_SIZE, whole=True)


@pytest.fixture
def server() -> Iterator[RunningService]:
    with running() as server:
        yield server


def test_ping_tells_of_each_server(server: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"grpc://{server.address}"
    assert run(["ping", url, "--json"]) == 0
    (pong,) = json.loads(capsys.readouterr().out)["servers"]
    assert (pong["server"], pong["tenant"], pong["store"], pong["durable"]) == (
        server.address,
        "default",
        "memory",
        False,
    )
    assert (pong["stored_bytes"], pong["identities"]) == (0, 0)
    fill(open_storage(url), LAYOUTS["full"], [PROMPT])
    assert run(["ping", url, "--json"]) == 0
    (pong,) = json.loads(capsys.readouterr().out)["servers"]
    assert pong["stored_bytes"] > 0
    assert pong["identities"] == 1
    assert run(["ping", url]) == 0
    assert server.address in capsys.readouterr().out


def test_drain_ends_a_service_for_an_admin_alone(server: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drain", f"grpc://{server.address}"]) == 1
    assert "PERMISSION_DENIED" in capsys.readouterr().err
    assert not server.drain.is_asked
    with running(access={"local_role": "admin"}) as other:
        assert run(["drain", f"grpc://{other.address}"]) == 0
        assert capsys.readouterr().out == f"{other.address}: draining\n"
        assert other.drain.wait(0)


@pytest.mark.parametrize(
    ("url", "status", "said"),
    [("file:kv", 2, "a service is named as"), ("grpc://127.0.0.1:1?timeout_s=2", 1, "UNAVAILABLE")],
)
def test_what_goes_wrong_is_one_line(url: str, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ping", url]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line

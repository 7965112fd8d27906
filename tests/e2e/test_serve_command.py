"""``unified-cache serve`` as a process: how it starts, what it refuses, how it ends, how fairly tenants share it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from urllib.request import urlopen

import grpc
import pytest

from tests.support.base_install import without_torch
from tests.support.cluster import COMMAND, ServeProcess
from tests.support.running_service import CALL_S, called, refusal
from tests.support.service_flood import Asker
from unified_cache.cli.main import run
from unified_cache.proto import service_pb2 as pb
from unified_cache.proto.wire import Call

START_S = 60.0
VARIABLE = "UNIFIED_CACHE_SERVE_"

FLOOD_THREADS = 24
ASKS = 150
TURNS_MAX = 4.0
"""Calls that the server may answer in the time of one quiet call; a queue would be all of the flood's."""


def serving(directory: Path, *options: str, **variables: str) -> ServeProcess:
    settings = {"AUDIT__FILE": str(directory / "audit"), "STORAGE": f"file:{directory / 'kv'}", **variables}
    return ServeProcess(*options, variables=settings)


@contextmanager
def put_under_way(server: ServeProcess) -> Iterator[Event]:
    """Hold a put open until the event is set."""
    go_on, begun = Event(), Event()

    def messages() -> Iterator[bytes]:
        begun.set()
        go_on.wait(CALL_S)
        yield pb.PutPart(start=pb.PutStart()).SerializeToString()

    with grpc.insecure_channel(server.address) as channel:
        called(channel, Call.HELLO)
        put: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(Call.PUT.path)
        answer = put.future(messages(), timeout=CALL_S)
        assert begun.wait(CALL_S)
        # It has been admitted once it is refused what a tenant with one call in flight is refused.
        while refusal(channel, Call.HELLO) is None:
            pass
        yield go_on
        go_on.set()
        assert answer.code() is not None


@pytest.mark.parametrize("twice", [False, True])
def test_sigterm_lets_a_call_in_flight_end_and_then_ends_well_and_a_second_signal_stops_at_once(
    tmp_path: Path, twice: bool
) -> None:
    with (
        serving(tmp_path, QUOTA__CALLS_MAX="1") as server,
        put_under_way(server) as go_on,
        grpc.insecure_channel(server.address) as channel,
    ):
        server.child.send_signal(signal.SIGTERM)
        assert json.loads(server.log.readline())["kind"] == "over_quota"
        while (refused := refusal(channel, Call.HELLO)) is None or refused[0] is not grpc.StatusCode.UNAVAILABLE:
            pass
        assert server.child.poll() is None
        if twice:
            server.child.send_signal(signal.SIGINT)
            assert server.child.wait(CALL_S) == 128 + signal.SIGINT
            return
        go_on.set()
        status, kinds = server.ended()
        assert status == 0
        assert kinds[-1] == "stopped"


def test_the_first_line_says_where_what_and_within_what_bounds_each_once(tmp_path: Path) -> None:
    bounds = {"STORAGE_BYTES": "1GiB", "QUOTA__STORED_BYTES_MAX": "3MiB"}
    with serving(tmp_path, **bounds) as server:
        said = server.first["text"]
        for fact in (f":{server.port} in plain text", f"file:{tmp_path / 'kv'}", "1.00 GiB", "3.00 MiB"):
            assert said.count(fact) == 1, said


def test_insecure_is_said_loudly(tmp_path: Path) -> None:
    command = [*COMMAND, "serve", "--listen", "0.0.0.0:0", "--storage", "memory:", "--insecure"]
    variables = without_torch({**os.environ, f"{VARIABLE}METRICS__LISTEN": "127.0.0.1:0"})
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        said, serving = (json.loads(child.stderr.readline()) for _ in range(2))
        child.send_signal(signal.SIGINT)
        child.stderr.read()
        assert child.wait(CALL_S) == 0
    assert (said["level"], said["kind"], serving["kind"]) == ("warning", "insecure", "serving")
    assert said["text"].startswith("other machines may call 0.0.0.0:0 without a certificate")


@contextmanager
def flooding(address: str, token: str) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.support.service_flood", address, token, str(FLOOD_THREADS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield
        answered, _ = child.communicate("", START_S)[0].split()
        assert int(answered) > 0


def times_s(asker: Asker) -> list[float]:
    """Ask some times, one after the other; return how long each answer took, the shortest first."""
    took_s: list[float] = []
    for _ in range(ASKS):
        started_s = time.perf_counter()
        asker.ask()
        took_s.append(time.perf_counter() - started_s)
    return sorted(took_s)


def answered_count(server: ServeProcess) -> float:
    with urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=CALL_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("unified_cache_service_calls_total{"))


@dataclass(frozen=True, slots=True)
class Tenants:
    """Tokens of two tenants, and the settings of a server that knows them."""

    flood: str
    quiet: str
    tokens: str


@pytest.fixture
def tenants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tenants:
    tokens = tmp_path / "tokens"
    for tenant in ("flood", "quiet"):
        assert run(["token", "new", "--tokens", str(tokens), "--tenant", tenant, "--role", "reader"]) == 0
    flood, quiet = capsys.readouterr().out.split()
    return Tenants(flood, quiet, str(tokens))


@pytest.mark.threat("starving other tenants")
def test_a_call_beside_a_flood_waits_for_few_of_its_calls_however_many_wait(tmp_path: Path, tenants: Tenants) -> None:
    with (
        serving(tmp_path, ACCESS__TOKENS=tenants.tokens) as server,
        flooding(server.address, tenants.flood),
    ):
        asker = Asker(server.address, tenants.quiet)
        times_s(asker)
        # Turns, not seconds: how long a turn takes is measured at the same time, on a machine as busy.
        before, started_s = answered_count(server), time.perf_counter()
        took_s = times_s(asker)
        turn_s = (time.perf_counter() - started_s) / (answered_count(server) - before)
        asker.close()
    turns = took_s[ASKS // 2] / turn_s
    assert turns <= TURNS_MAX, f"a quiet call took {turns:.1f} turns of {turn_s * 1000:.2f} ms"

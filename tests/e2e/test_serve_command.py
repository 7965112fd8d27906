"""``unified-cache serve`` as a process: how it starts, what it refuses, and how it ends."""

import json
import os
import signal
import subprocess
from pathlib import Path

import grpc
import pytest

from tests.support.base_install import without_torch
from tests.support.cluster import COMMAND, ServeProcess
from tests.support.running_service import CALL_S, OpenPut, called, refusal
from unified_cache.proto.wire import Call

VARIABLE = "UNIFIED_CACHE_SERVE_"


def serving(directory: Path, *options: str, **variables: str) -> ServeProcess:
    settings = {"AUDIT__FILE": str(directory / "audit"), "STORAGE": f"file:{directory / 'kv'}", **variables}
    return ServeProcess(*options, variables=settings)


@pytest.mark.parametrize("twice", [False, True])
def test_sigterm_lets_a_call_in_flight_end_and_then_ends_well_and_a_second_signal_stops_at_once(
    tmp_path: Path, twice: bool
) -> None:
    with (
        serving(tmp_path, QUOTA__CALLS_MAX="1") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        called(channel, Call.HELLO)
        under_way = OpenPut(channel)
        # It has been admitted once it is refused what a tenant with one call in flight is refused.
        while refusal(channel, Call.HELLO) is None:
            pass
        server.child.send_signal(signal.SIGTERM)
        assert json.loads(server.log.readline())["kind"] == "over_quota"
        while (refused := refusal(channel, Call.HELLO)) is None or refused[0] is not grpc.StatusCode.UNAVAILABLE:
            pass
        assert server.child.poll() is None
        if twice:
            server.child.send_signal(signal.SIGINT)
            assert server.child.wait(CALL_S) == 128 + signal.SIGINT
            return
        assert under_way.end() is grpc.StatusCode.OK
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

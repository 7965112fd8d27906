"""``unified-cache node``: one storage node in production, from its start to its end."""

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import (
    TIMEOUT_S,
    CommandResult,
    RunningCommand,
    all_end,
    ask,
    ask_apart,
    descendants,
    mounted,
    slowness,
)
from tests.support.mooncake_needed import needs_mooncake
from unified_cache.cluster.child import wait_until
from unified_cache.cluster.host_port import LOOPBACK, HostPort, claim, free_ports
from unified_cache.cluster.local import LocalCluster
from unified_cache.cluster.master import MasterSettings
from unified_cache.cluster.production import CHECK_INTERVAL_S

NO_MASTER_MAX_S = 5.0
SMALL = ("--segment-bytes", "16MiB")

pytestmark = needs_mooncake


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster.running(nodes=1, segment_bytes=16 << 20) as cluster:
        yield cluster


@pytest.fixture
def nobody() -> HostPort:
    """An address where nobody listens."""
    (port,) = free_ports(1, random.SystemRandom())
    return HostPort(LOOPBACK, port)


def node(master: HostPort, *options: str | Path) -> tuple[str | Path, ...]:
    return ("node", "--master", str(master), *SMALL, *options)


def test_a_node_is_ready_when_others_reach_it_and_ends_gracefully(cluster: LocalCluster, tmp_path: Path) -> None:
    ready_file = tmp_path / "ready"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(TIMEOUT_S)
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
        running = RunningCommand(*node(cluster.rpc, "--ready-file", ready_file), environment=environment)
        ready = running.logged("ready")
        assert systemd.recv(64) == b"READY=1"
        assert wait_until(ready_file.exists, TIMEOUT_S)
        assert ready_file.read_text(encoding="utf-8") == f"{ready['node']}\n"
        assert ready["node"] in mounted(cluster.admin)
        started = descendants(running.popen.pid)
        assert [each.pid for each in started] == [ready["pid"]]
        running.popen.terminate()
        assert systemd.recv(64) == b"STOPPING=1"
        assert running.end() == 0
    assert ready["node"] not in mounted(cluster.admin)
    assert all_end(started)
    assert not ready_file.exists()
    assert [event["event"] for event in running.events] == ["starting", "ready", "stopping", "stopped"]


def test_a_node_dies_with_the_command_that_runs_it(cluster: LocalCluster) -> None:
    running = RunningCommand(*node(cluster.rpc))
    running.logged("ready")
    started = descendants(running.popen.pid)
    running.popen.kill()
    running.end()
    assert all_end(started)


def test_the_command_fails_when_its_node_dies(cluster: LocalCluster) -> None:
    running = RunningCommand(*node(cluster.rpc))
    pid = running.logged("ready")["pid"]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    assert running.end() == 1
    assert running.lines[-1] == "error: node ended with status -9\n"


def test_a_node_says_when_its_master_is_lost_and_back() -> None:
    with LocalCluster.running(nodes=1, segment_bytes=16 << 20) as own:
        running = RunningCommand(*node(own.rpc))
        ready = running.logged("ready")
        own.master.kill()
        running.logged("master_lost")
        own.restart_master()
        running.logged("master_back")
        assert wait_until(lambda: ready["node"] in mounted(own.admin), TIMEOUT_S)
        running.popen.terminate()
        assert running.end() == 0


def test_a_node_that_was_stopped_and_continued_goes_on(cluster: LocalCluster) -> None:
    running = RunningCommand(*node(cluster.rpc))
    ready = running.logged("ready")
    processes = [psutil.Process(running.popen.pid), *descendants(running.popen.pid)]
    for process in processes:
        process.suspend()
    # The master forgets a node that is silent for so long, and the node's own waits are over by then.
    assert wait_until(lambda: ready["node"] not in mounted(cluster.admin), TIMEOUT_S)
    time.sleep(CHECK_INTERVAL_S - MasterSettings().client_ttl_s)
    for process in processes:
        process.resume()
    assert wait_until(lambda: ready["node"] in mounted(cluster.admin), TIMEOUT_S)
    assert all(process.is_running() for process in processes)
    running.popen.terminate()
    assert running.end() == 0
    stopping = next(event for event in running.events if event["event"] == "stopping")
    assert stopping["signal"] == "SIGTERM"


def test_a_node_waits_for_its_master_as_long_as_it_is_told(cluster: LocalCluster, nobody: HostPort) -> None:
    running = RunningCommand(*node(nobody, "--wait-s", "600"))
    assert str(running.logged("waiting")["reason"]) == "Connection refused"
    running.popen.terminate()
    assert running.end() == 0


def test_no_master_is_an_error_within_five_seconds(nobody: HostPort) -> None:
    answer = timed(node(nobody))
    assert answer.error == f"error: no master at {nobody} within 3 s: Connection refused"


def test_somebody_else_at_the_address_is_an_error_within_five_seconds() -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        master = HostPort(LOOPBACK, silent.getsockname()[1])
        answer = timed(node(master))
    assert answer.error.startswith(f"error: no master at {master} within 3 s: ")


def timed(arguments: tuple[str | Path, ...]) -> CommandResult:
    started_s = time.monotonic()
    answer = ask_apart(*arguments)
    assert time.monotonic() - started_s < NO_MASTER_MAX_S * slowness()
    assert answer.status == 1
    return answer


def test_an_address_where_others_do_not_reach_the_node_is_an_error(cluster: LocalCluster) -> None:
    answer = ask_apart(*node(cluster.rpc, "--host", "192.0.2.1"))  # for documentation: nobody has it
    assert answer.status == 1
    assert "others cannot reach the node at 192.0.2.1:" in answer.error or "did not report within" in answer.error


def test_a_port_that_is_taken_is_refused(cluster: LocalCluster, nobody: HostPort) -> None:
    with claim(LOOPBACK, nobody.port):
        answer = ask_apart(*node(cluster.rpc, "--port", str(nobody.port)))
    assert answer.status == 2
    assert answer.error == f"error: the address {nobody} must be free on this machine, found: Address already in use"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--protocol", "udp"), "'udp' is not one of 'tcp', 'rdma'"),
        (("--host", "no-such-host.invalid"), "--host must be a host that all machines resolve, found "),
        (("--master", "no-such-host.invalid:1"), "--master must be a host that all machines resolve, found "),
        (("--master", "localhost"), "--master must be HOST:PORT as in 10.0.0.1:50051, found 'localhost'"),
        (("--segment-bytes", "16777215"), "a segment must have at least 16777216 bytes (16MiB)"),
        (("--segment-bytes", "1024TiB"), "all memory of this machine, found "),
        (("--port", "65536"), "--port must be at most 65535, found 65536"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: tuple[str, ...], reason: str, nobody: HostPort) -> None:
    answer = ask(*node(nobody, *options))
    assert answer.status == 2
    assert len(answer.err.splitlines()) == 1
    assert reason in answer.error

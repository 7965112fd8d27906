"""``unified-cache cluster``: up, status, down, and what becomes of the processes when somebody dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import TIMEOUT_S, RunningCommand, all_end, ask, ask_apart, descendants, mounted, slowness
from tests.support.mooncake_needed import needs_mooncake
from unified_cache.cluster.child import wait_until
from unified_cache.cluster.directory import ClusterDirectory, ClusterState
from unified_cache.cluster.host_port import HostPort
from unified_cache.cluster.supervisor import CHECK_INTERVAL_S

READY_MAX_S = 3.0
SMALL = ("--nodes", "2", "--segment-bytes", "16MiB")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where a test's cluster lives; it does not outlive the test."""
    yield tmp_path
    assert ask("cluster", "down", "--dir", tmp_path).status == 0


def up(place: Path) -> str:
    answer = ask("cluster", "up", "--dir", place, *SMALL)
    assert answer.status == 0, answer.err
    return answer.out


def state_of(place: Path) -> ClusterState:
    state = ClusterDirectory(place).read()
    assert state is not None
    return state


def processes_of(place: Path) -> list[psutil.Process]:
    """Return the supervisor and its cluster."""
    supervisor = ClusterDirectory(place).supervisor_pid
    return [psutil.Process(supervisor), *descendants(supervisor)]


@needs_mooncake
def test_up_prints_the_url_alone_within_three_seconds_and_down_leaves_nothing(place: Path) -> None:
    started_s = time.monotonic()
    answer = ask_apart("cluster", "up", "--dir", place, *SMALL)
    took_s = time.monotonic() - started_s
    assert answer.status == 0, answer.err
    url, state = answer.out, state_of(place)
    assert url == f"{state.url}\n"
    assert url.startswith("mooncake://127.0.0.1:")
    started = processes_of(place)
    assert len(started) == 4
    status = ask("cluster", "status", "--dir", place, "--json")
    assert status.status == 0, status.err
    told = json.loads(status.out)
    assert told["ready"] is True
    assert [member["name"] for member in told["members"]] == ["master", "node-0", "node-1"]
    assert {member["pid"] for member in told["members"]} == {each.pid for each in started[1:]}
    shown = ask("cluster", "status", "--dir", place)
    assert shown.out.startswith(url)
    assert shown.out.count(" ready ") == 3
    ended = ask("cluster", "down", "--dir", place)
    assert ended.out == f"the cluster has ended in {place}\n"
    assert all_end(started)
    assert ask("cluster", "down", "--dir", place).out == f"no cluster runs in {place}\n"
    if took_s >= READY_MAX_S * slowness():  # Once more: whatever else this machine does makes it no faster.
        started_s = time.monotonic()
        ask_apart("cluster", "up", "--dir", place, *SMALL)
        took_s = time.monotonic() - started_s
        assert ask("cluster", "down", "--dir", place).status == 0
    assert took_s < READY_MAX_S * slowness()


@needs_mooncake
def test_a_directory_has_one_cluster(place: Path) -> None:
    up(place)
    answer = ask("cluster", "up", "--dir", place, *SMALL)
    assert answer.status == 2
    assert f"a cluster runs in {place} already" in answer.error
    assert answer.out == ""
    assert ask("cluster", "status", "--dir", place).status == 0


@needs_mooncake
def test_nothing_outlives_a_killed_supervisor_and_its_state_is_cleaned_up(place: Path) -> None:
    up(place)
    supervisor, *members = processes_of(place)
    assert len(members) == 3
    supervisor.kill()
    assert all_end([supervisor, *members])
    status = ask("cluster", "status", "--dir", place)
    assert status.status == 1
    assert status.error.endswith("its supervisor died")
    assert json.loads(ask("cluster", "status", "--dir", place, "--json").out)["ready"] is False
    up(place)
    assert ask("cluster", "status", "--dir", place).status == 0


@needs_mooncake
def test_a_dead_node_and_a_dead_master_are_started_again(place: Path) -> None:
    up(place)
    before = state_of(place)
    for victim in (before.members[0], before.members[2]):
        os.kill(victim.pid, signal.SIGKILL)
    assert wait_until(lambda: [m.restarts_count for m in state_of(place).members] == [1, 0, 1], TIMEOUT_S)
    after = state_of(place)
    assert after.url == before.url
    nodes = {member.address for member in after.members[1:]}
    assert wait_until(lambda: nodes <= mounted(HostPort.parse("admin", after.admin)), TIMEOUT_S)
    assert ask("cluster", "status", "--dir", place).status == 0
    log = (place / "supervisor.log").read_text(encoding="utf-8")
    assert [json.loads(line)["event"] for line in log.splitlines()].count("restarted") == 2


@needs_mooncake
def test_a_supervisor_that_was_stopped_and_continued_goes_on_restarting(place: Path) -> None:
    up(place)
    supervisor, *cluster = processes_of(place)
    supervisor.suspend()
    time.sleep(2 * CHECK_INTERVAL_S)  # it awaits signals for one of them at a time
    cluster[-1].kill()
    supervisor.resume()
    assert wait_until(lambda: sum(member.restarts_count for member in state_of(place).members) == 1, TIMEOUT_S)
    assert ClusterDirectory(place).is_supervised


@needs_mooncake
def test_status_tells_of_a_node_that_does_not_answer(place: Path) -> None:
    up(place)
    state = state_of(place)
    stopped = state.members[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    admin = HostPort.parse("admin", state.admin)
    assert wait_until(lambda: stopped.address not in mounted(admin), TIMEOUT_S)
    status = ask("cluster", "status", "--dir", place)
    assert status.status == 1
    assert "does not answer" in status.out
    assert status.error.endswith("found not ready: node-0")


@needs_mooncake
def test_a_cluster_in_the_foreground_ends_with_ctrl_c(place: Path) -> None:
    running = RunningCommand("cluster", "up", "--foreground", "--dir", place, *SMALL)
    assert str(running.logged("ready")["url"]).startswith("mooncake://")
    started = processes_of(place)
    assert started[0].pid == running.popen.pid
    os.killpg(running.popen.pid, signal.SIGINT)  # as a terminal does
    assert running.end() == 0
    assert all_end(started)
    assert ClusterDirectory(place).read() is None
    assert not [line for line in running.lines if "Traceback" in line]


@needs_mooncake
def test_a_killed_cluster_in_the_foreground_leaves_nothing(place: Path) -> None:
    running = RunningCommand("cluster", "up", "--foreground", "--dir", place, *SMALL)
    running.logged("ready")
    started = processes_of(place)
    running.popen.kill()
    assert all_end(started)
    running.end()


@needs_mooncake
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_start_that_is_broken_off_leaves_nothing(place: Path, number: signal.Signals) -> None:
    directory = ClusterDirectory(place)
    running = RunningCommand("cluster", "up", "--dir", place, *SMALL)
    assert wait_until(lambda: directory.is_supervised and directory.supervisor_pid != 0, TIMEOUT_S)
    started = processes_of(place)
    running.popen.send_signal(number)
    assert running.end() == (130 if number == signal.SIGINT else -number)
    assert wait_until(lambda: not directory.is_supervised, TIMEOUT_S)
    assert all_end(started)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--nodes", "0"), "--nodes must be at least 1, found 0"),
        (("--segment-bytes", "15MiB"), "a segment must have at least 16777216 bytes (16MiB)"),
        (("--segment-bytes", "many"), "--segment-bytes must be bytes as in 4096, 500MB or 4GiB, found 'many'"),
        (("--dir", "/dev/null/cluster"), "--dir must be a directory that can be made, found /dev/null/cluster"),
        (("--dir", "/dev/null"), "--dir must be a directory that can be made, found /dev/null"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    answer = ask("cluster", "up", "--dir", tmp_path, *options)
    assert answer.status == 2
    assert len(answer.err.splitlines()) == 1
    assert reason in answer.error


@needs_mooncake
def test_both_wheels_are_refused_where_the_cluster_starts(tmp_path: Path) -> None:
    wheel = tmp_path / "more" / "mooncake_transfer_engine-9.0.dist-info"
    wheel.mkdir(parents=True)
    (wheel / "METADATA").write_text("Metadata-Version: 2.1\nName: mooncake-transfer-engine\nVersion: 9.0\n")
    environment = {**os.environ, "PYTHONPATH": str(wheel.parent)}
    answer = ask_apart("cluster", "up", "--dir", tmp_path, environment=environment)
    assert answer.status == 2
    assert "are both installed" in answer.error
    assert len(answer.err.splitlines()) == 1


@needs_mooncake
@pytest.mark.skipif(os.geteuid() != 0, reason="hiding a system library needs root")
def test_a_library_that_is_missing_is_named_with_its_package(tmp_path: Path) -> None:
    find = "import ctypes; ctypes.CDLL('libnuma.so.1'); print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", find], check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    library = next(line.split()[-1] for line in maps.stdout.splitlines() if "libnuma" in line)
    hidden = ("unshare", "--mount", "sh", "-c", 'mount --bind /dev/null "$0" || exit 77; exec "$@"', library)
    answer = ask_apart("cluster", "up", "--dir", tmp_path, before=hidden)
    if answer.status in (1, 77) and "error: " not in answer.err:
        pytest.skip(f"this machine lets nobody hide a file: {answer.err.strip()}")
    assert answer.status == 2
    assert "Mooncake needs libnuma1; install with: apt-get install" in answer.error

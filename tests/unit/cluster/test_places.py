"""Addresses, ports, plans and the directory of a cluster, without a process of it."""

import json
import os
import random
from io import StringIO
from pathlib import Path

import pytest

from unified_cache.cluster.directory import ClusterDirectory, ClusterState, MemberState
from unified_cache.cluster.event_log import EventLog
from unified_cache.cluster.host_port import LOOPBACK, HostPort, claim, free_ports
from unified_cache.cluster.local import NODES_MAX, ClusterPlan
from unified_cache.cluster.node import NodeSettings
from unified_cache.errors import ConfigError
from unified_cache.settings.mooncake import Transport
from unified_cache.storage_backends.mooncake.hosts import check_resolves, source_host

MIB = 1 << 20
STATE = ClusterState(
    url="mooncake://127.0.0.1:1?admin=127.0.0.1:2",
    admin="127.0.0.1:2",
    segment_bytes=64 * MIB,
    started_s=1.5,
    members=(MemberState("master", "127.0.0.1:1", 7, "running", 0),),
)


def test_an_address_is_read_and_shown() -> None:
    assert str(HostPort.parse("--master", "cache-1:50051")) == "cache-1:50051"


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:x", "host:0", "host:65536", "host:-1"])
def test_what_is_no_address_is_refused_with_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--master must be HOST:PORT as in .*, found "):
        HostPort.parse("--master", text)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70, "."])
def test_a_host_that_nobody_resolves_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="--host must be a host that all machines resolve"):
        check_resolves("--host", host)


def test_the_way_to_the_loopback_address_is_the_loopback_address() -> None:
    assert source_host(LOOPBACK, 9) == LOOPBACK


def test_a_claimed_port_is_claimed_once_and_drawn_never() -> None:
    draws = random.Random(0)
    (port,) = free_ports(1, draws)
    with claim(LOOPBACK, port):
        with pytest.raises(OSError, match="in use"):
            claim(LOOPBACK, port)
        assert port not in free_ports(3, random.Random(0))
    claim(LOOPBACK, port).close()


def test_free_ports_differ() -> None:
    assert len(set(free_ports(20, random.Random(1)))) == 20


@pytest.mark.parametrize("count", [0, -1, NODES_MAX + 1])
def test_a_cluster_has_a_bounded_number_of_nodes(count: int) -> None:
    with pytest.raises(ConfigError, match=f"found {count}"):
        ClusterPlan(count, 64 * MIB)


@pytest.mark.parametrize("segment_bytes", [0, 16 * MIB - 1, 1 << 50])
def test_a_segment_fits_mooncake_and_the_machine(segment_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"a segment must .* found {segment_bytes}"):
        ClusterPlan(1, segment_bytes)


def test_the_settings_of_a_node_travel_whole() -> None:
    settings = NodeSettings(HostPort("m", 1), 16 * MIB, HostPort("n", 2), Transport.RDMA)
    assert NodeSettings.from_json(settings.as_json()) == settings


def test_the_state_is_published_whole_and_private(tmp_path: Path) -> None:
    directory = ClusterDirectory.create(tmp_path / "a" / "b")
    assert directory.read() is None
    with directory.held():
        directory.write(STATE)
        directory.write(STATE)
        assert directory.read() == STATE
        assert {path.name: path.stat().st_mode & 0o777 for path in directory.path.iterdir()} == {
            "lock": 0o600,
            "state.json": 0o600,
        }
        assert directory.path.stat().st_mode & 0o777 == 0o700
    assert directory.read() is None


def test_a_directory_has_one_supervisor_at_a_time(tmp_path: Path) -> None:
    directory = ClusterDirectory.create(tmp_path)
    assert not directory.is_supervised
    with directory.held():
        assert directory.is_supervised
        with pytest.raises(ConfigError, match=r"a cluster runs in .* already"), directory.held():
            pass
    assert not directory.is_supervised


def test_what_a_dead_supervisor_left_is_cleaned_away(tmp_path: Path) -> None:
    directory = ClusterDirectory.create(tmp_path)
    directory.write(STATE)
    directory.clean()
    assert directory.read() is None
    ClusterDirectory(tmp_path / "never").clean()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    with pytest.raises(ConfigError, match="--dir must be a directory that can be made"):
        ClusterDirectory.create(taken / "below")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_a_directory_that_others_may_write_is_refused(mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    for named in (ClusterDirectory.create, ClusterDirectory.at):
        with pytest.raises(ConfigError, match="only its owner writes to"):
            named(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_directory_of_another_user_is_refused_to_root_too(tmp_path: Path) -> None:
    os.chown(tmp_path, 54321, 54321)
    for named in (ClusterDirectory.create, ClusterDirectory.at):
        with pytest.raises(ConfigError, match="found owner 54321"):
            named(tmp_path)
    os.chown(tmp_path, 0, 0)


def test_logs_are_emptied_and_what_a_link_leads_to_is_not(tmp_path: Path) -> None:
    directory = ClusterDirectory.create(tmp_path / "cluster")
    log, letter = directory.path / "node-0.log", tmp_path / "letter"
    for path in (log, letter):
        path.write_text("dear", encoding="utf-8")
    (directory.path / "master.log").symlink_to(letter)
    os.mkfifo(directory.path / "pipe.log")
    directory.empty_logs()
    assert (log.read_text(encoding="utf-8"), letter.read_text(encoding="utf-8")) == ("", "dear")


def test_an_event_is_one_line_of_json() -> None:
    stream = StringIO()
    EventLog(stream, lambda: 1.25).write("ready", {"node": "a\nb", "attempt": 2})
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.250+00:00",
        "event": "ready",
        "node": "a\nb",
        "attempt": 2,
    }

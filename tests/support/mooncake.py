"""Mooncake clusters on loopback for tests: the wheel's own master and clients, and what tests do to them."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from tests.support.ports import free_ports
from tests.support.waiting import wait_until
from unified_cache.core.errors import StorageError
from unified_cache.storage_backends.mooncake.address import address_of_url
from unified_cache.storage_backends.mooncake.client import MasterAdmin
from unified_cache.storage_backends.mooncake.native import METADATA, usable_wheel
from unified_cache.storage_backends.mooncake.store import MooncakeStorage
from unified_cache.storage_backends.url import open_storage

LOOPBACK = "127.0.0.1"
START_S = 20.0
"""The master takes 75 ms on an idle machine, a node 150."""

APPLIED = b"ha_oplog_applied_sequence_id "
"""Begins the line among a standby's metrics that says how far it has read what its leader wrote down."""

STILL_LOOKS, STILL_PAUSE_S = 5, 0.5
"""So often and so far apart it says the same, once it has read all; a leader writes at least every second."""


@dataclass(frozen=True, slots=True)
class MasterSettings:
    """Settings of a master. The defaults suit tests, in which what takes its time is to be over soon.

    ``lease_ms`` protects a page that was asked for or read; it must exceed the slowest batch of reads. A node that is
    silent for ``client_ttl_s`` is forgotten, its pages with it. A put that its writer did not finish blocks its key for
    ``put_discard_s``.
    """

    lease_ms: int = 2_000
    client_ttl_s: int = 2
    put_discard_s: int = 2

    def arguments(self) -> list[str]:
        """Return the arguments of ``mooncake_master``."""
        return [
            f"--default_kv_lease_ttl={self.lease_ms}",
            f"--client_ttl={self.client_ttl_s}",
            f"--put_start_discard_timeout_sec={self.put_discard_s}",
            "--eviction_high_watermark_ratio=0.8",
            "--eviction_ratio=0.1",
            "--rpc_thread_num=2",
        ]


LASTING = MasterSettings(lease_ms=10_000, client_ttl_s=3, put_discard_s=30)
"""For what goes on for longer, as in production."""


class ClusterProcess:
    """A process of a cluster, killed by the kernel if the thread that started it dies."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended; one that is stopped lives."""
        return self._popen.poll() is None

    def kill(self) -> None:
        """Send SIGKILL and wait for the end; one that has ended stays so."""
        self._popen.kill()
        self._popen.wait()

    def stop(self) -> None:
        """Send SIGSTOP and wait until it has stopped: it holds its ports and memory, and answers nobody."""
        self._popen.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def cont(self) -> None:
        """Send SIGCONT, after ``stop``."""
        self._popen.send_signal(signal.SIGCONT)


class LocalCluster:
    """Masters and storage nodes on the loopback address; dead ones are kept until they are replaced.

    Several masters, each at a loopback address of its own, have three members of etcd say which leads.
    """

    def __init__(self, segment_bytes: int, settings: MasterSettings, logs: Path, masters: int) -> None:
        """Start the masters."""
        rpc, admin, *ports = free_ports(2 if masters == 1 else 8)
        self.nodes: list[ClusterProcess] = []
        self.etcd: list[ClusterProcess] = []
        self._segment_bytes = segment_bytes
        self._logs = logs
        self._programs = Path(str(usable_wheel().locate_file("mooncake")))
        where, elected = f"//{LOOPBACK}:{rpc}", list[str]()
        if ports:
            members = [f"{LOOPBACK}:{port}" for port in ports[:3]]
            self.etcd += [self._start_etcd(number, ports) for number in range(3)]
            where, elected = f"etcd://{','.join(members)}", elected_by(members)
        self.url = f"mooncake:{where}?admin={admin}"
        self.address = address_of_url(f"{where}?admin={admin}")
        self.admin = MasterAdmin(self.address)
        self._master_commands = [
            [
                str(self._programs / "mooncake_master"),
                f"--rpc_address=127.0.0.{number + 1}",
                f"--rpc_port={rpc}",
                f"--metrics_host=127.0.0.{number + 1}",
                f"--metrics_port={admin}",
                "--enable_metric_reporting=false",
                "--logtostderr=true",
                "--minloglevel=1",
                *settings.arguments(),
                *elected,
            ]
            for number in range(masters)
        ]
        self.masters: list[ClusterProcess] = []
        for number in range(masters):
            # One after the other: two that start at once may take minutes to agree.
            self.masters.append(self._start_master(number))
            if not wait_until(self._is_serving, START_S):
                self.kill()
                raise AssertionError(self.logged())

    @classmethod
    @contextmanager
    def running(
        cls,
        nodes: int = 1,
        segment_bytes: int = 64 << 20,
        settings: MasterSettings = MasterSettings(),
        masters: int = 1,
    ) -> Iterator["LocalCluster"]:
        """Start a cluster, and kill it at the end, whatever happened."""
        with tempfile.TemporaryDirectory(prefix="unified-cache-cluster-") as logs:
            cluster = cls(segment_bytes, settings, Path(logs), masters)
            try:
                cluster.nodes += [cluster._launch() for _ in range(nodes)]
                assert wait_until(lambda: len(cluster.admin.segments()) == nodes, START_S), cluster.logged()
                yield cluster
            finally:
                cluster.kill()

    @property
    def master(self) -> ClusterProcess:
        """The only master, or the one that leads."""
        return self.masters[self.leading()]

    def leading(self) -> int:
        """Return the number of the master that leads."""
        return int(self.address.leader()[0].rpartition(".")[2]) - 1

    def settle(self) -> None:
        """Wait until the standby learns nothing more: leaders write down late what was put, and take it along."""
        host, seen = f"127.0.0.{2 - self.leading()}", [b""]

        def is_still() -> bool:
            with suppress(OSError), urlopen(f"http://{host}:{self.address.admin_port}/metrics", timeout=1) as answer:
                seen.extend(line for line in answer.read().splitlines() if line.startswith(APPLIED))
            return len(seen) > STILL_LOOKS and len({*seen[-STILL_LOOKS:]}) == 1

        assert wait_until(is_still, START_S, pause_s=STILL_PAUSE_S), self.logged()

    def start_node(self) -> ClusterProcess:
        """Start another node; return it when the master knows it."""
        before = self.admin.segments()
        node = self._launch()
        self.nodes.append(node)
        assert wait_until(lambda: bool(self.admin.segments() - before), START_S), self.logged()
        return node

    def replace_node(self, node: ClusterProcess) -> ClusterProcess:
        """Kill a node if it lives, and start another one in its place."""
        node.kill()
        started = self.start_node()
        self.nodes[self.nodes.index(node)] = self.nodes.pop()
        return started

    def restart_master(self, number: int = 0) -> ClusterProcess:
        """Start a master again at its address, killed first if it lives: it knows no page, and nodes join again."""
        self.masters[number].kill()
        self.masters[number] = self._start_master(number)
        assert wait_until(self._is_serving, START_S), self.logged()
        return self.masters[number]

    def kill(self) -> None:
        """Kill all that lives."""
        for process in (*self.nodes, *self.masters, *self.etcd):
            process.kill()

    def logged(self) -> str:
        """Return the ends of all logs, for messages."""
        logs = [path for path in self._logs.iterdir() if path.is_file()]
        return "\n".join(path.read_text(encoding="utf-8", errors="replace")[-2_000:] for path in logs)

    def _start_etcd(self, number: int, ports: Sequence[int]) -> ClusterProcess:
        """Start a member; ``ports`` are those for clients and then those for each other."""
        clients, peers = ([f"http://{LOOPBACK}:{port}" for port in half] for half in (ports[:3], ports[3:]))
        command = [
            "etcd",
            f"--name={number}",
            f"--data-dir={self._logs}/etcd-{number}.data",
            f"--listen-client-urls={clients[number]}",
            f"--advertise-client-urls={clients[number]}",
            f"--listen-peer-urls={peers[number]}",
            f"--initial-advertise-peer-urls={peers[number]}",
            f"--initial-cluster={','.join(f'{each}={url}' for each, url in enumerate(peers))}",
        ]
        return ClusterProcess(command, self._logs / f"etcd-{number}.log")

    def _start_master(self, number: int) -> ClusterProcess:
        return ClusterProcess(self._master_commands[number], self._logs / f"master-{number}.log")

    def _is_serving(self) -> bool:
        try:
            with urlopen(f"http://{self.address.leader()[0]}:{self.address.admin_port}/health", timeout=1) as answer:
                return b'"service_ready":true' in answer.read()
        except (OSError, StorageError):
            return False

    def _launch(self) -> ClusterProcess:
        (port,) = free_ports(1)
        command = [
            str(self._programs / "mooncake_client"),
            f"--master_server_address={self.address.master}",
            f"--metadata_server={METADATA}",
            f"--host={LOOPBACK}",
            f"--port={port}",
            f"--global_segment_size={self._segment_bytes}",
        ]
        return ClusterProcess(command, self._logs / f"node-{port}.log")


def elected_by(members: Sequence[str]) -> list[str]:
    """Return the arguments of a master that stands for election by these members of etcd, and follows who leads."""
    ends = ";".join(members)
    return ["--enable_ha=true", "--enable_oplog=true", f"--etcd_endpoints={ends}", f"--ha_backend_connstring={ends}"]


def open_mooncake(cluster: LocalCluster) -> MooncakeStorage:
    """Open a store of its own in a cluster."""
    storage = open_storage(cluster.url)
    assert isinstance(storage, MooncakeStorage)
    return storage

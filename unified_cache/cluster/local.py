"""A cluster on this machine, whose processes die with the one that started it.

    with LocalCluster.running(nodes=3, segment_bytes=64 << 20) as cluster:
        storage = open_storage(cluster.url)
        cluster.nodes[0].kill()
        cluster.start_node()

Nothing is restarted automatically here: the supervisor does that, and tests do it themselves.
"""

import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from unified_cache.cluster.child import Child
from unified_cache.cluster.host_port import LOOPBACK, HostPort, free_ports
from unified_cache.cluster.master import Master, MasterSettings
from unified_cache.cluster.node import NodeSettings, check_round_trip, check_segment, start_node
from unified_cache.errors import ConfigError
from unified_cache.settings.mooncake import Transport
from unified_cache.storage_backends.mooncake.native import master_program

__all__ = ["NODES_MAX", "ClusterPlan", "LocalCluster"]

NODES_MAX = 64
NODE_TIMEOUT_S = 5.0
ROUND_TRIP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Size of a cluster. A segment is the memory that one node gives; it is taken as it fills.

    Raises:
        ConfigError: no nodes, too many, or segments of a size that cannot be.
    """

    nodes_count: int
    segment_bytes: int
    master: MasterSettings = field(default_factory=MasterSettings)

    def __post_init__(self) -> None:
        if not 1 <= self.nodes_count <= NODES_MAX:
            raise ConfigError(f"a cluster must have 1 to {NODES_MAX} nodes, found {self.nodes_count}")
        check_segment(self.segment_bytes)


class LocalCluster:
    """One master and some storage nodes on the loopback address.

    ``nodes`` and ``master`` are the processes, dead ones too. Whoever starts a cluster closes it. A process dies with
    the thread that started it: let that be one that stays.
    """

    def __init__(self, plan: ClusterPlan, description: Master, master: Child, logs: Path, draws: random.Random) -> None:
        self.master = master
        self.nodes: list[Child] = []
        self._plan = plan
        self._description = description
        self._logs = logs
        self._draws = draws

    @classmethod
    def start(cls, plan: ClusterPlan, logs: Path, draws: random.Random) -> "LocalCluster":
        """Start all processes, which log to the directory ``logs``; return when pages travel to every node and back.

        Raises:
            ConfigError: Mooncake, or what it needs, is not installed.
            StorageError: a process does not start, or is not reached; nothing is left running.
        """
        program = master_program()
        rpc, admin = (HostPort(LOOPBACK, port) for port in free_ports(2, draws))
        description = Master(program, rpc, admin, plan.master)
        cluster = cls(plan, description, description.start(logs / "master.log"), logs, draws)
        with ExitStack() as undo:
            undo.callback(cluster.close)
            cluster.nodes += [cluster._launch(place) for place in range(plan.nodes_count)]
            for node in cluster.nodes:
                node.await_report(NODE_TIMEOUT_S)
            cluster.check()
            undo.pop_all()
        return cluster

    @classmethod
    @contextmanager
    def running(
        cls, nodes: int = 1, segment_bytes: int = 64 << 20, master: MasterSettings | None = None
    ) -> Iterator["LocalCluster"]:
        """Start a cluster that logs to a temporary directory, and close it at the end. Raises as ``start``."""
        plan = ClusterPlan(nodes, segment_bytes, master or MasterSettings())
        with tempfile.TemporaryDirectory(prefix="unified-cache-cluster-") as logs:
            cluster = cls.start(plan, Path(logs), random.SystemRandom())
            try:
                yield cluster
            finally:
                cluster.close()

    @property
    def rpc(self) -> HostPort:
        """Host and port of the master's RPC server."""
        return self._description.rpc

    @property
    def admin(self) -> HostPort:
        """Host and port of the master's HTTP server."""
        return self._description.admin

    @property
    def url(self) -> str:
        """Storage URL of the cluster."""
        return f"mooncake://{self.rpc}?admin={self.admin}"

    def check(self) -> None:
        """Put a page on every node and get it back, from another process.

        Raises:
            StorageError: one is not reached.
        """
        addresses = [node.address for node in self.nodes]
        check_round_trip(self.rpc, addresses, Transport.TCP, ROUND_TRIP_TIMEOUT_S, self._logs / "round_trip.log")

    def start_node(self) -> Child:
        """Add a node; return it when the master knows it.

        Raises:
            StorageError: it does not start.
        """
        node = self._launch(len(self.nodes))
        node.await_report(NODE_TIMEOUT_S)
        self.nodes.append(node)
        return node

    def replace_node(self, node: Child) -> Child:
        """Start another node in the place of ``node``, which is killed if it lives. Its pages are lost.

        Raises:
            StorageError: it does not start; the place is kept.
        """
        node.kill()
        place = self.nodes.index(node)
        started = self._launch(place)
        started.await_report(NODE_TIMEOUT_S)
        self.nodes[place] = started
        return started

    def restart_master(self) -> Child:
        """Restart the master at its address, killed first if it lives. It knows no page; nodes join again within 2 s.

        Raises:
            StorageError: it does not start.
        """
        self.master.kill()
        self.master = self._description.start(self._logs / "master.log")
        return self.master

    def close(self) -> None:
        """Kill all processes, and wait for their ends. Nobody need be told: all pages go with them."""
        for child in (*self.nodes, self.master):
            child.kill()

    def _launch(self, place: int) -> Child:
        (port,) = free_ports(1, self._draws)
        settings = NodeSettings(self.rpc, self._plan.segment_bytes, HostPort(LOOPBACK, port))
        name = f"node-{place}"
        return start_node(name, settings, self._logs / f"{name}.log")

"""``unified-cache node``: one Mooncake storage node in production."""

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unified_cache.byte_sizes import parse_bytes
from unified_cache.cluster.event_log import EventLog
from unified_cache.cluster.host_port import HostPort, free_ports
from unified_cache.cluster.node import NodeSettings, Transport
from unified_cache.cluster.production import run_node
from unified_cache.storage_backends.mooncake.hosts import check_resolves, source_host
from unified_cache.storage_backends.mooncake.native import master_program

__all__ = ["NodeCommand", "node_app"]

NODE_EPILOG = """**Examples**

    unified-cache node --master 10.0.0.1:50051 --segment-bytes 64GiB

    unified-cache node --master cache-master:50051 --segment-bytes 64GiB --host cache-1 --wait-s 60
"""

node_app = typer.Typer(rich_markup_mode="markdown")


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """Give memory of this machine to a Mooncake cluster until SIGTERM; log each event as one line of JSON.

    The node is ready when a page has travelled to it and back from another process. Its pages are lost when it ends.
    """

    master: Annotated[str, typer.Option(metavar="HOST:PORT", help="RPC address of the master.")]
    segment_bytes: Annotated[str, typer.Option(metavar="BYTES", help="Memory to give, as in 64GiB; taken as it fills.")]
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Where others reach this node. Default: the interface towards the master."),
    ] = None
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Part of the node's name; 0 draws one.")
    ] = 0
    protocol: Annotated[Transport, typer.Option(help="What carries pages.")] = Transport.TCP
    wait_s: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, max=3600, help="How long to wait for the master at the start.")
    ] = 3.0
    ready_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file that exists while the node is ready.")
    ] = None

    def run(self) -> None:
        """Run until a signal.

        Raises:
            ConfigError: an option cannot be, or Mooncake is not installed.
            StorageError: no master, or others do not reach the node, or it died.
        """
        master = HostPort.parse("--master", self.master)
        check_resolves("--master", master.host)
        host = self.host or source_host(master.host, master.port)
        check_resolves("--host", host)
        master_program()  # for what it checks
        port = self.port or free_ports(1, random.SystemRandom())[0]
        segment_bytes = parse_bytes("--segment-bytes", self.segment_bytes)
        settings = NodeSettings(master, segment_bytes, HostPort(host, port), self.protocol)
        run_node(settings, self.wait_s, self.ready_file, EventLog(sys.stderr, time.time))


node_app.command("node", epilog=NODE_EPILOG)(NodeCommand)

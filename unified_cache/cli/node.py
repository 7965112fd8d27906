"""``unified-cache node``: one Mooncake storage node in production."""

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from unified_cache.cli.setting_options import ConfigOption, SetOption, given_flags, setting_option
from unified_cache.cluster.event_log import EventLog
from unified_cache.cluster.host_port import HostPort, free_ports
from unified_cache.cluster.node import NodeSettings
from unified_cache.cluster.production import run_node
from unified_cache.errors import ConfigError
from unified_cache.settings.loading import read_settings
from unified_cache.settings.mooncake import NodeChoices, Transport
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

    master: Annotated[str | None, setting_option(NodeChoices, "master", "HOST:PORT")] = None
    segment_bytes: Annotated[str | None, setting_option(NodeChoices, "segment_bytes")] = None
    host: Annotated[str | None, setting_option(NodeChoices, "host", "HOST")] = None
    port: Annotated[int | None, setting_option(NodeChoices, "port", "PORT")] = None
    protocol: Annotated[Transport | None, setting_option(NodeChoices, "protocol")] = None
    wait_s: Annotated[float | None, setting_option(NodeChoices, "wait_s", "SECONDS")] = None
    ready_file: Annotated[Path | None, setting_option(NodeChoices, "ready_file", "FILE")] = None
    config: ConfigOption = None
    assigned: SetOption = None

    def run(self) -> None:
        """Run until a signal.

        Raises:
            ConfigError: an option cannot be, or Mooncake is not installed.
            StorageError: no master, or others do not reach the node, or it died.
        """
        found = read_settings(NodeChoices, self.config, self._flags(), self.assigned or ()).settings
        if found.master is None or found.segment_bytes is None:
            lacking = "--master" if found.master is None else "--segment-bytes"
            raise ConfigError(f"{lacking} must be given, or stand in [node] of unified-cache.toml; found neither")
        master = HostPort.parse("--master", found.master)
        check_resolves("--master", master.host)
        host = found.host or source_host(master.host, master.port)
        check_resolves("--host", host)
        master_program()  # for what it checks
        port = found.port or free_ports(1, random.SystemRandom())[0]
        settings = NodeSettings(master, found.segment_bytes, HostPort(host, port), found.protocol)
        run_node(settings, found.wait_s, found.ready_file, EventLog(sys.stderr, time.time))

    def _flags(self) -> dict[str, object]:
        return given_flags(
            {
                "master": self.master,
                "segment_bytes": self.segment_bytes,
                "host": self.host,
                "port": self.port,
                "protocol": self.protocol,
                "wait_s": self.wait_s,
                "ready_file": self.ready_file,
            }
        )


node_app.command("node", epilog=NODE_EPILOG)(NodeCommand)

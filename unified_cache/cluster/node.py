"""Storage nodes from the side of the process that starts them."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unified_cache.cluster.child import PYTHON, Child
from unified_cache.cluster.host_port import HostPort
from unified_cache.errors import ConfigError
from unified_cache.settings.mooncake import Transport
from unified_cache.storage_backends.mooncake.native import SEGMENT_BYTES_MIN

__all__ = ["NodeSettings", "check_round_trip", "check_segment", "start_node"]


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Settings of one storage node: its master, the memory that it gives, and the address at which others reach it.

    The port is a name, which no two nodes of a machine share: the ports that Mooncake listens on are its own choice.

    Raises:
        ConfigError: see ``check_segment``.
    """

    master: HostPort
    segment_bytes: int
    address: HostPort
    transport: Transport = Transport.TCP

    def __post_init__(self) -> None:
        check_segment(self.segment_bytes)

    def as_json(self) -> str:
        """Write down for the node's own process."""
        return json.dumps(
            [
                [self.master.host, self.master.port],
                self.segment_bytes,
                [self.address.host, self.address.port],
                self.transport.value,
            ]
        )

    @classmethod
    def from_json(cls, text: str) -> "NodeSettings":
        """Read what ``as_json`` wrote."""
        master, segment_bytes, address, transport = json.loads(text)
        return cls(HostPort(*master), segment_bytes, HostPort(*address), Transport(transport))


def check_segment(segment_bytes: int) -> None:
    """See whether a node of this machine can give so much memory.

    Raises:
        ConfigError: Mooncake takes no segment so small, or the machine has not so much.
    """
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not SEGMENT_BYTES_MIN <= segment_bytes <= machine_bytes:
        raise ConfigError(
            f"a segment must have at least {SEGMENT_BYTES_MIN} bytes (16MiB) and at most {machine_bytes}, all memory "
            f"of this machine, found {segment_bytes}"
        )


def start_node(name: str, settings: NodeSettings, log: Path | None) -> Child:
    """Start a process that gives its memory to the cluster; it reports when the master knows it."""
    command = (*PYTHON, "unified_cache.cluster.storage_node", settings.as_json())
    return Child.start(name, str(settings.address), command, log=log)


def check_round_trip(
    master: HostPort, nodes: Sequence[str], transport: Transport, timeout_s: float, log: Path | None
) -> None:
    """Put a page on each of ``nodes``, named by their addresses, and get it back, from a process of its own.

    Only this shows that others reach a node: the master believes any address, and a node always reaches itself.

    Raises:
        StorageError: a page did not arrive or came back changed; the message names the node.
    """
    request = json.dumps([str(master), list(nodes), transport.value])
    command = (*PYTHON, "unified_cache.cluster.round_trip", request)
    traveller = Child.start("round trip", "", command, log=log)
    traveller.await_report(timeout_s)
    traveller.kill()

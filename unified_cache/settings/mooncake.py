"""Settings of a Mooncake storage node, and of a cluster on one machine."""

from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from unified_cache.settings.section import Bytes, Count, Section

__all__ = ["ClusterChoices", "NodeChoices", "Transport"]


class Transport(Enum):
    """Protocol that carries pages between nodes."""

    TCP = "tcp"
    RDMA = "rdma"


class NodeChoices(Section):
    """Master, memory and address of one storage node."""

    master: str | None = None
    """RPC address of the master, HOST:PORT; it must be given."""
    segment_bytes: Bytes | None = None
    """Memory to give, as in 64GiB; taken as it fills. It must be given."""
    host: str | None = None
    """Where others reach this node; if unset, at the interface towards the master."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Part of the node's name; 0 draws one."""
    protocol: Transport = Transport.TCP
    """What carries pages."""
    wait_s: Annotated[float, Field(ge=0, le=3_600)] = 3.0
    """How long to wait for the master at the start."""
    ready_file: Path | None = None
    """A file that exists while the node is ready."""


class ClusterChoices(Section):
    """Size and place of a cluster on this machine."""

    nodes: Count = 3
    """Storage nodes."""
    segment_bytes: Bytes = 256 << 20
    """Memory of each node, as in 64MiB; taken as it fills."""
    dir: Path | None = None
    """State and logs; one cluster in each. ``~/.local/state/unified-cache/cluster`` if unset."""

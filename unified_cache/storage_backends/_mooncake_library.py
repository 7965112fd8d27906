"""The Mooncake library: loaded when it is first needed, with its environment set, or told what is missing.

The library reads its settings from the environment, some of them while it is loaded. What the operator has set
is left alone.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol, cast

from unified_cache.errors import ConfigError

__all__ = [
    "ENVIRONMENT",
    "WHEELS",
    "Code",
    "PutConfig",
    "Replica",
    "Store",
    "check_wheels",
    "load_store",
    "missing_text",
    "new_put_config",
]

ENVIRONMENT: Mapping[str, str] = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_LOG_LEVEL": "ERROR",
}
"""Setting up holds the interpreter: once is enough. A stalled master is told by 2 s, a stalled node after 1 s per
four objects of a call. Only errors are logged."""

WHEELS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")

SYSTEM_PACKAGES: Mapping[str, str] = {
    "libibverbs.so": "libibverbs1",
    "libnuma.so": "libnuma1",
    "libcurl.so": "libcurl4",
}
"""Debian's package of each library that the wheel does not bring along."""

_MODULE = "mooncake.store"


class Code(IntEnum):
    """Result codes of the store client that mean something to us; a count of bytes or 0 is a success."""

    NO_ROOM = -200
    INVALID = -600
    NOT_READY = -703
    NOT_FOUND = -704
    LEASE_EXPIRED = -707
    TRANSFER_FAILED = -800
    CHECKSUM_MISMATCH = -801
    RPC_FAILED = -900
    RPC_TIMEOUT = -901


class BufferPlace(Protocol):
    """Where a replica lies in somebody's memory."""

    transport_endpoint: str
    size: int


class MemoryReplica(Protocol):
    """A replica in memory."""

    buffer_descriptor: BufferPlace


class Replica(Protocol):
    """One replica of an object, as the master knows it."""

    def is_memory_replica(self) -> bool:
        """Tell whether it lies in memory, and not on a disk."""
        ...

    def get_memory_descriptor(self) -> MemoryReplica:
        """Return where."""
        ...


class PutConfig(Protocol):
    """How objects are stored."""

    replica_num: int
    with_hard_pin: bool
    group_ids: list[str]
    """One for each object of the call: what has one group is evicted together."""


class Store(Protocol):
    """What we use of ``mooncake.store.MooncakeDistributedStore``. Codes stand in the order of the keys."""

    def setup(
        self, host: str, metadata: str, segment: int, buffer: int, protocol: str, devices: str, master: str
    ) -> int:
        """Connect. Holds the interpreter's lock until it is done."""
        ...

    def register_buffer(self, pointer: int, size: int) -> int:
        """Make memory known to the transport."""
        ...

    def unregister_buffer(self, pointer: int) -> int:
        """Make memory unknown to the transport."""
        ...

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Return 1, 0 or a code for each; those that exist are leased."""
        ...

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Replica]]:
        """Return the replicas of each that exists; they are leased, and each that does not is logged."""
        ...

    def batch_put_from(self, keys: list[str], pointers: list[int], sizes: list[int], config: PutConfig) -> list[int]:
        """Store; 0 for a key that exists or is reserved, too."""
        ...

    def batch_put_from_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]], config: PutConfig
    ) -> list[int]:
        """Store objects that lie in several buffers."""
        ...

    def batch_get_into(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        """Read; bytes read or a code for each."""
        ...

    def batch_get_into_multi_buffers(
        self, keys: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        """Read into several buffers an object."""
        ...

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        """Remove; with ``force`` what is leased, too."""
        ...


def load_store() -> Store:
    """Load the library and make a client, not connected yet.

    Raises:
        ConfigError: the wheel or a system library is missing, or both wheels are installed.
    """
    return cast("Store", _class_in_library("MooncakeDistributedStore")())


def new_put_config() -> PutConfig:
    """Make what tells the client how to store: one replica, nothing pinned."""
    return cast("PutConfig", _class_in_library("ReplicateConfig")())


@cache
def _class_in_library(name: str) -> Callable[[], object]:
    installed = [wheel for wheel in WHEELS if _is_installed(wheel)]
    check_wheels(installed)
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        found: object = vars(import_module(_MODULE))[name]
    except ImportError as error:
        raise ConfigError(missing_text(installed, str(error))) from error
    return cast("Callable[[], object]", found)


def check_wheels(installed: Sequence[str]) -> None:
    """Check that no wheel overwrites another.

    Raises:
        ConfigError: both are installed.
    """
    if len(installed) > 1:
        raise ConfigError(
            f"{' and '.join(installed)} both install the package mooncake; "
            f"uninstall both, then install the extra [mooncake] or [mooncake-cuda]"
        )


def missing_text(installed: Sequence[str], reason: str) -> str:
    """Say what to install, from why the library cannot be loaded."""
    if not installed:
        return "mooncake is not installed; pip install 'unified-cache[mooncake]', or [mooncake-cuda] on CUDA nodes"
    for library, package in SYSTEM_PACKAGES.items():
        if library in reason:
            return f"mooncake needs the system library {library}; apt-get install {package} ({reason})"
    return f"{installed[0]} cannot be loaded: {reason}"


def _is_installed(wheel: str) -> bool:
    try:
        version(wheel)
    except PackageNotFoundError:
        return False
    return True

"""The Mooncake library: what it needs of a machine, and the library itself, loaded when it is first needed.

Linux, one of two wheels, three system libraries; what is missing is named in one line. The library reads its settings
from the environment, some of them while it is loaded. What the operator has set stays.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import cache
from importlib import import_module
from importlib.metadata import Distribution, distributions
from typing import TYPE_CHECKING, cast

from unified_cache.core.errors import ConfigError

if TYPE_CHECKING:  # the library has no types of its own; ``typings`` has those of what we use
    from mooncake.engine import TransferEngine
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

WHEELS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
"""Without and with CUDA; both install the package ``mooncake``, one over the other."""

PACKAGES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""Debian's package of every library that the wheels leave to the system."""

APT = ("apt-get", "install", "--yes", "--no-install-recommends")

ENVIRONMENT: Mapping[str, str] = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_LOG_LEVEL": "ERROR",
}
"""Setting up holds the interpreter: once is enough. A stalled master is found out by 2 s, a stalled node after 1 s per
four objects of a call. Of the library's log, errors go to standard error: two lines at setup, none for a miss."""

METADATA = "P2PHANDSHAKE"
"""Processes tell each other how to reach them; no metadata server that could be lost."""

SEGMENT_BYTES_MIN = 16 << 20
"""Less is refused by the store client (-600)."""


class ResultCode(IntEnum):
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


def load_store() -> "MooncakeDistributedStore":
    """Load the library and make a client, not connected yet; raise ConfigError as ``usable_wheel``."""
    return cast("MooncakeDistributedStore", _class_in_library("mooncake.store", "MooncakeDistributedStore")())


def load_engine() -> "TransferEngine":
    """Make what moves bytes between nodes, for a client to use and for reads of a replica that it would not choose."""
    return cast("TransferEngine", _class_in_library("mooncake.engine", "TransferEngine")())


def new_put_config() -> "ReplicateConfig":
    """Make the configuration that says how to store: one replica, nothing pinned."""
    return cast("ReplicateConfig", _class_in_library("mooncake.store", "ReplicateConfig")())


def missing_packages(load: Callable[[str], object] = ctypes.CDLL) -> list[str]:
    """Name the Debian packages whose library ``load`` cannot load."""
    missing: list[str] = []
    for library, package in PACKAGES.items():
        try:
            load(library)
        except OSError:
            missing.append(package)
    return missing


def apt_command(packages: Sequence[str]) -> list[str]:
    """Return the command that installs ``packages`` on Debian; it needs root."""
    return [*APT, *packages]


@cache
def _class_in_library(module: str, name: str) -> Callable[[], object]:
    wheel = usable_wheel()
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        found: object = vars(import_module(module))[name]
    except ImportError as error:
        raise ConfigError(f"{wheel.name} {wheel.version} cannot be loaded: {error}") from error
    return cast("Callable[[], object]", found)


def usable_wheel(search: Sequence[str] = sys.path, load: Callable[[str], object] = ctypes.CDLL) -> Distribution:
    """Return the wheel found along ``search``; ConfigError says what is missing, and what to do."""
    if sys.platform != "linux":
        raise ConfigError(f"Mooncake runs on Linux only, found {sys.platform}")
    wheel = _only_wheel(search)
    missing = missing_packages(load)
    if missing:
        raise ConfigError(f"Mooncake needs {', '.join(missing)}; install with: {' '.join(apt_command(missing))}")
    return wheel


def _only_wheel(search: Sequence[str]) -> Distribution:
    # A directory named twice on the path lists its wheels twice.
    found = {name: wheel for name in WHEELS for wheel in distributions(name=name, path=list(search))}
    if not found:
        raise ConfigError(
            "Mooncake is not installed; pip install 'unified-cache[mooncake]', or [mooncake-cuda] where CUDA is"
        )
    if len(found) > 1:
        raise ConfigError(
            f"{' and '.join(found)} are both installed, and each overwrites the other; pip uninstall both, then "
            f"pip install 'unified-cache[mooncake]', or [mooncake-cuda] where CUDA is"
        )
    return next(iter(found.values()))

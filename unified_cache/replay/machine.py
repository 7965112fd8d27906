"""The machine that a replay runs on: its memory and its versions; and sizes in words."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["PLAIN_CORE", "cpu_name", "memory_bytes", "own_version"]

PLAIN_CORE = "plain Python"
"""How the core of a result ran that was not compiled."""

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_bytes() -> int:
    """Return the memory that this process may use: physical memory, or the limit of its control group if less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such limit, or the word "max"
            memory = min(memory, int(path.read_text(encoding="ascii")))
    return memory


def own_version() -> str:
    """Return the version of this package."""
    try:
        return version("unified-cache")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


def cpu_name() -> str:
    """Return the model name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

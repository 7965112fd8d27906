"""Memory of this machine: what a process may have, and what it may still take without being killed for it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from unified_cache.core.byte_sizes import bytes_text
from unified_cache.core.errors import ConfigError

ROOT = Path("/")


class _Limit(NamedTuple):
    """Limit of a control group, and how much of it is taken by what the system would not give up for others."""

    limit_bytes: int
    taken_bytes: int


def memory_bytes(root: Path = ROOT) -> int:
    """Return the memory that this process may have: physical memory, or the limit of its control groups if less."""
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical_bytes, *(each.limit_bytes for each in _limits(root))])


def available_bytes(root: Path = ROOT) -> int:
    """Return the memory that may still be taken: the machine's, or that of the tightest control group if less.

    Pages of files that are cached count as available, since the system gives them up. Where a system does not say what
    is available, it is all memory.
    """
    available = [max(each.limit_bytes - each.taken_bytes, 0) for each in _limits(root)]
    with suppress(OSError, KeyError, ValueError):
        available.append(_fields(root / "proc/meminfo")["MemAvailable:"] * 1024)
    return min([memory_bytes(root), *available])


def check_available(need_bytes: int, subject: str, root: Path = ROOT) -> None:
    """Raise ConfigError where ``subject`` needs more memory than may still be taken."""
    have_bytes = available_bytes(root)
    if need_bytes > have_bytes:
        raise ConfigError(
            f"{subject} need {bytes_text(need_bytes)} of memory, found {bytes_text(have_bytes)} available"
        )


def _limits(root: Path) -> Iterator[_Limit]:
    """Yield the limits of the control groups that this process is in, of version 2 and of version 1."""
    top = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, group = line.partition(":")
        controllers, _, path = group.partition(":")
        if not controllers:
            yield from _limits_of(top, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _limits_of(top / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _limits_of(place: Path, path: str, limit: str, used: str, prefix: str) -> Iterator[_Limit]:
    """Yield the limits on the way down to a group; in a container its own may be the top one, and others not seen."""
    for name in ["", *path.strip("/").split("/")]:
        place = place / name
        with suppress(OSError, KeyError, ValueError):  # no such group, or the word "max" for no limit
            cached = _fields(place / "memory.stat")
            files_bytes = cached[f"{prefix}inactive_file"] + cached[f"{prefix}active_file"]
            yield _Limit(int(_text(place / limit)), max(int(_text(place / used)) - files_bytes, 0))


def _fields(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value, *_ in map(str.split, path.read_text(encoding="ascii").splitlines())}


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""

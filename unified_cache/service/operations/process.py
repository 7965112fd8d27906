"""The process of a server: malloc set to reuse freed memory, and room for file descriptors."""

import ctypes
import resource

OWN_DESCRIPTORS = 8192
"""Kept free of connections: for the store's files and directories, metrics, logs."""

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
"""Parameters of mallopt(3) in glibc."""

_MMAP_BYTES_MIN = 32 << 20
"""The largest that glibc takes: what is smaller comes from memory that was used before."""

_TOP_BYTES = 64 << 20
"""Asked of the system at a time, and kept at the top."""

_ARENAS_MAX = 2
"""Each keeps what it once needed, and takes nothing from the others: with 8 for every core, as glibc has it, a server
under mixed load grew by a tenth in minutes, and by nothing with two (``make soak-service``)."""


def keep_freed_memory() -> bool:
    """Make malloc reuse what was freed instead of returning it; False where malloc is not glibc's.

    Streaming through gRPC in Python is half as fast again with it: every message is a fresh megabyte. Memory in use
    stays bounded by what is in use at most at a time. Affects the process; called once by who runs a server.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    wanted = (
        (_M_MMAP_THRESHOLD, _MMAP_BYTES_MIN),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_TOP_PAD, _TOP_BYTES),
        (_M_ARENA_MAX, _ARENAS_MAX),
    )
    taken = [mallopt(parameter, value) == 1 for parameter, value in wanted]
    return all(taken)


def room_for_connections(connections_max: int) -> int:
    """Raise this process's soft limit of descriptors as far as needed; return how many connections it has room for.

    The hard limit stays, which only a supervisor can raise. At least half of it is for connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections_max + OWN_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections_max
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return min(connections_max, max(limit - OWN_DESCRIPTORS, limit // 2))

"""File descriptors: room for as many connections as a server may have, and for its own files beside them."""

import resource

__all__ = ["OWN_DESCRIPTORS", "room_for_connections"]

OWN_DESCRIPTORS = 512
"""Kept free of connections: for the store's files and directories, metrics, logs."""


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

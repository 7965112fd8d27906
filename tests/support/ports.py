"""Ports of the loopback address for processes that tests start."""

import random
import socket

PORTS = range(20_000, 32_000)
"""Below those of outgoing connections, above those that Mooncake draws."""


def free_ports(count: int) -> list[int]:
    """Return ports that no process has at this moment."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, 1_000):
        with socket.socket() as holder:
            try:
                holder.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"expected {count} free ports, found {len(found)}")

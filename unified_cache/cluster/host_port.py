"""Host and port, in the form that Mooncake takes them."""

import errno
import random
import socket
from contextlib import ExitStack
from dataclasses import dataclass

from unified_cache.errors import ConfigError

__all__ = ["LOOPBACK", "HostPort", "claim", "free_ports"]

LOOPBACK = "127.0.0.1"

PORTS = range(20_000, 32_000)
"""Range that free ports are drawn from: below those of outgoing connections, above those that Mooncake draws."""
DRAWS_MAX = 1000


@dataclass(frozen=True, slots=True)
class HostPort:
    """Host and port at which a process listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, option: str, text: str) -> "HostPort":
        """Read HOST:PORT.

        Raises:
            ConfigError: it is none; the message names ``option``.
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"{option} must be HOST:PORT as in 10.0.0.1:50051, found {text!r}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def refusal(self, timeout_s: float) -> str:
        """Connect and close at once; return why the connection failed, or an empty text."""
        try:
            socket.create_connection((self.host, self.port), timeout_s).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""


def claim(host: str, port: int) -> socket.socket:
    """Reserve a port without listening on it; the caller closes the socket. No other process can bind it meanwhile.

    Raises:
        OSError: the port is taken.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        try:
            holder.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            # Behind a translated address, the advertised host is not ours to bind.
            holder.bind(("", port))
    except OSError:
        holder.close()
        raise
    return holder


def free_ports(count: int, draws: random.Random) -> list[int]:
    """Return ports of the loopback address that are free at this moment.

    Raises:
        ConfigError: fewer are free.
    """
    found: list[int] = []
    with ExitStack() as claims:
        for _ in range(DRAWS_MAX):
            if len(found) == count:
                return found
            port = draws.choice(PORTS)
            try:
                claims.enter_context(claim(LOOPBACK, port))
            except OSError:
                continue
            found.append(port)
    raise ConfigError(f"{count} free ports are needed in [{PORTS.start}, {PORTS.stop}), found {len(found)}")

"""Names of hosts, and whether somebody listens there."""

import socket

from unified_cache.errors import ConfigError, StorageError

__all__ = ["KNOCK_TIMEOUT_S", "check_resolves", "knock", "source_host"]

KNOCK_TIMEOUT_S = 1.0
"""For a connection to a master that lives: a round trip, and some patience."""


def check_resolves(option: str, host: str) -> None:
    """Look ``host`` up.

    Raises:
        ConfigError: nobody knows it; the message names ``option``.
    """
    try:
        socket.getaddrinfo(host, None, socket.AF_INET)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{option} must be a host that all machines resolve, found {host!r}: {error}") from error


def source_host(host: str, port: int) -> str:
    """Return the address of this machine's interface that leads to a host. Sends nothing.

    Raises:
        ConfigError: no interface does.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise ConfigError(f"cannot reach {host}:{port}: {error.strerror or error}") from error
        found: str = probe.getsockname()[0]
    return found


def knock(host: str, port: int) -> None:
    """Connect to a master and hang up.

    Raises:
        StorageError: nobody is there.
    """
    try:
        socket.create_connection((host, port), KNOCK_TIMEOUT_S).close()
    except OSError as error:
        raise StorageError(f"no Mooncake master answers at {host}:{port}: {error}", retryable=True) from error

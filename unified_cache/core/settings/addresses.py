"""Addresses that a server listens at."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from unified_cache.core.errors import ConfigError

_UNIX = "unix:"
_PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Address to listen at: ``HOST:PORT``, ``[IPV6]:PORT`` or ``unix:PATH``."""

    text: str
    host: str
    """Name or number without brackets; empty for a Unix socket."""
    port: int
    """0 lets the system choose."""

    @classmethod
    def of(cls, text: str) -> "ListenAddress":
        """Read an address; a ConfigError if it is none."""
        if text.startswith(_UNIX) and len(text) > len(_UNIX):
            return cls(text, "", 0)
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdecimal() or int(port) > _PORT_MAX:
            raise ConfigError(f"an address is HOST:PORT, [IPV6]:PORT or unix:PATH, found {text!r}")
        bracketed = host.startswith("[") and host.endswith("]")
        if ":" in host and not bracketed:
            raise ConfigError(f"an IPv6 address goes in brackets as in [::1]:{port}, found {text!r}")
        return cls(text, host[1:-1] if bracketed else host, int(port))

    @property
    def socket(self) -> Path | None:
        """Path of a Unix socket; None for a host and port."""
        return Path(self.text.removeprefix(_UNIX)) if self.text.startswith(_UNIX) else None

    def bound(self, port: int) -> str:
        """Return the address with the port that it got, where it is not a Unix socket."""
        return self.text if self.socket is not None else f"{self.text.rpartition(':')[0]}:{port}"

    @property
    def is_local(self) -> bool:
        """True if no other machine can reach it; a name other than localhost counts as reachable."""
        return self.socket is not None or is_local(self.host)


def is_local(host: str) -> bool:
    """Return whether no other machine can reach a host; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _checked(text: str) -> str:
    try:
        return ListenAddress.of(text).text
    except ConfigError as error:
        raise ValueError(str(error)) from error


Address = Annotated[str, AfterValidator(_checked)]
"""Address to listen at, as ``ListenAddress`` reads it."""

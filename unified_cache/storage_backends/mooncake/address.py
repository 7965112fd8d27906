"""Address of a Mooncake cluster and the part that this process takes in it, read from a URL.

    mooncake:etcd://HOST:PORT,HOST:PORT,HOST:PORT[?...]
    mooncake://HOST:PORT[?replicas=N&admin=HOST:PORT&protocol=tcp|rdma&devices=LIST&host=NAME&segment_bytes=N]

``HOST:PORT`` is the master's, or those of the members of etcd, which says which of several masters leads. A page is put
on ``replicas`` nodes, of which all but one may die. ``admin`` is where the master's HTTP side is; a port alone, as with
etcd, is one of the same host. ``host`` is the name under which other nodes reach this one; ``segment_bytes`` is memory
of this process that the cluster may fill, none by default.
"""

import socket
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from unified_cache.core.errors import ConfigError, StorageError, without_secrets
from unified_cache.storage_backends.mooncake.leader import leader_of
from unified_cache.storage_backends.mooncake.native import SEGMENT_BYTES_MIN

ADMIN_PORT = 9003
"""Of the HTTP side of ``mooncake_master``, unless it is given another."""

PROTOCOLS = ("tcp", "rdma")

REPLICAS_MAX = 4
"""More cost room and writes, and guard against deaths that come less often than the master's own."""

_OPTIONS = ("replicas", "admin", "protocol", "devices", "host", "segment_bytes")


@dataclass(frozen=True, slots=True)
class MooncakeAddress:
    """A master, or several of which one leads, and this process as a client."""

    host: str
    """Of the master, for its RPC and its HTTP side, or of the first member of etcd."""
    port: int
    admin_host: str = ""
    """Of the master's HTTP side; the same as ``host`` if empty."""
    admin_port: int = ADMIN_PORT
    protocol: str = "tcp"
    devices: str = ""
    """RDMA devices, comma-separated; none for TCP."""
    local_host: str = ""
    """Name of this host for other nodes; what the route to the master says if empty."""
    segment_bytes: int = 0
    """Memory of this process given to the cluster, for as long as the process lives."""
    replicas: int = 1
    """Nodes that hold each page put by this process."""
    etcd: tuple[str, ...] = ()
    """Members of etcd, HOST:PORT each, where it says which master leads."""

    def __post_init__(self) -> None:
        for name, port in (("the master's port", self.port), ("admin", self.admin_port)):
            if not 0 < port < 1 << 16:
                raise ConfigError(f"{name} must be in [1, 65535], found {port}")
        if self.protocol not in PROTOCOLS:
            raise ConfigError(f"protocol must be one of {', '.join(PROTOCOLS)}, found {self.protocol!r}")
        if not 1 <= self.replicas <= REPLICAS_MAX:
            raise ConfigError(f"replicas must be in [1, {REPLICAS_MAX}], found {self.replicas}")
        if self.segment_bytes and self.segment_bytes < SEGMENT_BYTES_MIN:
            raise ConfigError(f"segment_bytes must be 0 or at least {SEGMENT_BYTES_MIN}, found {self.segment_bytes}")

    @property
    def master(self) -> str:
        """The master as the store client wants it."""
        return f"etcd://{';'.join(self.etcd)}" if self.etcd else f"{self.host}:{self.port}"

    def leader(self) -> tuple[str, int]:
        """Return host and port of the master that serves now; StorageError where nobody says."""
        return leader_of(self.etcd) if self.etcd else (self.host, self.port)

    def resolved_host(self) -> str:
        """Return the name under which other nodes reach this process; raise ConfigError where there is none."""
        if self.local_host:
            check_resolves("host", self.local_host)
            return self.local_host
        check_resolves("the master", self.host)
        return source_host(self.host, self.port)


def address_of_url(rest: str) -> MooncakeAddress:
    """Read what stands after ``mooncake:`` in a URL; raise ConfigError where it is not of the form above."""
    url = f"mooncake:{rest}"
    wanted = (
        f"mooncake://HOST:PORT or mooncake:etcd://HOST:PORT,HOST:PORT,HOST:PORT, with any of {', '.join(_OPTIONS)} "
        f"after a question mark"
    )
    is_etcd = rest.startswith("etcd:")
    try:
        parts = urlsplit(rest if is_etcd else url)
        members = tuple(parts.netloc.split(",")) if is_etcd else ()
        named = [urlsplit(f"//{member}") for member in members or (parts.netloc,)]
        ports = [each.port for each in named if each.hostname and not each.username]
        host = named[0].hostname
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else [])
        admin_host, _, admin_port = options.get("admin", f"{ADMIN_PORT}").rpartition(":")
        admin, segment_bytes = int(admin_port), int(options.get("segment_bytes", 0))
        replicas = int(options.get("replicas", 1))
    except ValueError as error:
        raise ConfigError(f"a Mooncake store is named as {wanted}, found {without_secrets(url)!r}: {error}") from error
    unknown = sorted(options.keys() - set(_OPTIONS))
    is_named = len(ports) == len(named) and None not in ports and not (is_etcd and admin_host)
    if unknown or not host or not is_named or parts.path not in ("", "/") or parts.fragment:
        raise ConfigError(f"a Mooncake store is named as {wanted}, found {without_secrets(url)!r}")
    return MooncakeAddress(
        host=host,
        port=ports[0] or 0,
        admin_host=admin_host,
        admin_port=admin,
        protocol=options.get("protocol", "tcp"),
        devices=options.get("devices", ""),
        local_host=options.get("host", ""),
        segment_bytes=segment_bytes,
        replicas=replicas,
        etcd=members,
    )


PROBE_TIMEOUT_S = 1.0
"""For a connection to a master that lives: a round trip, and some patience."""


def check_resolves(option: str, host: str) -> None:
    """Raise ConfigError, naming ``option``, where no address is known for ``host``."""
    try:
        socket.getaddrinfo(host, None, socket.AF_INET)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{option} must be a host that all machines resolve, found {host!r}: {error}") from error


def source_host(host: str, port: int) -> str:
    """Return the address of the interface that leads to a host, sending nothing; ConfigError where none does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise ConfigError(f"cannot reach {host}:{port}: {error.strerror or error}") from error
        found: str = probe.getsockname()[0]
    return found


def probe_master(host: str, port: int) -> None:
    """Connect to a master and hang up; raise StorageError where nobody answers."""
    try:
        socket.create_connection((host, port), PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise StorageError(f"no Mooncake master answers at {host}:{port}: {error}", retryable=True) from error

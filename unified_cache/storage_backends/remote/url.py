"""URL of a service, read: servers, credentials, timeouts."""

from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl

from unified_cache.core.errors import ConfigError, without_secrets
from unified_cache.core.files import expanded
from unified_cache.storage_backends.remote.credentials import CredentialFiles

MARK = "//"
"""Between the scheme and the servers."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Servers of a service, credentials and timeouts."""

    servers: tuple[str, ...]
    """``host:port`` or ``unix:path``, each once. Where a page goes depends on these names: all clients use the same."""
    secure: bool = False
    """Whether calls go over TLS."""
    files: CredentialFiles = field(default_factory=CredentialFiles)
    """Token, certificate and authorities, read when the servers are connected to, and again when they change."""
    token: str = field(default="", repr=False)
    """Presented with every call where no file has one; empty for none."""
    server_name: str = ""
    """Name in the servers' certificates, where it is not their host."""
    timeout_s: float = 10.0
    """Of one call to one server."""
    channels: int = 2
    """Connections to each server; calls take turns."""

    def __post_init__(self) -> None:
        named = f"grpc://{','.join(self.servers)}"
        if not self.servers or not all(map(_is_address, self.servers)):
            raise ConfigError(
                f"a service is named as grpc://HOST:PORT[,HOST:PORT...], found {without_secrets(named)!r}"
            )
        if len(set(self.servers)) != len(self.servers):
            raise ConfigError(f"each server is named once, found {without_secrets(named)}")
        if not self.timeout_s > 0 or self.channels < 1:
            raise ConfigError(
                f"a service needs timeout_s > 0 and channels >= 1, found {self.timeout_s} and {self.channels}"
            )


def _is_address(server: str) -> bool:
    """Return whether a text is HOST:PORT or unix:PATH; nobody's password stands in one."""
    host, _, port = server.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16
    return "@" not in server and (server.startswith("unix:") or bool(host and is_port))


def parse_rest(rest: str, *, secure: bool) -> RemoteOptions:
    """Read what follows the scheme: ``//HOST:PORT[,HOST:PORT...][?NAME=VALUE&...]``.

    Names are those of ``RemoteOptions``, and files: ``token_file``; with TLS ``ca_file``, ``cert_file``, ``key_file``.

    Raises:
        ConfigError: an unknown name, or a value that makes no sense.
    """
    place, _, query = rest.removeprefix(MARK).partition("?")
    if not rest.startswith(MARK) or not place:
        raise ConfigError(
            f"a service is named as grpc://HOST:PORT[,HOST:PORT...], found {without_secrets(f'grpc:{rest}')!r}"
        )
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError as error:
        raise ConfigError(f"options are NAME=VALUE joined by &, found {without_secrets(f'grpc:{rest}')!r}") from error
    known = {"token_file", "server_name", "timeout_s", "channels"}
    known |= {"ca_file", "cert_file", "key_file"} if secure else set()
    unknown = given.keys() - known
    if unknown:
        raise ConfigError(f"options are {', '.join(sorted(known))}, found {min(unknown)}")
    if ("cert_file" in given) != ("key_file" in given):
        raise ConfigError("a client's certificate needs both cert_file and key_file")
    names = ("token_file", "ca_file", "cert_file", "key_file")
    options = RemoteOptions(
        tuple(place.split(",")),
        secure,
        CredentialFiles(*(expanded(given[name]) if name in given else None for name in names)),
        server_name=given.get("server_name", ""),
    )
    try:
        return replace(
            options,
            timeout_s=float(given.get("timeout_s", options.timeout_s)),
            channels=int(given.get("channels", options.channels)),
        )
    except ValueError as error:
        raise ConfigError(f"timeout_s and channels are numbers: {error}") from error

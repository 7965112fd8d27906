"""URL of a service, read: servers, credentials, timeouts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import parse_qsl

import grpc

from unified_cache.core.errors import ConfigError, without_secrets

__all__ = ["RemoteOptions", "parse_rest"]

MARK = "//"
"""Between the scheme and the servers."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Servers of a service, credentials and timeouts."""

    servers: tuple[str, ...]
    """``host:port`` or ``unix:path``, each once. Where a page goes depends on these names: all clients use the same."""
    credentials: grpc.ChannelCredentials | None = None
    """None for plain text."""
    token: str = field(default="", repr=False)
    """Presented with every call; empty for none."""
    server_name: str = ""
    """Name in the servers' certificates, where it is not their host."""
    tenant: str = ""
    """Asserted with every call: a check that the credentials are the expected ones; empty for none."""
    timeout_s: float = 10.0
    """Of one call to one server."""
    channels: int = 2
    """Connections to each server; calls take turns."""
    retries: int = 1
    """Calls tried again once every server has failed."""

    def __post_init__(self) -> None:
        named = f"grpc://{','.join(self.servers)}"
        if not self.servers or not all(":" in server and "@" not in server for server in self.servers):
            raise ConfigError(
                f"a service is named as grpc://HOST:PORT[,HOST:PORT...], found {without_secrets(named)!r}"
            )
        if len(set(self.servers)) != len(self.servers):
            raise ConfigError(f"each server is named once, found {without_secrets(named)}")
        if not self.timeout_s > 0 or self.channels < 1 or self.retries < 0:
            raise ConfigError(
                "a service needs timeout_s > 0, channels >= 1 and retries >= 0, "
                f"found {self.timeout_s}, {self.channels} and {self.retries}"
            )


def parse_rest(rest: str, *, secure: bool) -> RemoteOptions:
    """Read what follows the scheme: ``//HOST:PORT[,HOST:PORT...][?NAME=VALUE&...]``.

    Names are those of ``RemoteOptions``, and files: ``token_file``; with TLS ``ca_file``, ``cert_file``, ``key_file``.

    Raises:
        ConfigError: an unknown name, a value that makes no sense, or a file that cannot be read.
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
    known = {"token_file", "server_name", "tenant", "timeout_s", "channels", "retries"}
    known |= {"ca_file", "cert_file", "key_file"} if secure else set()
    unknown = given.keys() - known
    if unknown:
        raise ConfigError(f"options are {', '.join(sorted(known))}, found {min(unknown)}")
    options = RemoteOptions(
        tuple(place.split(",")), server_name=given.get("server_name", ""), tenant=given.get("tenant", "")
    )
    try:
        options = replace(
            options,
            timeout_s=float(given.get("timeout_s", options.timeout_s)),
            channels=int(given.get("channels", options.channels)),
            retries=int(given.get("retries", options.retries)),
        )
    except ValueError as error:
        raise ConfigError(f"timeout_s, channels and retries are numbers: {error}") from error
    if "token_file" in given:
        options = replace(options, token=_content(given["token_file"]).decode("ascii", "replace").strip())
    return replace(options, credentials=_credentials(given)) if secure else options


def _credentials(given: Mapping[str, str]) -> grpc.ChannelCredentials:
    if ("cert_file" in given) != ("key_file" in given):
        raise ConfigError("a client's certificate needs both cert_file and key_file")
    ca, key, cert = (_content(given[name]) if name in given else None for name in ("ca_file", "key_file", "cert_file"))
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error

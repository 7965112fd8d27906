"""Credentials of a client of a service, read from files at once, and again when these change: as its servers do.

A token or a certificate that is rotated while a client is open is used from the next call on, so that those of SPIFFE,
which last an hour, need no restart.
"""

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import grpc

from unified_cache.core.errors import ConfigError
from unified_cache.core.files import read_kept

logger = logging.getLogger(__name__)

Stamp = tuple[tuple[int, int, int], ...]


def stamp_of(paths: Sequence[Path]) -> Stamp:
    """Return what changes with each file, its owner and mode too; zeros for one that is not there."""
    found: list[tuple[int, int, int]] = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            found.append((0, 0, 0))
        else:
            # Of a change of owner or mode the time of modification tells nothing; that of the inode's change does.
            found.append((status.st_ctime_ns, status.st_size, status.st_ino))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class CredentialFiles:
    """Files that say who a client is, and whom it believes; None for none."""

    token: Path | None = None
    authorities: Path | None = None
    """In PEM; those of gRPC where there is none."""
    certificate: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class ReadCredentials:
    """Content of the files when they were read."""

    token: str = field(repr=False)
    channel: grpc.ChannelCredentials | None
    """None for plain text."""


class ClientCredentials:
    """Credentials as the files have them now. Thread-safe.

    Files that cannot be read, are empty, or are half of a rotation, a certificate without its key, are said in the log
    once; what was read before holds until they change again.
    """

    def __init__(self, files: CredentialFiles, *, secure: bool) -> None:
        """Read the files; raise ConfigError where they cannot be."""
        self._files = files
        self._paths = [
            path for path in (files.token, files.authorities, files.certificate, files.key) if path is not None
        ]
        self._secure = secure
        self._guard = Lock()
        self._stamp = stamp_of(self._paths)
        self._read = self._read_now()

    def latest(self) -> ReadCredentials:
        """Return what the files hold, after one look at each."""
        if self._paths and self._guard.acquire(blocking=False):
            try:
                self._look()
            except ConfigError as error:
                logger.warning("%s; what was read before holds until it changes", error)
            finally:
                self._guard.release()
        return self._read

    def _look(self) -> None:
        stamp = stamp_of(self._paths)
        if stamp != self._stamp:
            # Before reading: what is written while it is read changes the files once more.
            self._stamp = stamp
            self._read = self._read_now()

    def _read_now(self) -> ReadCredentials:
        files = self._files
        token = "" if files.token is None else read_kept(files.token).decode("ascii", "replace").strip()
        if files.token is not None and not token:
            raise ConfigError(f"{files.token} must hold a token, found nothing")
        if not self._secure:
            return ReadCredentials(token, None)
        ca, key, chain = (
            None if path is None else read_kept(path) for path in (files.authorities, files.key, files.certificate)
        )
        if files.certificate is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(files.certificate, files.key, lambda: b"")
            except OSError as error:
                text = f"{files.certificate} and {files.key} must be a certificate and its key without a password"
                raise ConfigError(f"{text}: {error.strerror or error}") from error
        return ReadCredentials(token, grpc.ssl_channel_credentials(ca, key, chain))

"""Files of certificates, keys and revocation lists in PEM."""

import os
import stat
from pathlib import Path

from cryptography import x509

from unified_cache.errors import ConfigError

__all__ = ["certificates_in", "read_pem"]

_FILE_BYTES_MAX = 16 << 20
"""A revocation list of some hundred thousand certificates."""


def read_pem(path: Path, forbidden: int = 0) -> bytes:
    """Read a file whose mode has none of the bits of ``forbidden``.

    Raises:
        ConfigError: it cannot be read, is open to others, or too long.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            found = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path} must be a file that can be read: {error.strerror}") from error
    if mode & forbidden:
        raise ConfigError(f"{path} must be kept from others, as by chmod 600, found {stat.filemode(mode)}")
    if len(found) > _FILE_BYTES_MAX:
        raise ConfigError(f"{path} must have at most {_FILE_BYTES_MAX} bytes")
    return found


def certificates_in(pem: bytes, path: Path) -> list[x509.Certificate]:
    """Return the certificates in the content of a file.

    Raises:
        ConfigError: there is none, or one makes no sense.
    """
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{path} must hold certificates in PEM") from error

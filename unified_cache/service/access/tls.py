"""TLS: the server's certificates, read again when they change, and the tenant that a client's certificate names.

The name of a client is one of two, by the server's settings, and the other is never taken in its place:

* with a trust domain, the SPIFFE ID ``spiffe://DOMAIN/unified-cache/TENANT/ROLE``;
* without, the common name, ``TENANT`` or ``TENANT/ROLE``.
"""

import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from unified_cache.errors import ConfigError
from unified_cache.service.access.callers import Caller
from unified_cache.service.access.reloaded import Reloaded
from unified_cache.service.access.tokens import TENANT_NAME
from unified_cache.service.settings import Role, TlsSettings

__all__ = ["Certificates", "ClientNames", "files_of", "metrics_context", "read_certificates", "server_credentials"]

_FILE_BYTES_MAX = 1 << 20
_COMMON_NAME = "x509_common_name"
_SPIFFE_ID = "peer_spiffe_id"
_SERVICE_PATH = "unified-cache"


@dataclass(frozen=True, slots=True)
class Certificates:
    """Certificate, key and authorities of a server, in PEM."""

    chain: bytes
    key: bytes
    client_ca: bytes | None
    expires_s: float
    """End of the server's own certificate, in seconds since the epoch."""


class ClientNames:
    """Callers by the certificates of their connections; ``role`` is that of a common name without one."""

    def __init__(self, trust_domain: str | None, role: Role) -> None:
        self._trust_domain = trust_domain
        self._role = role

    def caller(self, context: grpc.ServicerContext) -> Caller | None:
        """Return the caller that the certificate of this connection names; None if it names nobody here."""
        authenticated = context.auth_context()
        if self._trust_domain is None:
            names = authenticated.get(_COMMON_NAME, ())
            tenant, slash, role = _only(names).partition("/")
            return _caller(tenant, role if slash else self._role.value)
        scheme, _, rest = _only(authenticated.get(_SPIFFE_ID, ())).partition("://")
        parts = rest.split("/")
        if scheme != "spiffe" or len(parts) != 4 or parts[:2] != [self._trust_domain, _SERVICE_PATH]:
            return None
        return _caller(parts[2], parts[3])


def _only(names: object) -> str:
    """Return the one name there is, as text; empty for none or several."""
    found = list(names) if isinstance(names, list | tuple) else []
    return found[0].decode("utf-8", "replace") if len(found) == 1 and isinstance(found[0], bytes) else ""


def _caller(tenant: str, role: str) -> Caller | None:
    roles = {each.value: each for each in Role}
    return Caller(tenant, roles[role]) if TENANT_NAME.fullmatch(tenant) and role in roles else None


def files_of(tls: TlsSettings) -> list[Path]:
    """List the files that hold the certificates."""
    return [path for path in (tls.certificate, tls.key, tls.client_ca) if path is not None]


def read_certificates(tls: TlsSettings) -> Certificates:
    """Read and check them.

    Raises:
        ConfigError: a file cannot be read, is no PEM of its kind, others may read the key, or it is another's key.
    """
    chain = _read(tls.certificate)
    key = _read(tls.key, forbidden=stat.S_IWGRP | stat.S_IRWXO)
    client_ca = None if tls.client_ca is None else _read(tls.client_ca)
    certificate = _certificates(tls.certificate, chain)[0]
    if tls.client_ca is not None and client_ca is not None:
        _certificates(tls.client_ca, client_ca)
    try:
        public = load_pem_private_key(key, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{tls.key} must hold a private key in PEM without a password") from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if public.public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise ConfigError(f"{tls.key} must be the key of {tls.certificate}, found another's")
    return Certificates(chain, key, client_ca, certificate.not_valid_after_utc.timestamp())


def server_credentials(certificates: Reloaded[Certificates]) -> grpc.ServerCredentials:
    """Make credentials that ask for the certificates at every handshake."""
    given = certificates.latest()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        now = certificates.latest()
        if now is given:
            return None
        given = now
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(given),
        changed,  # type: ignore[arg-type]  # None is "as before", which the stubs have forgotten
        require_client_authentication=given.client_ca is not None,
    )


def metrics_context(tls: TlsSettings) -> ssl.SSLContext:
    """Make a context that serves with the same certificates, and asks clients for theirs where the service does.

    Raises:
        ConfigError: a file cannot be read or makes no sense.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        if tls.client_ca is not None:
            context.load_verify_locations(tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise ConfigError(f"{tls.certificate} and its key must be read for metrics too: {error.strerror}") from error
    return context


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.chain)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=certificates.client_ca)


def _read(path: Path, forbidden: int = 0) -> bytes:
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


def _certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{path} must hold certificates in PEM") from error

"""TLS of the service and of its metrics: certificates that are read again when they change."""

import ssl
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from unified_cache.errors import ConfigError
from unified_cache.service.access.callers import AuditEntry, Observer
from unified_cache.service.access.clients import ClientTrust
from unified_cache.service.access.pem import certificates_in, read_pem
from unified_cache.service.access.reloaded import Reloaded
from unified_cache.settings.access import TlsSettings

__all__ = [
    "Certificates",
    "audit_certificates",
    "audit_metrics",
    "metrics_context",
    "read_certificates",
    "server_credentials",
]


@dataclass(frozen=True, slots=True)
class Certificates:
    """Certificate and key of a server, in PEM."""

    chain: bytes
    key: bytes
    expires_s: float
    """End of the server's own certificate, in seconds since the epoch."""


def read_certificates(tls: TlsSettings) -> Certificates:
    """Read and check them.

    Raises:
        ConfigError: a file cannot be read, is no PEM of its kind, others may read the key, or it is another's key.
    """
    chain = read_pem(tls.certificate)
    key = read_pem(tls.key, forbidden=stat.S_IWGRP | stat.S_IRWXO)
    certificate = certificates_in(chain, tls.certificate)[0]
    try:
        public = load_pem_private_key(key, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{tls.key} must hold a private key in PEM without a password") from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if public.public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise ConfigError(f"{tls.key} must be the key of {tls.certificate}, found another's")
    return Certificates(chain, key, certificate.not_valid_after_utc.timestamp())


def audit_certificates(observer: Observer, before: Certificates, after: Certificates) -> None:
    """Tell the audit log that the server shows another certificate."""
    expires = datetime.fromtimestamp(after.expires_s, UTC).isoformat(timespec="seconds")
    observer.audited(AuditEntry("certificate_changed", None, "", "OK", f"the server's, good until {expires}"))


def audit_metrics(observer: Observer, before: ssl.SSLContext, after: ssl.SSLContext) -> None:
    """Tell the audit log that the metrics show another certificate, or trust other authorities."""
    observer.audited(AuditEntry("metrics_tls_changed", None, "", "OK", "certificate or authorities of the metrics"))


def server_credentials(
    certificates: Reloaded[Certificates], trust: Reloaded[ClientTrust] | None
) -> grpc.ServerCredentials:
    """Make credentials that ask for the certificates at every handshake; with ``trust`` a client needs one of its own.

    gRPC goes on with what it was given last where there is nothing newer, so what is trusted for too long is refused
    call by call, see ``CertifiedClients``.
    """

    def newest() -> tuple[Certificates, ClientTrust | None]:
        return certificates.latest(), None if trust is None else trust.latest()

    given = newest()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        now = newest()
        if now == given:
            return None
        given = now
        return _configuration(*now)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(*given),
        changed,  # type: ignore[arg-type]  # None is "as before", which the stubs have forgotten
        require_client_authentication=trust is not None,
    )


def metrics_context(tls: TlsSettings, client_ca: Path | None) -> ssl.SSLContext:
    """Make a context that serves with the same certificates, and asks clients for those of an authority if given.

    Raises:
        ConfigError: a file cannot be read or makes no sense.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        files = ", ".join(str(path) for path in (tls.certificate, tls.key, client_ca) if path is not None)
        raise ConfigError(f"{files} must be certificates and a key for metrics too: {error.strerror}") from error
    return context


def _configuration(certificates: Certificates, trust: ClientTrust | None) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.chain)
    authorities = None if trust is None else trust.authorities
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)

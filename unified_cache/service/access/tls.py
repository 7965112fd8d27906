"""TLS: certificates of the server and of its metrics, and clients by theirs; all are read again when they change.

The name of a client is one of two, by the server's settings, and the other is never taken in its place:

* with a trust domain, the SPIFFE ID ``spiffe://DOMAIN/unified-cache/TENANT/ROLE``;
* without, the common name, ``TENANT`` or ``TENANT/ROLE``.

gRPC in Python takes no revocation lists, so they are held against the certificate of every call: what is revoked is
refused on connections that are open already too. gRPC tells the client's own certificate alone, so an authority in
between is revoked by a change of ``client_ca``. A file that cannot be read, or makes no sense, is a ``ConfigError``.
"""

import math
import re
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtensionOID, NameOID

from unified_cache.core.errors import ConfigError
from unified_cache.core.files import read_kept
from unified_cache.core.settings.service import Role, TlsSettings
from unified_cache.service.access.callers import Caller, Observer
from unified_cache.service.access.reloaded import Reloaded
from unified_cache.service.access.tokens import TENANT_NAME

_SERVICE_PATH = "unified-cache"
_PEM_CERTIFICATE = "x509_pem_cert"
_PEM_LIST = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)

_CERTIFICATES_KEPT = 1024
"""Certificates whose names are kept from one call to the next: parsing one takes as long as a small call."""

_Serial = tuple[bytes, int]
"""Issuer's name in DER, and serial number: one certificate."""


@dataclass(frozen=True, slots=True)
class ClientTrust:
    """Authorities that client certificates must come from, and the certificates that those have revoked."""

    authorities: bytes
    """In PEM."""
    revoked: frozenset[_Serial]
    expires_s: float
    """End of the revocation list that ends first, in seconds since the epoch; infinite without lists."""


@dataclass(frozen=True, slots=True)
class _Named:
    """Names in one certificate."""

    serial: _Serial
    common_names: tuple[str, ...]
    uris: tuple[str, ...]


class CertifiedClients:
    """Callers by their certificates; ``role`` is that of a common name without one. ``wall_clock`` as ``time.time``."""

    def __init__(
        self,
        trust: Reloaded[ClientTrust],
        trust_domain: str | None,
        role: Role,
        wall_clock: Callable[[], float],
        observer: Observer,
    ) -> None:
        self._trust = trust
        self._trust_domain = trust_domain
        self._role = role
        self._wall_clock = wall_clock
        self._observer = observer

    def caller(self, context: grpc.ServicerContext) -> Caller | None:
        """Return the caller that the certificate of this connection names; None if it names nobody here."""
        presented = _presented(context)
        return None if presented is None else self.named(presented)

    def trusts(self, context: grpc.ServicerContext) -> bool:
        """Return whether the certificate of this connection holds, whomever it names."""
        presented = _presented(context)
        return presented is not None and self._names_trusted(presented) is not None

    def named(self, certificate: bytes) -> Caller | None:
        """Return the caller that a certificate in PEM names, which passed the handshake; None if it names nobody here.

        Nobody either where it is revoked, where its list of revocations is over or cannot be read any more.
        """
        names = self._names_trusted(certificate)
        if names is None:
            return None
        if self._trust_domain is None:
            tenant, slash, role = _only(names.common_names).partition("/")
            return _caller(tenant, role if slash else self._role.value, names)
        scheme, _, rest = _only(names.uris).partition("://")
        parts = rest.split("/")
        if scheme != "spiffe" or len(parts) != 4 or parts[:2] != [self._trust_domain, _SERVICE_PATH]:
            return None
        return _caller(parts[2], parts[3], names)

    def _names_trusted(self, certificate: bytes) -> _Named | None:
        trust = self._trust.current()
        names = _named(certificate)
        if trust is None or names is None:
            return None
        if self._wall_clock() > trust.expires_s:
            self._observer.anomaly("revocations_over", "the list of revoked certificates has ended; publish a new one")
            return None
        if names.serial in trust.revoked:
            self._observer.anomaly("revoked", f"certificate {names.serial[1]:x} of {', '.join(names.common_names)}")
            return None
        return names


def read_trust(tls: TlsSettings, wall_clock: Callable[[], float]) -> ClientTrust:
    """Read the authorities of clients and their revocation lists."""
    if tls.client_ca is None:
        raise ConfigError("tls.client_ca must be set for clients to be known by certificates")
    authorities = read_kept(tls.client_ca)
    issuers = _certificates_in(authorities, tls.client_ca)
    if tls.client_crl is None:
        return ClientTrust(authorities, frozenset(), math.inf)
    blocks = _PEM_LIST.findall(read_kept(tls.client_crl))
    if not blocks:
        raise ConfigError(f"{tls.client_crl} must hold revocation lists in PEM, found none")
    revoked: set[_Serial] = set()
    expires_s = math.inf
    for number, block in enumerate(blocks, 1):
        place = f"list {number} of {tls.client_crl}"
        found = _checked_list(block, place, issuers)
        if found.next_update_utc is not None:
            expires_s = min(expires_s, found.next_update_utc.timestamp())
        revoked |= {(found.issuer.public_bytes(), each.serial_number) for each in found}
    if expires_s < wall_clock():
        raise ConfigError(f"{tls.client_crl} must hold lists that are not over yet; publish a new one")
    return ClientTrust(authorities, frozenset(revoked), expires_s)


def trust_changes(before: ClientTrust, after: ClientTrust) -> list[tuple[str, str]]:
    """Return the certificates newly revoked or reinstated, and whether authorities changed."""
    changes = [("certificate_revoked", f"{serial:x}") for _, serial in sorted(after.revoked - before.revoked)]
    changes += [("certificate_restored", f"{serial:x}") for _, serial in sorted(before.revoked - after.revoked)]
    if before.authorities != after.authorities:
        changes.append(("client_ca_changed", "authorities of client certificates"))
    return changes


@dataclass(frozen=True, slots=True)
class Certificates:
    """Certificate and key of a server, in PEM."""

    chain: bytes
    key: bytes
    expires_s: float
    """End of the server's own certificate, in seconds since the epoch."""


def read_certificates(tls: TlsSettings) -> Certificates:
    """Read and check them."""
    chain = read_kept(tls.certificate)
    key = read_kept(tls.key, forbidden=stat.S_IWGRP | stat.S_IRWXO)
    certificate = _certificates_in(chain, tls.certificate)[0]
    try:
        public = load_pem_private_key(key, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{tls.key} must hold a private key in PEM without a password") from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if public.public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise ConfigError(f"{tls.key} must be the key of {tls.certificate}, found another's")
    return Certificates(chain, key, certificate.not_valid_after_utc.timestamp())


def certificate_changes(before: Certificates, after: Certificates) -> list[tuple[str, str]]:
    """Return the change from one certificate of the server to another."""
    expires = datetime.fromtimestamp(after.expires_s, UTC).isoformat(timespec="seconds")
    return [("certificate_changed", f"the server's, good until {expires}")]


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


def metrics_context(tls: TlsSettings, client_ca: Path | None, *, may_show_token: bool) -> ssl.SSLContext:
    """Make a context that serves with the same certificates, and asks clients for those of an authority if given.

    A client that ``may_show_token`` need not have one.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_OPTIONAL if may_show_token else ssl.CERT_REQUIRED
    except OSError as error:
        files = ", ".join(str(path) for path in (tls.certificate, tls.key, client_ca) if path is not None)
        raise ConfigError(f"{files} must be certificates and a key for metrics too: {error.strerror}") from error
    return context


def _configuration(certificates: Certificates, trust: ClientTrust | None) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key, certificates.chain)
    authorities = None if trust is None else trust.authorities
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)


def _certificates_in(pem: bytes, path: Path) -> list[x509.Certificate]:
    """Return the certificates in the content of a file."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{path} must hold certificates in PEM") from error


def _checked_list(block: bytes, place: str, issuers: list[x509.Certificate]) -> x509.CertificateRevocationList:
    try:
        found = x509.load_pem_x509_crl(block)
        is_delta = any(each.oid == ExtensionOID.DELTA_CRL_INDICATOR for each in found.extensions)
    except ValueError as error:
        raise ConfigError(f"{place} must be a revocation list in PEM: {error}") from error
    if is_delta:
        raise ConfigError(f"{place} must be a whole list, found one of changes alone")
    if not any(issuer.subject == found.issuer and _is_signed(found, issuer) for issuer in issuers):
        raise ConfigError(
            f"{place} must be signed by an authority of tls.client_ca, found {found.issuer.rfc4514_string()}"
        )
    return found


def _is_signed(found: x509.CertificateRevocationList, issuer: x509.Certificate) -> bool:
    try:
        return found.is_signature_valid(issuer.public_key())  # type: ignore[arg-type]  # a key of no use is a TypeError
    except TypeError:
        return False


def _presented(context: grpc.ServicerContext) -> bytes | None:
    """Return the certificate of a connection in PEM; None where it has none."""
    presented = list(context.auth_context().get(_PEM_CERTIFICATE, ()))
    return presented[0] if len(presented) == 1 and isinstance(presented[0], bytes) else None


@lru_cache(_CERTIFICATES_KEPT)
def _named(certificate: bytes) -> _Named | None:
    """Return the names in a certificate; None where it makes no sense."""
    try:
        parsed = x509.load_pem_x509_certificate(certificate)
        common = parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        uris: list[str] = []
        for extension in parsed.extensions:
            if isinstance(extension.value, x509.SubjectAlternativeName):
                uris += extension.value.get_values_for_type(x509.UniformResourceIdentifier)
    except ValueError:
        return None
    names = tuple(each.value for each in common if isinstance(each.value, str))
    return _Named((parsed.issuer.public_bytes(), parsed.serial_number), names, tuple(uris))


def _only(names: tuple[str, ...]) -> str:
    """Return the one name there is; empty for none or several."""
    return names[0] if len(names) == 1 else ""


def _caller(tenant: str, role: str, names: _Named) -> Caller | None:
    roles = {each.value: each for each in Role}
    if not TENANT_NAME.fullmatch(tenant) or role not in roles:
        return None
    return Caller(tenant, roles[role], f"certificate {names.serial[1]:x}")

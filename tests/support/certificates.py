"""Certificates for tests: an authority, and what it issues, as files."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)

SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)
"""What an authority may do; clients of Python 3.13 and later ask for it, and for the names of keys."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, in PEM."""

    chain: bytes
    key: bytes

    def write(self, directory: Path, name: str) -> tuple[Path, Path]:
        """Write both, the key for its owner alone; whoever reads finds one of them or the other, whole."""
        paths = directory / f"{name}.pem", directory / f"{name}.key"
        for path, pem in zip(paths, (self.chain, self.key), strict=True):
            draft = path.with_suffix(".draft")
            draft.write_bytes(pem)
            draft.chmod(0o600)
            draft.replace(path)
        return paths


class Authority:
    """A certificate authority."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        basic = x509.BasicConstraints(ca=True, path_length=None)
        mine = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = _builder(self._name, self._name, self._key, 365 * DAY).add_extension(basic, critical=True)
        builder = builder.add_extension(mine, critical=False).add_extension(SIGNS, critical=True)
        self._certificate = builder.sign(self._key, SHA256())

    @property
    def pem(self) -> bytes:
        """Its own certificate."""
        return self._certificate.public_bytes(Encoding.PEM)

    def issue(self, common_name: str, *, uris: tuple[str, ...] = (), days: int = 30) -> Issued:
        """Issue a certificate, good for a server on loopback as well; with negative days it is expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            *map(x509.UniformResourceIdentifier, uris),
        ]
        builder = _builder(_name(common_name), self._name, key, days * DAY)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(signer, critical=False)
        certificate = builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(
            self._key, SHA256()
        )
        form = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Issued(certificate.public_bytes(Encoding.PEM), key.private_bytes(*form))

    def revoked(self, *issued: Issued, hours: float = 24, is_delta: bool = False) -> bytes:
        """Return a revocation list of certificates, in PEM, or the changes to one; with negative hours it is over."""
        now = datetime.now(UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._name)
            .last_update(now - DAY)
            .next_update(now + timedelta(hours=hours))
        )
        if is_delta:
            builder = builder.add_extension(x509.DeltaCRLIndicator(1), critical=True)
        for each in issued:
            one = x509.RevokedCertificateBuilder().serial_number(serial_of(each)).revocation_date(now).build()
            builder = builder.add_revoked_certificate(one)
        return builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM)


def serial_of(issued: Issued) -> int:
    """Return the serial number of a certificate."""
    return x509.load_pem_x509_certificate(issued.chain).serial_number


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, good_for: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 60 * DAY)
        .not_valid_after(now + good_for)
    )

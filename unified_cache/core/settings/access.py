"""Settings of who may call a service: certificates, tokens, and the roles that both give."""

from enum import Enum
from typing import Annotated

from pydantic import Field, model_validator

from unified_cache.core.settings.section import TENANT_PATTERN, FilePath, Seconds, Section

__all__ = ["AccessSettings", "Role", "TlsSettings"]


class Role(Enum):
    """Permissions of a caller; each role includes those before it."""

    READER = "reader"
    """Look up and get."""
    WRITER = "writer"
    """Put, remove, clear an identity."""
    ADMIN = "admin"
    """Clear every identity of a tenant, drain the server."""

    def includes(self, needed: "Role") -> bool:
        """Return whether this role may do what ``needed`` may."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


class TlsSettings(Section):
    """Certificates in PEM files, which are read again when they change."""

    certificate: FilePath
    """The server's certificate and those between it and its authority."""
    key: FilePath
    """The private key of ``certificate``."""
    client_ca: FilePath | None = None
    """Authorities that client certificates must come from; with it a client without one is refused."""
    client_crl: FilePath | None = None
    """Lists of the certificates that those authorities have revoked; every call is held against them."""
    trust_domain: str | None = None
    """Domain of the SPIFFE IDs that name tenants; if unset, common names do."""

    @model_validator(mode="after")
    def _check_authorities(self) -> "TlsSettings":
        if self.client_crl is not None and self.client_ca is None:
            raise ValueError("client_crl must be of the authorities in client_ca, found none")
        return self


class AccessSettings(Section):
    """Authentication of callers."""

    tokens: FilePath | None = None
    """File of hashed tokens, made by ``unified-cache token new``."""
    check_s: Seconds = 1.0
    """Time between two looks whether files of tokens and certificates have changed."""
    stale_s_max: Seconds = 60.0
    """Time for which tokens and client certificates hold whose files cannot be read any more; then all are refused."""
    certificate_role: Role = Role.READER
    """Role of a certificate that names none."""
    local_tenant: Annotated[str, Field(pattern=TENANT_PATTERN)] = "default"
    """Tenant of every caller on a server with neither tokens nor client certificates."""
    local_role: Role = Role.WRITER
    """Role of those callers."""

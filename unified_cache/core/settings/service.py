"""Settings of a service: addresses, access, the store behind it, what observes it, quotas and limits."""

import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from unified_cache.core.settings.addresses import Address, ListenAddress
from unified_cache.core.settings.cache import GuardSettings
from unified_cache.core.settings.section import (
    TENANT_PATTERN,
    Bytes,
    Count,
    FilePath,
    Seconds,
    Section,
    Settings,
    StoreUrl,
    Truth,
)

STORAGE_BYTES_MIN = 1 << 20
"""Smallest cap: with less a store has no room for a page of most models, as where 500 was meant to be GB."""


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
        return self is needed or _ROLES.index(self) > _ROLES.index(needed)


_ROLES = tuple(Role)


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


class LimitSettings(Section):
    """Bounds of the whole server; what is beyond them is refused."""

    calls_max: Count = 128
    """Calls of all tenants, waiting ones included; a tenant has at most as many in flight as it leaves to others."""
    connections_max: Count = 4_096
    """Connections; beyond, new ones are closed. Fewer where the process may not have as many file descriptors."""
    shared_running_max: Count = 1
    """Running calls of all tenants while more than one is active, those longer than 50 ms not counted. Python runs one
    call at a time, so each further one adds its time to that of all others; a slow store may gain."""
    page_bytes_max: Bytes = 256 << 20
    """One page of one pool, its header included."""
    call_s_max: Seconds = 300.0
    """Longest time of a call, whatever deadline its client set."""


class TenantQuota(Section):
    """Quota of one tenant."""

    stored_bytes_max: Bytes | None = None
    """Bytes of its pages in the store; beyond, it loses its least recently used. Unset, as many as the store takes."""
    calls_max: Count = 32
    """Calls in flight, waiting ones included."""
    bytes_in_flight_max: Bytes = 256 << 20
    """Bytes of pages in its calls in flight."""


class QuotaSettings(TenantQuota):
    """Quota of every tenant."""

    tenants: dict[Annotated[str, Field(pattern=TENANT_PATTERN)], TenantQuota] = Field(default_factory=dict)
    """Tenants with quotas of their own; what one does not set is as for every tenant."""

    @model_validator(mode="before")
    @classmethod
    def _inherited(cls, given: object) -> object:
        """Give each tenant what is set for every tenant and not for it."""
        if not isinstance(given, Mapping) or not isinstance(tenants := given.get("tenants"), Mapping):
            return given
        of_all = {name: given[name] for name in TenantQuota.model_fields if name in given}
        merged = {name: {**of_all, **own} if isinstance(own, Mapping) else own for name, own in tenants.items()}
        return {**given, "tenants": merged}

    def of(self, tenant: str) -> TenantQuota:
        """Return what ``tenant`` may use."""
        return self.tenants.get(tenant, self)


class MetricsSettings(Section):
    """Metrics for Prometheus, and a live page that reads them."""

    listen: Annotated[Address | None, BeforeValidator(lambda given: None if given == "none" else given)] = (
        "127.0.0.1:9464"
    )
    """Address of /metrics and of a live page at /, ``none`` for neither; over TLS if the service itself is."""
    client_ca: FilePath | None = None
    """Authorities whose certificates may read the metrics of all tenants, beside an admin's certificate or token."""


class AuditSettings(Section):
    """Lines of JSON that say who asked for what, and the outcome."""

    file: FilePath | None = None
    """File of its own, opened again when it is moved away; without one the lines are among those of the log."""


class DrainSettings(Section):
    """Orderly end of the server."""

    grace_s: Seconds = 20.0
    """Time that calls in flight have to finish."""


def _default_storage() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return f"file:{Path(base) / 'unified-cache'}"


class ServiceSettings(Settings):
    """All settings of a server."""

    listen: Address = "127.0.0.1:50051"
    """Address of the service, HOST:PORT or unix:PATH."""
    storage: StoreUrl = Field(default_factory=_default_storage)
    """URL of the store (L3), as every command takes them; ``file:~/.cache/unified-cache`` if unset."""
    storage_bytes: Annotated[Bytes, Field(ge=STORAGE_BYTES_MIN)] | None = None
    """Cap on the store, as du counts it; unset, it may take all that its file system has."""
    insecure: Truth = False
    """Serve beyond this machine without client certificates."""
    reflection: Truth = True
    """List the service's calls to clients such as grpcurl (reflection)."""
    tls: TlsSettings | None = None
    access: AccessSettings = AccessSettings()
    limits: LimitSettings = LimitSettings()
    quota: QuotaSettings = QuotaSettings()
    guard: GuardSettings = GuardSettings()
    metrics: MetricsSettings = MetricsSettings()
    audit: AuditSettings = AuditSettings()
    drain: DrainSettings = DrainSettings()

    @property
    def address(self) -> ListenAddress:
        """Address of the service."""
        return ListenAddress.of(self.listen)

    @property
    def metrics_address(self) -> ListenAddress | None:
        """Address of the metrics, None for no metrics."""
        return None if self.metrics.listen is None else ListenAddress.of(self.metrics.listen)

    @property
    def _checks_metrics_readers(self) -> bool:
        return self.metrics.client_ca is not None or (self.tls is not None and self.access.tokens is not None)

    @model_validator(mode="after")
    def _safe(self) -> "ServiceSettings":
        addresses = [("listen", self.address)]
        if self.metrics_address is not None:
            addresses.append(("metrics.listen", self.metrics_address))
            if self.metrics_address.socket is not None:
                raise ValueError(f"metrics.listen must be HOST:PORT, found {self.metrics.listen}")
        if self.metrics.client_ca is not None and self.tls is None:
            raise ValueError("metrics.client_ca needs tls.certificate and tls.key, found none")
        mutual = self.tls is not None and self.tls.client_ca is not None
        for name, address in addresses:
            is_checked = mutual or (name != "listen" and self._checks_metrics_readers)
            if not (address.is_local or is_checked or self.insecure):
                raise ValueError(
                    f"{name} {address.text} can be reached from other machines, so tls.certificate, tls.key and "
                    f"tls.client_ca must be set; --insecure serves without"
                )
        return self

    def warnings(self) -> list[str]:
        """Return a sentence for each thing that is allowed, and hardly meant."""
        tls, found = self.tls, []
        files = [self.access.tokens, self.metrics.client_ca]
        if tls is not None:
            files += [tls.certificate, tls.key, tls.client_ca, tls.client_crl]
        found += [f"{file} is not there" for file in files if file is not None and not file.exists()]
        if self.storage_bytes is None and urlsplit(self.storage).scheme in ("file", "packed"):
            found.append("storage_bytes is unset: the store grows until 64 MiB of its file system are left")
        if self.access.tokens is None and self.tls is None and self.quota.tenants:
            found.append("quota.tenants has no effect: without access.tokens and tls every caller is local_tenant")
        return found

"""Settings of a service: addresses, access, the store behind it, what observes it, and every limit."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from unified_cache.core.config import GuardConfig
from unified_cache.core.settings.access import AccessSettings, TlsSettings
from unified_cache.core.settings.addresses import Address, ListenAddress
from unified_cache.core.settings.limits import LimitSettings, QuotaSettings
from unified_cache.core.settings.section import Bytes, FilePath, Guard, Seconds, Section, Settings, StoreUrl

__all__ = ["DrainSettings", "ServiceSettings"]


STORAGE_BYTES_MIN = 1 << 20
"""Smallest cap: with less a store has no room for a page of most models, as where 500 was meant to be GB."""


class MetricsSettings(Section):
    """Metrics for Prometheus, and a live page that reads them."""

    listen: Address | None = "127.0.0.1:9464"
    """Address of /metrics and of a live page at /, None for neither; over TLS if the service itself is."""
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
    insecure: bool = False
    """Serve beyond this machine without client certificates."""
    reflection: bool = True
    """List the service's calls to clients such as grpcurl (reflection)."""
    tls: TlsSettings | None = None
    access: AccessSettings = AccessSettings()
    limits: LimitSettings = LimitSettings()
    quota: QuotaSettings = QuotaSettings()
    guard: Guard = GuardConfig()
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

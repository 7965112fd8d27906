"""Settings of a service's observation: metrics, live page, audit log and recordings."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from unified_cache.core.settings.addresses import checked_address
from unified_cache.core.settings.section import Bytes, Count, Section

__all__ = [
    "AuditSettings",
    "LiveSettings",
    "MetricsSettings",
    "RecordSettings",
]


class MetricsSettings(Section):
    """Metrics for Prometheus."""

    listen: str | None = "127.0.0.1:9464"
    """Address to listen at, None for no metrics; over TLS if the service itself is."""
    client_ca: Path | None = None
    """Authorities whose certificates may read the metrics of all tenants; if unset, those of an admin may."""

    @field_validator("listen")
    @classmethod
    def _listen_is_an_address(cls, text: str | None) -> str | None:
        return None if text is None else checked_address(text)


class LiveSettings(Section):
    """Live page; needs the extra ``live``."""

    listen: str | None = None
    """Address to listen at, None for no page; over TLS if the service itself is. Tokens of ``access`` open it."""
    every_s: Annotated[float, Field(ge=0.01, le=60)] = 1.0
    """Time between two updates of an open page."""

    @field_validator("listen")
    @classmethod
    def _listen_is_an_address(cls, text: str | None) -> str | None:
        return None if text is None else checked_address(text)


class AuditSettings(Section):
    """Lines of JSON that say who asked for what, and the outcome."""

    file: Path | None = None
    """File of its own, opened again when it is moved away; without one the lines are among those of the log."""


class RecordSettings(Section):
    """Recording of look-ups, in which no prompt can be read."""

    file: Path | None = None
    """File to write, NAME.gz; None for no recording."""
    file_bytes_max: Bytes = 64 << 20
    """Size at which a file is rotated, compressed."""
    files_max: Count = 8
    """Files kept, the newest included."""

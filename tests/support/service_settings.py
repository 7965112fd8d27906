"""Settings of a service, as its command reads them."""

from collections.abc import Mapping
from pathlib import Path

from unified_cache.core.settings.loading import read_settings
from unified_cache.core.settings.service import ServiceSettings


def service_settings(file: Path | None, flags: Mapping[str, object]) -> ServiceSettings:
    """Return the settings of a service that a file and flags give."""
    return read_settings(ServiceSettings, file, flags).settings

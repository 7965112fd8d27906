"""The configuration of a server: one frozen value from a TOML file, the environment and flags, the later winning.

Every key is known and every limit is finite: what is not named here, or makes no sense, is refused with one line.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated

from pydantic import ByteSize, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from unified_cache.arguments import did_you_mean
from unified_cache.config import GuardConfig
from unified_cache.errors import ConfigError
from unified_cache.settings.access import AccessSettings, TlsSettings
from unified_cache.settings.addresses import ListenAddress, checked_address
from unified_cache.settings.limits import LimitSettings, QuotaSettings
from unified_cache.settings.observing import (
    AuditSettings,
    LiveSettings,
    LogSettings,
    MetricsSettings,
    RecordSettings,
    TracingSettings,
)
from unified_cache.settings.section import Bytes, Seconds, Section

__all__ = ["ENVIRONMENT_PREFIX", "DrainSettings", "ServiceSettings", "load_settings"]

ENVIRONMENT_PREFIX = "UNIFIED_CACHE_SERVE_"
"""``UNIFIED_CACHE_SERVE_LISTEN`` is ``listen``, ``UNIFIED_CACHE_SERVE_TLS__KEY`` is ``key`` of ``[tls]``."""

_NESTED = "__"

UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
"""Errors of a key that a table does not have: of a model, of a dataclass."""


class DrainSettings(Section):
    """Orderly end of the server."""

    grace_s: Seconds = 20.0
    """Time that calls in flight have to finish."""


def _default_storage() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return f"file:{Path(base) / 'unified-cache'}"


class ServiceSettings(BaseSettings):
    """All settings of a server; made by ``load_settings``."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX,
        env_nested_delimiter=_NESTED,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    listen: str = "127.0.0.1:50051"
    storage: str = Field(default_factory=_default_storage)
    """URL of the store, as every command takes them."""
    storage_bytes_max: Bytes | None = None
    """Cap on the store; None leaves it to the store."""
    host_bytes: Annotated[ByteSize, Field(ge=0, le=1 << 60)] = ByteSize(256 << 20)
    """Host memory in front of the store; 0 for none."""
    insecure: bool = False
    """Serve beyond this machine without client certificates."""
    reflection: bool = True
    """Tell clients such as grpcurl what the service offers."""
    tls: TlsSettings | None = None
    access: AccessSettings = AccessSettings()
    limits: LimitSettings = LimitSettings()
    quota: QuotaSettings = QuotaSettings()
    store: GuardConfig = GuardConfig()
    """How the store behind the service is guarded."""
    metrics: MetricsSettings = MetricsSettings()
    live: LiveSettings = LiveSettings()
    log: LogSettings = LogSettings()
    audit: AuditSettings = AuditSettings()
    record: RecordSettings = RecordSettings()
    tracing: TracingSettings = TracingSettings()
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
    def live_address(self) -> ListenAddress | None:
        """Address of the live page, None for no page."""
        return None if self.live.listen is None else ListenAddress.of(self.live.listen)

    @field_validator("listen")
    @classmethod
    def _listen_is_an_address(cls, text: str) -> str:
        return checked_address(text)

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
            is_checked = mutual or (name != "listen" and self.metrics.client_ca is not None)
            if not (address.is_local or is_checked or self.insecure):
                raise ValueError(
                    f"{name} {address.text} can be reached from other machines, so tls.certificate, tls.key and "
                    f"tls.client_ca must be set; --insecure serves without"
                )
        return self

    @model_validator(mode="after")
    def _live_page_is_safe(self) -> "ServiceSettings":
        address = self.live_address
        if address is None:
            return self
        if address.socket is not None:
            raise ValueError(f"live.listen must be HOST:PORT, found {self.live.listen}")
        if self.access.tokens is None and self.tls is not None and self.tls.client_ca is not None:
            raise ValueError("live.listen needs access.tokens where callers need client certificates, found none")
        if not address.is_local and (self.access.tokens is None or self.tls is None):
            raise ValueError(
                f"live.listen {address.text} can be reached from other machines, so access.tokens, tls.certificate and "
                f"tls.key must be set"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read nothing but the arguments: ``load_settings`` has merged file and environment already."""
        return (init_settings,)


def load_settings(file: Path | None, flags: Mapping[str, object]) -> ServiceSettings:
    """Read the configuration: ``file``, over it the environment, over that ``flags`` by name of the setting.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value makes no sense; one line says which.
    """
    if file is not None and not file.is_file():
        raise ConfigError(f"--config must name a file, found nothing of that kind at {file}")
    _refuse_unknown_variables(os.environ)
    try:
        settings: dict[str, object] = {}
        if file is not None:
            _lay_over(settings, TomlConfigSettingsSource(ServiceSettings, file)())
        _lay_over(settings, EnvSettingsSource(ServiceSettings)())
        _lay_over(settings, flags)
        return ServiceSettings.model_validate(settings)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentences(error))) from error
    except SettingsError as error:
        raise ConfigError(f"a {ENVIRONMENT_PREFIX} variable: {error}") from error
    except (TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} must be TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error


def _lay_over(settings: dict[str, object], later: Mapping[str, object]) -> None:
    for name, value in later.items():
        earlier = settings.get(name)
        if isinstance(earlier, dict) and isinstance(value, Mapping):
            _lay_over(earlier, value)
        else:
            settings[name] = value


def _sentences(error: ValidationError) -> list[str]:
    sentences: list[str] = []
    for flaw in error.errors(include_url=False):
        name = ".".join(map(str, flaw["loc"]))
        reason = flaw["msg"].removeprefix("Value error, ")
        if flaw["type"] in UNKNOWN_KEY:
            sentences.append(f"there is no setting {name}{did_you_mean(name, _setting_names())}")
        else:
            found = "" if flaw["type"] in ("value_error", "missing") else f", found {str(flaw['input'])[:80]!r}"
            sentences.append(f"{name}: {reason}{found}" if name else f"{reason}{found}")
    return sentences


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """Refuse a variable with our prefix that names no setting; pydantic would ignore it."""
    known = {name.upper() for name in ServiceSettings.model_fields}
    for variable in environment:
        upper = variable.upper()
        if upper.startswith(ENVIRONMENT_PREFIX):
            name = upper.removeprefix(ENVIRONMENT_PREFIX).split(_NESTED)[0]
            if name not in known:
                close = did_you_mean(name, ServiceSettings.model_fields)
                raise ConfigError(f"there is no setting for the variable {variable}{close}")


def _setting_names() -> Iterator[str]:
    """Yield the names of all settings, those in tables with the table before them."""
    for name, value in {**ServiceSettings().model_dump(), "tls": dict.fromkeys(TlsSettings.model_fields)}.items():
        yield name
        if isinstance(value, dict):
            yield from (f"{name}.{key}" for key in value)

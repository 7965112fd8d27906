"""The configuration of a server: one frozen value from a TOML file, the environment and flags, the later winning.

Every key is known and every limit is finite: what is not named here, or makes no sense, is refused with one line.
"""

import os
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, field_validator, model_validator
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
from unified_cache.service.addresses import ListenAddress, checked_address
from unified_cache.wire.calls import PART_BYTES

__all__ = [
    "ENVIRONMENT_PREFIX",
    "AccessSettings",
    "AuditSettings",
    "DrainSettings",
    "LimitSettings",
    "LiveSettings",
    "LogSettings",
    "MetricsSettings",
    "QuotaSettings",
    "RecordSettings",
    "Role",
    "ServiceSettings",
    "TenantQuota",
    "TlsSettings",
    "TracingExporter",
    "TracingSettings",
    "as_toml",
    "load_settings",
]

ENVIRONMENT_PREFIX = "UNIFIED_CACHE_SERVE_"
"""``UNIFIED_CACHE_SERVE_LISTEN`` is ``listen``, ``UNIFIED_CACHE_SERVE_TLS__KEY`` is ``key`` of ``[tls]``."""

_NESTED = "__"
_FRAME_BYTES_MAX = 64
"""Bytes around the content of a part in the message that carries it."""

_TENANT = r"^[a-z0-9][a-z0-9._-]{0,63}$"

Bytes = Annotated[ByteSize, Field(gt=0, le=1 << 60)]
Count = Annotated[int, Field(gt=0, le=1 << 31)]
Seconds = Annotated[float, Field(gt=0, le=86_400 * 365, allow_inf_nan=False)]


class Role(Enum):
    """Permissions of a caller; each role includes those before it."""

    READER = "reader"
    """Look up and get."""
    WRITER = "writer"
    """Put, remove, clear an identity."""
    ADMIN = "admin"
    """Clear every identity of a tenant, drain the server."""

    def includes(self, needed: "Role") -> bool:
        """Tell whether this role may do what ``needed`` may."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
"""Errors of a key that a table does not have: of a model, of a dataclass."""


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TlsSettings(_Section):
    """Certificates in PEM files, which are read again when they change."""

    certificate: Path
    """The server's certificate and those between it and its authority."""
    key: Path
    client_ca: Path | None = None
    """Authorities that client certificates must come from; with it a client without one is refused."""
    client_crl: Path | None = None
    """Lists of the certificates that those authorities have revoked; every call is held against them."""
    trust_domain: str | None = None
    """Domain of the SPIFFE IDs that name tenants; if unset, common names do."""
    check_s: Seconds = 5.0
    """Time between two checks of the files."""
    stale_s_max: Seconds = 60.0
    """Time for which client certificates are accepted by files that cannot be read any more."""

    @model_validator(mode="after")
    def _lists_have_authorities(self) -> "TlsSettings":
        if self.client_crl is not None and self.client_ca is None:
            raise ValueError("client_crl must be of the authorities in client_ca, found none")
        return self


class AccessSettings(_Section):
    """Authentication of callers."""

    tokens: Path | None = None
    """File of hashed tokens, made by ``unified-cache token new``."""
    tokens_max: Count = 10_000
    tokens_check_s: Seconds = 1.0
    tokens_stale_s_max: Seconds = 60.0
    """Time for which tokens hold whose file cannot be read any more; then all are refused until it can."""
    certificate_role: Role = Role.READER
    """Role of a certificate that names none."""
    local_tenant: Annotated[str, Field(pattern=_TENANT)] = "default"
    """Tenant of every caller on a server with neither tokens nor client certificates."""
    local_role: Role = Role.WRITER


class LimitSettings(_Section):
    """Bounds of one request, one connection, one tenant and the whole server; larger requests are refused."""

    message_bytes_max: Annotated[ByteSize, Field(gt=0, le=1 << 30)] = ByteSize(4 << 20)
    """Largest message that is received; it must hold a part and its frame."""
    part_bytes: Bytes = ByteSize(PART_BYTES)
    """Page content in one message of a stream."""
    batch_bytes: Bytes = ByteSize(8 << 20)
    """Pages read from or written to the store in one call: the memory that one stream of pages takes."""
    metadata_bytes_max: Bytes = ByteSize(16 << 10)
    """Headers of one call."""
    page_bytes_max: Bytes = ByteSize(256 << 20)
    """One page of one pool, its header included."""
    pages_max: Count = 1 << 14
    """Pages named in one request."""
    tokens_max: Count = 1 << 20
    """Token ids in one request."""
    lookup_pages_max: Count = 1 << 16
    """Pages of all its pools that one lookup asks for."""
    calls_max: Count = 128
    """Calls of all tenants, waiting ones included; a tenant has at most as many in flight as it leaves to others."""
    connections_max: Count = 4_096
    """Connections; beyond, new ones are closed. Fewer where the process may not have as many file descriptors."""
    streams_per_connection_max: Count = 128
    """Calls of one connection."""
    public_calls_max: Count = 32
    """Calls that need no credentials, of each kind: health checks, health watches, reflection."""
    first_message_s: Seconds = 5.0
    """Longest wait for the first message of a call."""
    call_s_max: Seconds = 300.0
    """Longest time of a call, whatever deadline its client set."""
    stream_idle_s: Seconds = 30.0
    connection_idle_s: Seconds = 300.0
    connection_s_max: Seconds = 3_600.0
    """Longest life of a connection; then the client connects again, with a certificate that is still valid."""
    handshake_s: Seconds = 10.0
    keepalive_s: Seconds = 30.0
    """Silence after which a client is asked whether it is there."""
    keepalive_timeout_s: Seconds = 10.0
    """Time in which it must answer; else its connection is closed."""
    lease_s_max: Seconds = 600.0
    leases_max: Count = 256
    """Leases of one tenant at a time."""
    leased_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Part of ``host_bytes`` that leases of all tenants may keep from eviction; those of one tenant half of that."""
    identities_max: Count = 256
    """Identities of one tenant known at a time."""
    regions_max: Annotated[int, Field(ge=0)] = 32
    """Pieces of shared memory of one tenant at a time; 0 to have clients of this machine stream pages, as others do."""
    region_bytes_max: Bytes = ByteSize(256 << 20)
    region_idle_s: Seconds = 60.0
    """Shared memory that no call has named for so long is let go."""
    counted_pages_max: Count = 1 << 20
    """Pages of one tenant whose stored bytes are counted one by one; beyond, the oldest page is no longer counted."""

    @model_validator(mode="after")
    def _a_part_fits_into_a_message(self) -> "LimitSettings":
        if self.part_bytes + _FRAME_BYTES_MAX > self.message_bytes_max:
            raise ValueError(
                f"message_bytes_max must hold a part of {self.part_bytes} bytes and its frame of {_FRAME_BYTES_MAX}, "
                f"found {self.message_bytes_max}"
            )
        return self

    def channel_options(self) -> list[tuple[str, int]]:
        """Return the limits that gRPC itself enforces, as options of a server."""
        return [
            ("grpc.max_concurrent_streams", self.streams_per_connection_max),
            ("grpc.max_connection_idle_ms", _ms(self.connection_idle_s)),
            ("grpc.max_connection_age_ms", _ms(self.connection_s_max)),
            ("grpc.max_connection_age_grace_ms", _ms(self.call_s_max)),
            ("grpc.server_handshake_timeout_ms", _ms(self.handshake_s)),
            ("grpc.keepalive_time_ms", _ms(self.keepalive_s)),
            ("grpc.keepalive_timeout_ms", _ms(self.keepalive_timeout_s)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.ping_timeout_ms", _ms(self.keepalive_timeout_s)),  # the keepalive's own does not close
            ("grpc.max_receive_message_length", self.message_bytes_max),
            ("grpc.max_metadata_size", self.metadata_bytes_max),
            ("grpc.absolute_max_metadata_size", self.metadata_bytes_max),
        ]


class TenantQuota(_Section):
    """Quota of one tenant."""

    stored_bytes_max: Bytes = ByteSize(64 << 30)
    calls_max: Count = 32
    """Calls in flight, waiting ones included."""
    bytes_in_flight_max: Bytes = ByteSize(256 << 20)


class QuotaSettings(TenantQuota):
    """Quota of every tenant, and the sharing of the server between tenants that are active at the same time."""

    tenants: dict[Annotated[str, Field(pattern=_TENANT)], TenantQuota] = {}
    """Tenants with quotas of their own."""
    tenants_max: Count = 10_000
    """Tenants counted; others are refused what counts."""
    running_max: Count = 16
    """Calls that run at the same time, those longer than ``turn_hold_s`` not counted; the rest wait for their turn,
    tenant by tenant."""
    tenant_running_max: Count = 8
    """Running calls of one tenant, long ones too, so that another finds room at once."""
    shared_running_max: Count = 1
    """Running calls of all tenants while more than one is active; calls longer than ``turn_hold_s`` are not counted.
    Python runs one call at a time, so each further one adds its time to that of all others."""
    turn_hold_s: Seconds = 0.05
    active_s: Seconds = 1.0
    """Time for which a tenant counts as active after its last call."""
    turn_s_max: Seconds = 5.0
    """Longest wait of a call for its turn; then it is refused."""
    retry_s: Seconds = 0.25
    """Time after which a refused client is told to try again."""

    def of(self, tenant: str) -> TenantQuota:
        """Return what ``tenant`` may use."""
        return self.tenants.get(tenant, self)

    @model_validator(mode="after")
    def _shares(self) -> "QuotaSettings":
        if self.tenant_running_max > self.running_max:
            found = f"{self.tenant_running_max} and {self.running_max}"
            raise ValueError(f"tenant_running_max must be at most running_max, found {found}")
        return self


class MetricsSettings(_Section):
    """Metrics for Prometheus."""

    listen: str | None = "127.0.0.1:9464"
    """Address to listen at, None for no metrics; over TLS if the service itself is."""
    client_ca: Path | None = None
    """Authorities whose certificates may read the metrics of all tenants; if unset, those of an admin may."""
    request_s_max: Seconds = 5.0
    """Time from a connection to its end; who is slower is cut off."""
    tenants_max: Count = 200
    """Tenants with series of their own; all others together are ``other``."""
    pools_max: Count = 64
    """Pools with series of their own, the first of which a page was stored or found; all others are ``other``."""

    @field_validator("listen")
    @classmethod
    def _listen_is_an_address(cls, text: str | None) -> str | None:
        return None if text is None else checked_address(text)


class LiveSettings(_Section):
    """Live page; needs the extra ``live``."""

    listen: str | None = None
    """Address to listen at, None for no page; over TLS if the service itself is. Tokens of ``access`` open it."""
    every_s: Annotated[float, Field(ge=0.01, le=60)] = 1.0
    """Time between two updates of an open page."""

    @field_validator("listen")
    @classmethod
    def _listen_is_an_address(cls, text: str | None) -> str | None:
        return None if text is None else checked_address(text)


class LogSettings(_Section):
    """Lines of JSON on standard error."""

    burst: Count = 10
    """Lines of one kind that are written at once."""
    every_s: Seconds = 10.0
    """Beyond a burst, one line of a kind in so long; it says how many were left out."""


class AuditSettings(LogSettings):
    """Lines of JSON that say who asked for what, and the outcome."""

    file: Path | None = None
    """File of its own, opened anew when it is moved away; without one the lines are among those of the log."""
    burst: Count = 20
    """Hellos and refusals of one tenant that are written at once; what clears or ends is always written."""
    every_s: Seconds = 1.0


class RecordSettings(_Section):
    """Recording of look-ups, in which no prompt can be read."""

    file: Path | None = None
    """File to write, NAME.gz; None for no recording."""
    file_bytes_max: Bytes = ByteSize(64 << 20)
    """Size at which a file is rotated, compressed."""
    files_max: Count = 8
    """Files kept, the newest included."""


class TracingExporter(Enum):
    """Destination of spans."""

    NONE = "none"
    CONSOLE = "console"
    OTLP = "otlp"
    """Set up by OTEL_EXPORTER_OTLP_ENDPOINT and its like; needs an OTLP exporter of OpenTelemetry."""


class TracingSettings(_Section):
    """Spans of OpenTelemetry; needs the extra ``tracing``."""

    exporter: TracingExporter = TracingExporter.NONE
    spans_waiting_max: Count = 2_048


class DrainSettings(_Section):
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


def as_toml(settings: ServiceSettings) -> str:
    """Write the settings as a file that gives the same settings; what is unset stands as a comment."""
    return "\n".join(_table("", settings.model_dump(mode="json"))) + "\n"


def _table(name: str, values: Mapping[str, object]) -> list[str]:
    lines = [f"[{name}]"] if name else []
    tables: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict):
            tables += ["", *_table(f"{name}.{_quoted(key)}" if name else _quoted(key), value)]
        else:
            lines.append(f"# {key} is unset" if value is None else f"{_quoted(key)} = {_literal(value)}")
    return lines + tables


def _quoted(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _literal(key)


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in text) + '"'

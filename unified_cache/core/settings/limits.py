"""Bounds of a service: of one request, one connection, one tenant and all of them together."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, model_validator

from unified_cache.core.byte_sizes import PART_BYTES
from unified_cache.core.settings.section import TENANT_PATTERN, Bytes, Count, Seconds, Section

__all__ = ["MESSAGE_BYTES_MAX", "LimitSettings", "QuotaSettings", "TenantQuota"]

MESSAGE_BYTES_MAX = 4 << 20
"""Largest message that is received."""

_FRAME_BYTES_MAX = 64
"""Bytes around the content of a part in the message that carries it."""

METADATA_BYTES_MAX = 16 << 10
"""Headers of one call."""

CONNECTION_IDLE_S = 300.0
"""Time after which a connection without calls is closed."""


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


class LimitSettings(Section):
    """Bounds of one request, one connection, one tenant and the whole server; larger requests are refused."""

    part_bytes: Annotated[Bytes, Field(le=MESSAGE_BYTES_MAX - _FRAME_BYTES_MAX)] = PART_BYTES
    """Page content in one message of a stream."""
    batch_bytes: Bytes = (8 << 20) + (64 << 10)
    """Pages read from or written to the store in one call, with their headers: the memory that one stream takes."""
    page_bytes_max: Bytes = 256 << 20
    """One page of one pool, its header included."""
    pages_max: Count = 1 << 14
    """Pages named in one request."""
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
    """Longest silence within a stream."""
    connection_s_max: Seconds = 3_600.0
    """Longest life of a connection; then the client connects again, with a certificate that is still valid."""
    handshake_s: Seconds = 10.0
    """Longest time of a TLS handshake."""
    keepalive_s: Seconds = 30.0
    """Silence after which a client is asked whether it is there."""
    keepalive_timeout_s: Seconds = 10.0
    """Time in which it must answer; else its connection is closed."""
    identities_max: Count = 256
    """Identities of one tenant known at a time."""

    def channel_options(self) -> list[tuple[str, int]]:
        """Return the limits that gRPC itself enforces, as options of a server."""
        return [
            ("grpc.max_concurrent_streams", self.streams_per_connection_max),
            ("grpc.max_connection_idle_ms", _ms(CONNECTION_IDLE_S)),
            ("grpc.max_connection_age_ms", _ms(self.connection_s_max)),
            ("grpc.max_connection_age_grace_ms", _ms(self.call_s_max)),
            ("grpc.server_handshake_timeout_ms", _ms(self.handshake_s)),
            ("grpc.keepalive_time_ms", _ms(self.keepalive_s)),
            ("grpc.keepalive_timeout_ms", _ms(self.keepalive_timeout_s)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.ping_timeout_ms", _ms(self.keepalive_timeout_s)),  # the keepalive's own does not close
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_metadata_size", METADATA_BYTES_MAX),
            ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        ]


class TenantQuota(Section):
    """Quota of one tenant."""

    stored_bytes_max: Bytes | None = None
    """Bytes of its pages in the store; beyond, it loses its least recently used. Unset, as many as the store takes."""
    calls_max: Count = 32
    """Calls in flight, waiting ones included."""
    bytes_in_flight_max: Bytes = 256 << 20
    """Bytes of pages in its calls in flight."""


class QuotaSettings(TenantQuota):
    """Quota of every tenant, and the sharing of the server between tenants that are active at the same time."""

    tenants: dict[Annotated[str, Field(pattern=TENANT_PATTERN)], TenantQuota] = Field(default_factory=dict)
    """Tenants with quotas of their own; what one does not set is as for every tenant."""
    tenant_running_max: Count = 8
    """Calls of one tenant that run at the same time, long ones too; the rest wait for their turn."""
    shared_running_max: Count = 1
    """Running calls of all tenants while more than one is active; calls longer than ``turn_hold_s`` are not counted.
    Python runs one call at a time, so each further one adds its time to that of all others."""
    turn_hold_s: Seconds = 0.05
    """Time after which a call that runs no longer counts as running."""
    turn_s_max: Seconds = 5.0
    """Longest wait of a call for its turn; then it is refused."""

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

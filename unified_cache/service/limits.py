"""Bounds of a service: those that its settings name, and constants that nobody would set."""

from dataclasses import dataclass

from unified_cache.core.settings.service import LimitSettings
from unified_cache.core.sizes import PART_BYTES

MESSAGE_BYTES_MAX = 4 << 20
"""Largest message that is received: gRPC's own default, and a part with what is around it fits."""

METADATA_BYTES_MAX = 16 << 10
"""Headers of one call."""

CONNECTION_IDLE_S = 300.0
"""Time after which a connection without calls is closed."""

_USUAL = LimitSettings()


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one request, one connection, one tenant and the whole server; larger requests are refused."""

    calls_max: int = _USUAL.calls_max
    connections_max: int = _USUAL.connections_max
    shared_running_max: int = _USUAL.shared_running_max
    page_bytes_max: int = _USUAL.page_bytes_max
    call_s_max: float = _USUAL.call_s_max
    part_bytes: int = PART_BYTES
    """Page content in one message of a stream."""
    batch_bytes: int = (8 << 20) + (64 << 10)
    """Pages read from or written to the store in one call, with their headers: the memory that one stream takes."""
    pages_max: int = 1 << 14
    """Pages named in one request: 512 KiB of keys, in one message."""
    streams_per_connection_max: int = 128
    """Calls of one connection: one client may have all of ``calls_max``."""
    public_calls_max: int = 32
    """Calls that need no credentials, of each kind: health checks, reflection."""
    first_message_s: float = 5.0
    """Longest wait for the first message of a call, of a put with 3 MiB of pages: a round trip, and 6 Mbit/s."""
    stream_idle_s: float = 30.0
    """Longest silence within a stream."""
    connection_s_max: float = 3_600.0
    """Longest life of a connection; then the client connects again, with a certificate that is still valid."""
    handshake_s: float = 10.0
    """Longest time of a TLS handshake."""
    keepalive_s: float = 30.0
    """Silence after which a client is asked whether it is there."""
    keepalive_timeout_s: float = 10.0
    """Time in which it must answer; else its connection is closed."""
    identities_max: int = 256
    """Identities of one tenant known at a time: models, revisions and shards that it serves at once."""
    tenant_running_max: int = 8
    """Calls of one tenant that run at the same time, long ones too; the rest wait for their turn."""
    turn_hold_s: float = 0.05
    """Time after which a call that runs no longer counts as running: ten times that of a look-up."""
    turn_s_max: float = 5.0
    """Longest wait of a call for its turn; then it is refused."""

    @classmethod
    def of(cls, settings: LimitSettings) -> "Limits":
        """Return the bounds of a server with these settings."""
        return cls(**settings.model_dump())

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

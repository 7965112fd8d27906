"""How much one request, one stream, one tenant may ask for: every limit finite."""

from dataclasses import asdict, dataclass

from unified_cache.errors import ConfigError
from unified_cache.wire.calls import PART_BYTES

__all__ = ["RequestLimits"]

FRAME_BYTES_MAX = 64
"""Around the content of a part in a message that puts pages."""

MAY_BE_NONE = frozenset({"host_bytes_max", "regions_max"})


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of the request path. Larger requests are refused before anything is done about them."""

    host_bytes_max: int = 1 << 30
    """Pages kept in this server's memory, in front of the store; 0 for none."""
    message_bytes_max: int = 4 << 20
    """One message, as it arrives."""
    metadata_bytes_max: int = 16 << 10
    """Headers of one call."""
    part_bytes: int = PART_BYTES
    """Content in one message of a stream of pages."""
    batch_bytes: int = 8 << 20
    """Pages read from or written to the store in one call, and so held in memory by one stream."""
    pages_max: int = 1 << 14
    """Pages named in one request."""
    tokens_max: int = 1 << 20
    """Token ids in one lookup."""
    object_bytes_max: int = 256 << 20
    """One page of one pool."""
    identities_max: int = 256
    """Identities of one tenant known at a time."""
    lease_s_max: float = 600.0
    leases_max: int = 256
    """Of one tenant at a time."""
    leased_share: float = 0.5
    """Of ``host_bytes_max``, the most that leases of all tenants may keep; a tenant's own, half of it."""
    stream_idle_s: float = 30.0
    """A stream on which nothing moves for so long is cancelled."""
    call_s_max: float = 600.0
    """A stream that takes longer is cancelled, whatever its deadline."""
    regions_max: int = 32
    """Of shared memory, of one tenant at a time; 0 to take pages in streams alone."""
    region_bytes_max: int = 256 << 20
    region_idle_s: float = 60.0
    """Shared memory that no call has named for so long is let go."""
    held_names_max: int = 1 << 20
    """Pages of one tenant whose bytes are accounted for one by one; beyond it the oldest is no longer counted."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < 1 << 62 and not (name in MAY_BE_NONE and value == 0):
                raise ConfigError(f"{name} must be positive and finite, found {value}")
        if self.leased_share > 1:
            raise ConfigError(f"leased_share must be at most 1, found {self.leased_share}")
        if self.part_bytes + FRAME_BYTES_MAX > self.message_bytes_max:
            raise ConfigError(
                f"a part and its frame must fit into a message of {self.message_bytes_max} bytes, "
                f"found part_bytes {self.part_bytes}"
            )

    def channel_options(self) -> list[tuple[str, int]]:
        """Return the limits that gRPC itself enforces, as options of a server."""
        return [
            ("grpc.max_receive_message_length", self.message_bytes_max),
            ("grpc.max_metadata_size", self.metadata_bytes_max),
            ("grpc.absolute_max_metadata_size", self.metadata_bytes_max),
        ]

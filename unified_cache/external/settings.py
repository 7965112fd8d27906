"""Settings of an external store, validated as one frozen value."""

import math
from dataclasses import dataclass, field

from unified_cache.arguments import check_kind
from unified_cache.config import GuardConfig
from unified_cache.errors import ConfigError

__all__ = ["PIECE_BYTES_MAX", "ExternalConfig"]

PIECE_BYTES = 1 << 20
"""Least that landing memory must hold where nobody says how much."""

PIECE_BYTES_MAX = 8 << 20
"""Pages of more bytes are out of the processor's caches before they are verified and copied."""

DURABLE_BYTES = 32 << 20
"""Of a durable put: it waits for the disk, for all of its pages at a time, and not for the processor's caches."""


@dataclass(frozen=True, slots=True)
class ExternalConfig:
    """Bounds of one external store."""

    guard: GuardConfig = field(default_factory=GuardConfig)
    """Deadline, retries and circuit breaker. ``guard.calls_max`` bounds the threads as well."""
    landing_bytes: int = 256 << 20
    """Memory that pages pass through on their way, at most; the system gives it as it is used. A page must fit."""
    piece_bytes: int | None = None
    """Pages of one call to the store hold about so many bytes; a page that is larger goes alone. None for 8 MiB, or
    what the store asks for if that is less and pages pass through landing memory: then they are verified and copied
    while they are in the processor's caches. A store that returns by itself is given up to 64 MiB, and cuts them."""
    call_timeout_s: float = 30.0
    """After this time no further piece of a call is begun. So a call returns after this time and one deadline."""

    def piece_bytes_for(self, call_bytes: int, *, is_durable: bool = False) -> int:
        """Return the size of a piece for a store that asks for calls of ``call_bytes``; of a durable put, a larger one.

        Of a landing memory without much room it takes an eighth at most: several calls have a piece there.
        """
        if self.piece_bytes is not None:
            return self.piece_bytes
        usual_bytes = min(call_bytes, PIECE_BYTES_MAX, self.landing_bytes)
        return max(usual_bytes, min(DURABLE_BYTES, self.landing_bytes // 8)) if is_durable else usual_bytes

    def __post_init__(self) -> None:
        check_kind(self.guard, GuardConfig, "guard as a GuardConfig", ConfigError)
        least_bytes = PIECE_BYTES if self.piece_bytes is None else self.piece_bytes
        if not 0 < least_bytes <= PIECE_BYTES_MAX:
            raise ConfigError(f"piece_bytes must be in (0, {PIECE_BYTES_MAX}], found {self.piece_bytes}")
        if self.landing_bytes < least_bytes:
            raise ConfigError(f"landing_bytes must be at least piece_bytes, found {self.landing_bytes}")
        if not 0 < self.call_timeout_s < math.inf:
            raise ConfigError(f"call_timeout_s must be positive and finite, found {self.call_timeout_s}")

"""Pauses between tries of what keeps failing: longer each time, up to a bound."""

from dataclasses import dataclass

from unified_cache.errors import ConfigError

__all__ = ["Backoff"]

_DOUBLINGS_MAX = 60
"""A second doubled so often outlasts every machine; more would overflow a float."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double from ``first_s`` to ``max_s``, in seconds."""

    first_s: float
    max_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.first_s <= self.max_s:
            raise ConfigError(f"a backoff needs 0 <= first_s <= max_s, found {self.first_s} and {self.max_s}")

    def pause_s(self, failures_count: int) -> float:
        """Return the pause after so many failures in a row; the first failure is 1."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures_count - 1, _DOUBLINGS_MAX))

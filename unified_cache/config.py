"""Sizes and bounds of one cache, validated as one frozen value."""

from dataclasses import dataclass

from unified_cache.errors import ConfigError

__all__ = ["CacheConfig"]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much each tier holds, and how much may be under way at a time."""

    device_pages: tuple[int, ...]
    """By component: cacheable pages on the device. The pools have one slot more, the padding sink."""
    host_pages: tuple[int, ...]
    """By component: pages in host memory; all zero for a cache without a host tier."""
    operations_max: int = 256
    """Transfers under way at a time; one more is declined. Bounds every queue."""
    storage_workers: int = 2
    """Threads that talk to storage, so that one slow call does not hold up all others."""
    close_timeout_s: float = 10.0
    """How long ``close`` waits for transfers under way."""

    def __post_init__(self) -> None:
        if len(self.device_pages) != len(self.host_pages):
            raise ConfigError(
                f"device_pages and host_pages need an entry for each component, "
                f"found {len(self.device_pages)} and {len(self.host_pages)}"
            )
        if any(pages < 1 for pages in self.device_pages):
            raise ConfigError(f"device_pages must be positive, found {self.device_pages}")
        if any(pages < 0 for pages in self.host_pages):
            raise ConfigError(f"host_pages must not be negative, found {self.host_pages}")
        if self.operations_max < 1:
            raise ConfigError(f"operations_max must be positive, found {self.operations_max}")
        if self.storage_workers < 1:
            raise ConfigError(f"storage_workers must be positive, found {self.storage_workers}")
        if not self.close_timeout_s > 0:
            raise ConfigError(f"close_timeout_s must be positive, found {self.close_timeout_s}")

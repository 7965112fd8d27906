"""Settings of a cache that an engine embeds: sizes of its tiers, its store, and its policies."""

from typing import Annotated

from pydantic import Field

from unified_cache.core.config import (
    CacheConfig,
    EvictionConfig,
    GuardConfig,
    Prefetching,
    Retention,
    WritePolicy,
)
from unified_cache.core.errors import ConfigError
from unified_cache.core.pool import ModelLayout
from unified_cache.core.settings.section import (
    NONE,
    Bytes,
    BytesOrNone,
    Count,
    Eviction,
    Guard,
    PageCounts,
    PageCountsOrNone,
    Prefetches,
    Retained,
    Seconds,
    Settings,
    StoreUrl,
)
from unified_cache.core.tier_sizes import SizedTiers

__all__ = ["EmbeddedSettings"]

_USUAL = CacheConfig(device_pages=(1,), host_pages=(0,))


class EmbeddedSettings(Settings):
    """Sizes, store and policies of a cache that an engine embeds; ``config`` makes its ``CacheConfig``."""

    device_bytes: Bytes | None = None
    """Bytes of the device's pools; what it holds of each component follows from them and from ``retention``."""
    device_pages: PageCounts | None = None
    """Pages of the device (L1) in the place of ``device_bytes``: of every component, or a list by component."""
    host_bytes: BytesOrNone = 0
    """Bytes of host memory (L2), headers included; 0 for none."""
    host_pages: PageCountsOrNone | None = None
    """Pages of host memory (L2) in the place of ``host_bytes``; 0 for none."""
    storage: StoreUrl | None = None
    """URL of the store (L3): ``file:DIR``, ``packed:DIR``, ``grpc://HOST:PORT``, ``mooncake://HOST``,
    ``s3://BUCKET``, ``memory:``, ``package.module:factory``, or ``none``."""
    storage_bytes: Bytes | None = None
    """Cap on the store, as du counts it; unset, it may take all that its file system has."""
    retention: Retained = Retention()
    eviction: Eviction = EvictionConfig()
    write: WritePolicy = _USUAL.write
    dirty_share: Annotated[float, Field(gt=0, le=1)] = _USUAL.dirty_share
    prefetching: Prefetches = Prefetching()
    guard: Guard = GuardConfig()
    operations_max: Count = _USUAL.operations_max
    storage_workers: Count = _USUAL.storage_workers
    operation_timeout_s: Seconds = _USUAL.operation_timeout_s
    close_timeout_s: Seconds = _USUAL.close_timeout_s
    duplicates_every: Annotated[int, Field(ge=0)] = _USUAL.duplicates_every

    @property
    def store(self) -> str | None:
        """URL of the store, as ``open_storage`` takes it; None for no store."""
        return None if self.storage == NONE else self.storage

    def config(self, layout: ModelLayout) -> CacheConfig:
        """Return sizes and bounds of a cache of this layout.

        Raises:
            ConfigError: the device has no size, a tier has two or is too small, or policies do not fit the components.
        """
        sizes = SizedTiers.of(layout, self.retention)
        device = self._pages(layout, "device", sizes.device_pages(self.device_bytes) if self.device_bytes else None)
        if device is None:
            raise ConfigError('device_bytes or device_pages must be set, such as device_bytes = "40GiB"; found neither')
        host = self._pages(layout, "host", sizes.host_pages(self.host_bytes) if self.host_bytes else None)
        return CacheConfig(
            device_pages=device,
            host_pages=host or (0,) * len(layout.components),
            operations_max=self.operations_max,
            storage_workers=self.storage_workers,
            retention=self.retention,
            eviction=self.eviction,
            write=self.write,
            dirty_share=self.dirty_share,
            prefetching=self.prefetching,
            guard=self.guard,
            operation_timeout_s=self.operation_timeout_s,
            close_timeout_s=self.close_timeout_s,
            duplicates_every=self.duplicates_every,
        )

    def _pages(self, layout: ModelLayout, tier: str, of_bytes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Return the pages of a tier by component; None where it has no size."""
        counts = self.device_pages if tier == "device" else self.host_pages
        if counts is None:
            return of_bytes
        if of_bytes is not None:
            raise ConfigError(f"{tier}_pages and {tier}_bytes must not both be set, found {list(counts)} pages")
        return counts * len(layout.components) if len(counts) == 1 else counts

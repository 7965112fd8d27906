"""Settings of a cache that an engine embeds: sizes of its tiers, its store, and its policies."""

import math
from typing import Annotated

from pydantic import BeforeValidator

from unified_cache.core.config import (
    CacheConfig,
    EvictionConfig,
    EvictionPolicy,
    GuardConfig,
    Prefetching,
    Retention,
    WritePolicy,
)
from unified_cache.core.errors import ConfigError
from unified_cache.core.pool import ModelLayout
from unified_cache.core.settings.section import (
    Bytes,
    BytesOrNone,
    Count,
    CountOrNone,
    PageCounts,
    PageCountsOrNone,
    Seconds,
    SecondsOrNone,
    Section,
    Settings,
    StoreUrl,
    Truth,
    listed,
)
from unified_cache.core.sizes import SizedTiers

NO_STORE = "none"
"""In the place of a URL: a variable takes away the store that a file names."""

_Policies = Annotated[tuple[EvictionPolicy, ...], BeforeValidator(listed)]


class RetentionSettings(Section):
    """Ends along a prompt at which windows and states are kept."""

    tail_tokens: CountOrNone = 0
    """A prompt can be resumed at every page boundary less than this many tokens before its last one, too."""
    branches: Truth = True
    """Keep windows and states where a prompt leaves what is cached, too; the second one to leave there pays for it."""


class EvictionSettings(Section):
    """Order of eviction."""

    device: _Policies = ()
    """Policy of each component on the device; the last one is that of all after it, lru if none is named."""
    host: _Policies = ()
    """Policy of each component on the host, as ``device``."""


class PrefetchSettings(Section):
    """Bounds on prefetches."""

    threshold_tokens: CountOrNone = 0
    """Prefixes of fewer tokens are not asked of storage, nor read where it adds fewer."""
    patience_s: SecondsOrNone | None = None
    """How long a request waits for a prefetch; then it ends with the pages that have arrived. Unset, until its end."""


class GuardSettings(Section):
    """The guard around a store."""

    deadline_s: Seconds = 5.0
    """Longest wait for one call, or longer where the store says so; then it is late, and its pages are in quarantine
    until the store returns from it."""
    calls_max: Count = 16
    """Calls in flight, those that hang included; with as many hanging, none is started."""

    @property
    def config(self) -> GuardConfig:
        """Bounds of the guard; retries and the breaker's pauses are constants."""
        return GuardConfig(deadline_s=self.deadline_s, calls_max=self.calls_max)


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
    write: WritePolicy = WritePolicy.THROUGH
    """Time of the backup; without a host tier there is none."""
    retention: RetentionSettings = RetentionSettings()
    eviction: EvictionSettings = EvictionSettings()
    prefetching: PrefetchSettings = PrefetchSettings()
    guard: GuardSettings = GuardSettings()

    @property
    def store(self) -> str | None:
        """URL of the store, as ``open_storage`` takes it; None for no store."""
        return None if self.storage == NO_STORE else self.storage

    def config(self, layout: ModelLayout) -> CacheConfig:
        """Return sizes and policies of a cache of this layout; all else has the defaults of ``CacheConfig``.

        Raises:
            ConfigError: the device has no size, a tier has two or is too small, or policies do not fit the components.
        """
        retention = Retention(self.retention.tail_tokens, branches=self.retention.branches)
        sizes = SizedTiers.of(layout, retention)
        device = self._pages(layout, "device", sizes.device_pages(self.device_bytes) if self.device_bytes else None)
        if device is None:
            raise ConfigError('device_bytes or device_pages must be set, such as device_bytes = "40GiB"; found neither')
        host = self._pages(layout, "host", sizes.host_pages(self.host_bytes) if self.host_bytes else None)
        patience_s = math.inf if self.prefetching.patience_s is None else self.prefetching.patience_s
        return CacheConfig(
            device_pages=device,
            host_pages=host or (0,) * len(layout.components),
            retention=retention,
            eviction=EvictionConfig(self.eviction.device, self.eviction.host),
            write=self.write,
            prefetching=Prefetching(self.prefetching.threshold_tokens, patience_s),
            guard=self.guard.config,
        )

    def warnings(self) -> list[str]:
        """Return a sentence for each thing that is allowed, and hardly meant."""
        if self.store is not None and not (self.host_bytes or any(self.host_pages or ())):
            return ["storage is reached through host memory, and host_bytes is 0: nothing will be stored"]
        return []

    def _pages(self, layout: ModelLayout, tier: str, of_bytes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Return the pages of a tier by component; None where it has no size."""
        counts = self.device_pages if tier == "device" else self.host_pages
        if counts is None:
            return of_bytes
        if of_bytes is not None:
            raise ConfigError(f"{tier}_pages and {tier}_bytes must not both be set, found {list(counts)} pages")
        return counts * len(layout.components) if len(counts) == 1 else counts

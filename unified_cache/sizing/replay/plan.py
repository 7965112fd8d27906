"""Plan of a replay: its pools and policies, the pages of each tier, and the true sizes that pages stand for."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from unified_cache.core.byte_sizes import bytes_text
from unified_cache.core.config import CacheConfig, EvictionConfig, EvictionPolicy, Prefetching, Retention, WritePolicy
from unified_cache.core.errors import ConfigError
from unified_cache.core.host_memory import available_bytes
from unified_cache.core.pool import ModelLayout, PoolSpec
from unified_cache.core.seal import HEADER_BYTES
from unified_cache.sizing.replay.trace import BLOCK_TOKENS, TraceRequest

SLOT_BYTES = 9
"""Memory of the cache for each slot, used or not: free list, state and scratch of ``SlotAllocator``."""

SEAL_BYTES = 192
"""Most that a page in host memory takes beyond its payload: header, and padding to a cache line."""

PAGES_MAX = 2**31 - 2
"""Slots are int32, and slot 0 is the padding sink."""


@dataclass(frozen=True, slots=True)
class ReplayPolicies:
    """Policies of the caches of a replay. A patience in seconds is none of them: a run must not depend on time."""

    device: EvictionPolicy = EvictionPolicy.LRU
    """Order of eviction on the device, of every component."""
    host: EvictionPolicy = EvictionPolicy.LRU
    """Order of eviction in host memory, of every component."""
    write: WritePolicy = WritePolicy.ON_CALL
    """Time of the backup; on call, the engine of a replay backs up every prompt that it has served."""
    prefetching: Prefetching = field(default_factory=Prefetching)
    """Bounds on prefetches."""

    def eviction(self, components_count: int) -> EvictionConfig:
        """Return the same policies, component by component."""
        return EvictionConfig(device=(self.device,) * components_count, host=(self.host,) * components_count)

    def as_json(self) -> dict[str, object]:
        """Return them as values that JSON has."""
        return {
            "evict_device": self.device.value,
            "evict_host": self.host.value,
            "write": self.write.value,
            "prefetch_min_tokens": self.prefetching.threshold_tokens,
            "prefetch_host_share": self.prefetching.host_share,
        }


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Everything that determines a run: two runs of equal plans and traces give equal results."""

    subject: str
    """Name of the cached model, and the identity of stored pages."""
    layout: ModelLayout
    """Pools of this run, with payloads scaled down or not."""
    true_layout: ModelLayout
    """The same pools with the bytes that they stand for."""
    device_pages: tuple[int, ...]
    """Pages that the device can cache, by component."""
    host_pages: tuple[int, ...]
    """Pages that host memory can cache, by component; all 0 for no host tier."""
    storage: str | None
    """URL of the store; None for no storage tier."""
    storage_bytes: int | None
    """Cap on the store, in bytes of this run; None for what its place has."""
    retention: Retention
    padded: bool
    """Whether a prompt's last block counts as a whole one, as in block-level figures, or at its true length."""
    with_bytes: bool
    """Whether payloads move and are verified; if not, the same code runs on names and slots alone."""
    policies: ReplayPolicies = field(default_factory=ReplayPolicies)
    """Eviction, writes and prefetches."""
    engines: int = 1
    """Engines that are dealt the requests in turn, each with tiers of its own of these sizes, over one store."""
    explains: bool = False
    """Whether every missed token is counted by reason."""

    def __post_init__(self) -> None:
        if self.policies.write is not WritePolicy.ON_CALL and not self.has_host:
            raise ConfigError(f"the write policy {self.policies.write.value} needs host memory, found none")
        if self.engines < 1:
            raise ConfigError(f"engines must be at least 1, found {self.engines}")
        most = max(*self.device_pages, *self.host_pages)
        if most > PAGES_MAX:
            raise ConfigError(f"a tier holds at most {PAGES_MAX} pages, found {most}")
        if self.storage_bytes is not None and self.storage_bytes < 1:
            raise ConfigError(f"storage bytes must be at least 1, found {self.storage_bytes}")
        if self.storage is None and self.storage_bytes is not None:
            raise ConfigError(f"storage bytes cap a store, found {self.storage_bytes} and no store")
        if self.storage is not None and not all(self.host_pages):
            raise ConfigError("storage is reached through host memory, found host pages 0")
        self._check_memory()

    @property
    def config(self) -> CacheConfig:
        """Sizes of the cache. A store's trouble is the run's trouble: nothing is between them."""
        return CacheConfig(
            self.device_pages,
            self.host_pages,
            retention=self.retention,
            eviction=self.policies.eviction(len(self.layout.components)),
            write=self.policies.write,
            prefetching=self.policies.prefetching,
            guard=None,
        )

    @property
    def has_host(self) -> bool:
        """Whether there is a host tier."""
        return any(self.host_pages)

    @property
    def compares_private_stores(self) -> bool:
        """Whether engines share a store, and so are to be compared with engines that do not."""
        return self.engines > 1 and self.storage is not None

    def without_bytes(self) -> "ReplayPlan":
        """Return the same run on names and slots alone, which explains nothing."""
        return replace(self, with_bytes=False, explains=False)

    def blocks_of(self, pages: int) -> float:
        """Return how many blocks of 512 tokens, in which traces are published, so many pages are."""
        return pages * self.layout.page_size / BLOCK_TOKENS

    def whole_pages(self, tokens: int) -> int:
        """Return how many whole pages so many tokens are, from the beginning of a prompt."""
        return tokens // self.layout.page_size

    def pages_of(self, request: TraceRequest) -> int:
        """Return the pages that a request asks for."""
        if self.padded:
            return self.whole_pages(len(request.hash_ids) * request.block_tokens)
        return request.input_length // self.layout.page_size

    def objects(self) -> dict[str, int]:
        """Return the bytes of one stored object of each pool that has bytes, header included."""
        return {pool.name: pool.page_bytes + HEADER_BYTES for pool in self.layout.pools if pool.page_bytes}

    def stored_bytes(self) -> tuple[int, ...]:
        """Return by component the bytes of one page's objects, headers included."""
        objects = self.objects()
        return tuple(sum(objects.get(pool.name, 0) for pool in each.pools) for each in self.layout.components)

    def _check_memory(self) -> None:
        engine = (sum(self.device_pages) + sum(self.host_pages)) * SLOT_BYTES
        store = 0
        if self.with_bytes:
            sizes = zip(self.layout.components, self.device_pages, self.host_pages, strict=True)
            engine += sum(_payload_bytes(component.pools, device, host) for component, device, host in sizes)
            if self.storage is not None and self.storage.startswith("memory:"):
                store = self.storage_bytes or 0
        need = self.engines * engine + store
        have = available_bytes()
        if need > have:
            less = "--no-bytes needs far less, with the same hits; so do smaller pages (--page-bytes)"
            raise ConfigError(
                f"the tiers need {bytes_text(need)} of memory, found {bytes_text(have)} available"
                + (f"; {less}" if self.with_bytes else "")
            )


def _payload_bytes(pools: Sequence[PoolSpec], device_pages: int, host_pages: int) -> int:
    on_device = (device_pages + 1) * sum(pool.page_bytes for pool in pools)
    return on_device + (host_pages + 1) * sum(pool.page_bytes + SEAL_BYTES for pool in pools if pool.page_bytes)

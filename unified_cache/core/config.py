"""Sizes and bounds of one cache, validated as one frozen value."""

import math
from dataclasses import asdict, dataclass
from enum import Enum
from numbers import Integral

from unified_cache.core.errors import ConfigError, check_each, check_kind
from unified_cache.core.pool import Tier

__all__ = ["CacheConfig", "EvictionConfig", "EvictionPolicy", "GuardConfig", "Prefetching", "Retention", "WritePolicy"]


RETRY_ROUNDS_MAX = 10
"""Rounds of one call: each may double the number of calls to the store."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Ends along a prompt at which a request keeps the windows and states that a later request needs to resume there.

    They are kept where the prompt ends and, with ``branches``, where it leaves what other prompts have been through.
    The text at the very end of a prompt is often not the beginning of its continuation (a template's last tokens), so
    with ``tail_tokens`` they are kept at every page boundary of that many tokens before the end, too.
    """

    tail_tokens: int = 0
    """A prompt can be resumed at every page boundary less than this many tokens before its last one, too."""
    branches: bool = True
    """Keep windows and states where a prompt leaves what is cached, too; the second one to leave there pays for it."""

    def __post_init__(self) -> None:
        if self.tail_tokens < 0:
            raise ConfigError(f"tail_tokens must not be negative, found {self.tail_tokens}")

    def ends(self, pages_count: int, branch_end: int, page_size: int) -> tuple[int, ...]:
        """Return the ends, ascending, for a prompt of ``pages_count`` pages that leaves the tree at ``branch_end``."""
        tail_pages = max(1, -(-self.tail_tokens // page_size))
        ends = set(range(max(pages_count - tail_pages, 0) + 1, pages_count + 1))
        if self.branches:
            ends.add(branch_end)
        return tuple(sorted(ends - {0}))


class EvictionPolicy(Enum):
    """Order in which pages are evicted; see ``unified_cache.tree.eviction_queues``."""

    LRU = "lru"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class EvictionConfig:
    """Order of eviction. No setting evicts a page while there is room, and none keeps a page for ever."""

    device: tuple[EvictionPolicy, ...] = ()
    """Policy of each component on the device; the last one is that of all after it, lru if none is named."""
    host: tuple[EvictionPolicy, ...] = ()
    """Policy of each component on the host, as ``device``."""

    def __post_init__(self) -> None:
        for name, policies in (("device", self.device), ("host", self.host)):
            check_each(policies, EvictionPolicy, f"the policies of {name} as a tuple of EvictionPolicy", ConfigError)

    def policy(self, tier: Tier, component: int) -> EvictionPolicy:
        """Return the policy of one component on one tier."""
        named = self.device if tier is Tier.DEVICE else self.host
        return named[min(component, len(named) - 1)] if named else EvictionPolicy.LRU


class WritePolicy(Enum):
    """Time of the backup to host memory, and on to storage. As the write policies of SGLang 0.5.23."""

    ON_CALL = "on_call"
    """A prompt is backed up when the engine calls ``backup``, and only then."""
    THROUGH = "through"
    """Write-through: as soon as a prompt is inserted."""
    SELECTIVE = "selective"
    """Write-through-selective: as soon as another request uses a prompt; most prompts are used once."""
    BACK = "back"
    """Write-back: when much has been inserted since, and what the device evicts before that as it evicts it."""


@dataclass(frozen=True, slots=True)
class Prefetching:
    """Bounds on what a prefetch from storage costs a request and the host tier."""

    threshold_tokens: int = 0
    """Prefixes of fewer tokens are not asked of storage, nor read where it adds fewer."""
    patience_s: float = math.inf
    """Deadline of every prefetch: then it ends with the pages that have arrived."""
    host_share: float = 1.0
    """Largest share of the host's pages that prefetches in flight may fill."""

    def __post_init__(self) -> None:
        for name, value in (
            ("threshold_tokens", self.threshold_tokens),
            ("patience_s", self.patience_s),
        ):
            if not value >= 0:
                raise ConfigError(f"{name} must not be negative, found {value}")
        if not 0 < self.host_share <= 1:
            raise ConfigError(f"host_share must be in (0, 1], found {self.host_share}")


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """Settings of the guard around a store (``storage_backends.wrappers.guard``), of a cache or of a service."""

    deadline_s: float = 5.0
    """Longest wait for one call, or longer where the store says so; then it is late, and its pages are in quarantine
    until the store returns from it."""
    calls_max: int = 16
    """Calls in flight, those that hang included; with as many hanging, none is started."""
    retry_rounds_max: int = 3
    """Times that a call is tried which failed in a way that may pass."""
    retry_pause_s: float = 0.05
    """Before the second time; twice that before the third, and so on."""
    breaker_failures_max: int = 5
    """Failures after which the store is paused."""
    breaker_pause_s: float = 1.0
    """For how long at first; twice that after each probe that fails."""
    breaker_pause_s_max: float = 4.0
    """And for how long at most: a store that is back is used again within that time."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive and finite, found {value}")
        if self.retry_rounds_max > RETRY_ROUNDS_MAX:
            raise ConfigError(f"retry_rounds_max must be at most {RETRY_ROUNDS_MAX}, found {self.retry_rounds_max}")
        if self.breaker_pause_s > self.breaker_pause_s_max:
            raise ConfigError(
                f"breaker_pause_s must be at most breaker_pause_s_max, "
                f"found {self.breaker_pause_s} and {self.breaker_pause_s_max}"
            )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Capacity of each tier, bounds on transfers, and policies of one cache."""

    device_pages: tuple[int, ...]
    """Cacheable pages on the device, by component. The pools have one slot more, the padding sink."""
    host_pages: tuple[int, ...]
    """Pages in host memory, by component; all zero for a cache without a host tier."""
    operations_max: int = 256
    """Transfers under way at a time; one more is declined. Bounds every queue."""
    storage_workers: int = 2
    """Threads that talk to storage, so that one slow call does not hold up all others."""
    retention: Retention = Retention()
    """Checkpoints that requests leave for later ones; see ``UnifiedCache.checkpoint_ends``."""
    eviction: EvictionConfig = EvictionConfig()
    """Order of eviction."""
    write: WritePolicy = WritePolicy.THROUGH
    """Time of the backup; without a host tier there is none."""
    dirty_share: float = 0.5
    """Largest share of the device's pages that waits for its backup (``WritePolicy.BACK``)."""
    prefetching: Prefetching = Prefetching()
    """Bounds on prefetches."""
    guard: GuardConfig | None = GuardConfig()
    """What the cache puts between itself and its store; None for a store that looks after itself."""
    operation_timeout_s: float = 60.0
    """How long a transfer may run."""
    close_timeout_s: float = 10.0
    """How long ``close`` waits for transfers under way."""
    duplicates_every: int = 4
    """Of so many requests that compute pages the device holds, one has some compared; 0 for none."""

    def __post_init__(self) -> None:
        for name, pages in (("device_pages", self.device_pages), ("host_pages", self.host_pages)):
            check_each(pages, Integral, f"{name} as a number of pages for each component, such as (100,)", ConfigError)
        check_kind(self.retention, Retention, "retention as a Retention", ConfigError)
        check_kind(self.eviction, EvictionConfig, "eviction as an EvictionConfig", ConfigError)
        check_kind(self.write, WritePolicy, "write as a WritePolicy, such as WritePolicy.THROUGH", ConfigError)
        check_kind(self.prefetching, Prefetching, "prefetching as a Prefetching", ConfigError)
        check_kind(self.guard, GuardConfig | None, "guard as a GuardConfig or None", ConfigError)
        if max(len(self.eviction.device), len(self.eviction.host)) > len(self.device_pages):
            raise ConfigError(f"eviction names more policies than the {len(self.device_pages)} components")
        if len(self.device_pages) != len(self.host_pages):
            raise ConfigError(
                f"device_pages and host_pages need an entry for each component, "
                f"found {len(self.device_pages)} and {len(self.host_pages)}"
            )
        if any(pages < 1 for pages in self.device_pages):
            raise ConfigError(f"device_pages must be positive, found {self.device_pages}")
        if any(pages < 0 for pages in self.host_pages):
            raise ConfigError(f"host_pages must not be negative, found {self.host_pages}")
        if any(self.host_pages) and not all(self.host_pages):
            raise ConfigError(f"host_pages must be zero for all components or for none, found {self.host_pages}")
        for name, value in (
            ("operations_max", self.operations_max),
            ("storage_workers", self.storage_workers),
            ("operation_timeout_s", self.operation_timeout_s),
            ("close_timeout_s", self.close_timeout_s),
        ):
            if not value > 0:
                raise ConfigError(f"{name} must be positive, found {value}")
        if not 0 < self.dirty_share <= 1:
            raise ConfigError(f"dirty_share must be in (0, 1], found {self.dirty_share}")
        if self.duplicates_every < 0:
            raise ConfigError(f"duplicates_every must not be negative, found {self.duplicates_every}")

    def check_host(self) -> None:
        """Raise ConfigError where there is no host tier to move pages to."""
        if not self.host_pages[0]:
            raise ConfigError(f"host pages are needed to move pages, found {self.host_pages}")

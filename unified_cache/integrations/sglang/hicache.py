"""The class that SGLang loads by ``--hicache-storage-backend dynamic``; the only module here that imports SGLang.

SGLang has one thread each for look-ups, reads and writes; it ends for good if a call raises, and requests wait for ever
then. So no call does: what goes wrong is a miss, or a page that was not stored, and a line in the log. What is wrong
with the configuration is refused in the constructor, where SGLang expects it.
"""

# pyright: reportMissingImports=false

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.observability.metrics_collector import StorageMetrics

from unified_cache.integrations.engine_store import EngineStore, EngineStoreCounts, HitWatch
from unified_cache.integrations.engine_store.pools import Restorable
from unified_cache.integrations.sglang.engine_facts import NOTHING_RESTORED, engine_facts
from unified_cache.integrations.sglang.pool_calls import ANCHOR_POOL, PoolCalls
from unified_cache.integrations.sglang.settings import HiCacheSettings

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

logger = logging.getLogger(__name__)

PAGE_TOKENS_USEFUL_MIN = 16
"""Shortest page that a store is not warned of. SGLang 0.5.23 begins with pages of one token by default."""

CLOSE_TIMEOUT_S = 5.0
"""Longest wait for calls under way when SGLang detaches the store; it waits 10 s for its own threads before."""

FAILURE_PAUSE_S = 10.0
"""Time between two lines about failures of one type, however often they happen."""

_T = TypeVar("_T")


class UnifiedCacheHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """Storage of one rank's pages, behind both generations of SGLang's interface, zero-copy where the pools allow it.

    A store that is away when the engine starts is used as soon as it is there; meanwhile everything is a miss.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, object]) -> None:
        """Open the store that ``url`` in the extra configuration names.

        Raises:
            ConfigError: a setting is missing, unknown or wrong, or the engine is set up in a way that is not supported.
        """
        settings = HiCacheSettings.of(storage_config)
        facts = engine_facts(storage_config, settings)
        self._is_replicated = bool(storage_config.is_mla_model)
        self._store = EngineStore.open(settings.url, settings.store_config, bytes_max=settings.bytes_max)
        self._calls = PoolCalls(self._store, facts)
        self._watch = HitWatch(self._store.counts, settings.url, NOTHING_RESTORED)
        self._quiet_until_s: dict[type[Exception], float] = {}
        self._url = settings.url

    # ---- pools ---------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: "HostKVCache") -> None:
        """Take the anchor pool."""
        super().register_mem_pool_host(mem_pool_host)
        self._add(ANCHOR_POOL, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: "HostKVCache", host_pool_name: str) -> None:
        """Take any pool by its name, when the engine starts or later."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Log what is stored where, and warn of pages that are too short to be stored well."""
        self._safely(self._say_what_is_stored, None)

    def _say_what_is_stored(self) -> None:
        logger.info("unified-cache stores %s in %s", self._calls.described(), self._url)
        page_tokens = self._calls.page_tokens
        if page_tokens is not None and page_tokens < PAGE_TOKENS_USEFUL_MIN:
            logger.warning(
                "a page is an object of its own, expected at least %d tokens in it, found %d: start SGLang with "
                "--page-size 64",
                PAGE_TOKENS_USEFUL_MIN,
                page_tokens,
            )

    def _add(self, name: str, pool: "HostKVCache") -> None:
        is_rank_own = (
            not self._is_replicated or name == PoolName.MAMBA or isinstance(pool, MHATokenToKVPoolHost | MambaPoolHost)
        )
        self._safely(lambda: self._calls.add(name, pool, is_rank_own=is_rank_own), None)

    # ---- second generation -----------------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return which prefixes of a chain all pools together can restore."""
        self._watch.count_request()
        found = self._safely(lambda: self._calls.restorable(keys, pool_transfers or ()), Restorable([], {}))
        reach = {pool: pages for pool, pages in found.reach.items() if pages}
        return PoolTransferResult(found.longest, reach, found.ends)

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Fill pages of several pools; by pool, whether each is what its key names."""
        nothing = {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}
        return self._safely(lambda: self._calls.get_pools(transfers), nothing)

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools; by pool, whether each is stored."""
        nothing = {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}
        self._watch.count_request()
        return self._safely(lambda: self._calls.put_pools(transfers), nothing)

    # ---- first generation ------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether the anchor pool has a page."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many pages from the start the anchor pool has."""
        self._watch.count_request()
        return self._safely(lambda: self._calls.restorable(keys).longest, 0)

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fill pages of the anchor pool; whether each is what its key names."""
        return self._safely(lambda: self._calls.get(keys, host_indices), [False] * len(keys))

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the anchor pool; whether each is stored."""
        self._watch.count_request()
        return self._safely(lambda: self._calls.put(keys, host_indices), [False] * len(keys))

    # ---- the interface before both: not used with interface_v1, which the constructor demands ----------------------

    def get(self, key: str, *where: object, **options: object) -> torch.Tensor | None:
        """Read nothing: a page in a tensor of its own may have another order of bytes than one in the pool."""
        return None

    def batch_get(self, keys: Sequence[str], *where: object, **options: object) -> list[torch.Tensor | None]:
        """Read nothing, as ``get``."""
        return [None] * len(keys)

    def set(self, key: str, *what: object, **options: object) -> bool:
        """Store nothing, as ``get``."""
        return False

    def batch_set(self, keys: Sequence[str], *what: object, **options: object) -> bool:
        """Store nothing, as ``get``."""
        return False

    # ---- operation -------------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Remove every page of this engine's pools; return whether all are gone."""
        return self._safely(self._calls.clear, False)

    def get_stats(self) -> StorageMetrics:
        """Return pages and GB/s of the calls since the last time that SGLang asked."""
        read, written = (
            [rates.popleft() for _ in range(len(rates))] for rates in (self._calls.read_rates, self._calls.write_rates)
        )
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in read],
            backup_pgs=[pages for pages, _ in written],
            prefetch_bandwidth=[rate for _, rate in read],
            backup_bandwidth=[rate for _, rate in written],
        )

    def counts(self) -> EngineStoreCounts:
        """Return what the store answered so far, and its state."""
        return self._store.counts()

    def close(self) -> None:
        """Release the store and the engine's memory."""
        self._safely(lambda: logger.info("unified-cache closes %s: %s", self._url, self._store.counts()), None)
        self._calls.close()
        self._safely(lambda: self._store.close(CLOSE_TIMEOUT_S), None)

    def _safely(self, call: Callable[[], _T], otherwise: _T) -> _T:
        """Return what a call returns, or ``otherwise`` and, now and then, a line in the log if it raises."""
        try:
            return call()
        except Exception as error:
            kind, now_s = type(error), time.monotonic()
            if now_s >= self._quiet_until_s.get(kind, now_s):
                self._quiet_until_s[kind] = now_s + FAILURE_PAUSE_S
                logger.error("a storage call failed and counts as a miss", exc_info=error)
            return otherwise

"""The class that SGLang loads by ``--hicache-storage-backend dynamic``; the only module here that imports SGLang.

SGLang has one thread each for look-ups, reads and writes; it ends for good if a call raises, and requests wait for ever
then. So no call does: what goes wrong is a miss, or a page that was not stored, and a line in the log. What is wrong
with the configuration is refused in the constructor, where SGLang expects it.
"""

# pyright: reportMissingImports=false

import logging
import time
from collections import deque
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

from unified_cache.core.errors import InputError
from unified_cache.core.page import PAGE_KEY_BYTES, PageKey
from unified_cache.core.window import SPAN_ALL
from unified_cache.integrations.engine_store import EngineStore, HitWatch
from unified_cache.integrations.engine_store.pools import BundlePages, EnginePools, PoolNeed, Restorable
from unified_cache.integrations.sglang.engine_facts import NOTHING_RESTORED, engine_facts
from unified_cache.integrations.sglang.host_pools import rows_of_pool
from unified_cache.integrations.sglang.naming import ANCHOR_POOL, DECIDING, PoolFacts, name_bundle, span_of
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

RATES_MAX = 1024
"""Calls whose rates are kept until SGLang asks."""

_T = TypeVar("_T")

_Move = Callable[[Sequence[BundlePages]], list[list[bool]]]

_Rates = deque[tuple[int, float]]
"""Pages of each call, and its GB/s."""


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
        self._pools: dict[str, PoolFacts] = {}
        self._engine_pools = EnginePools(self._store, lambda names, _: name_bundle(facts, self._pools, names))
        self._read_rates: _Rates = deque(maxlen=RATES_MAX)
        self._write_rates: _Rates = deque(maxlen=RATES_MAX)
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
        anchor = self._pools.get(ANCHOR_POOL)
        page_tokens = None if anchor is None else anchor.page_size
        pools = ", ".join(f"{name} ({pool.page_bytes} bytes)" for name, pool in self._pools.items())
        logger.info("unified-cache stores pages of %s tokens, %s in %s", page_tokens, pools, self._url)
        if page_tokens is not None and page_tokens < PAGE_TOKENS_USEFUL_MIN:
            logger.warning(
                "a page is an object of its own, expected at least %d tokens in it, found %d: start SGLang with "
                "--page-size 64",
                PAGE_TOKENS_USEFUL_MIN,
                page_tokens,
            )

    def _add(self, name: str, pool: "HostKVCache") -> None:
        """Take a pool; what SGLang does not have that it should is raised: nothing would be stored."""
        try:
            self._take(name, pool)
        except InputError as error:
            logger.error("pages of %s are not stored: %s", name, error)

    def _take(self, name: str, pool: "HostKVCache") -> None:
        """Take a pool, or another one of the same name. A pool that cannot be stored is one that nothing is found of.

        Raises:
            InputError: the pool does not hand out its pages.
        """
        is_rank_own = (
            not self._is_replicated or name == PoolName.MAMBA or isinstance(pool, MHATokenToKVPoolHost | MambaPoolHost)
        )
        rows = rows_of_pool(pool)
        facts = PoolFacts.of(pool, () if rows is None else rows.buffers_bytes, is_rank_own=is_rank_own)
        self._pools = {**self._pools, name: facts}
        self._engine_pools.add(name, rows)

    # ---- second generation: any pools, each with keys and places of its own ----------------------------------------

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return which prefixes of a chain all pools together can restore."""
        self._watch.count_request()
        found = self._safely(lambda: self._restorable(keys, pool_transfers or ()), Restorable([], {}))
        reach = {pool: pages for pool, pages in found.reach.items() if pages}
        return PoolTransferResult(found.longest, reach, found.ends)

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Fill pages of several pools; by pool, whether each is what its key names."""
        return self._move(transfers, self._engine_pools.get, self._read_rates)

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools; by pool, whether each is stored."""
        self._watch.count_request()
        return self._move(transfers, self._engine_pools.put, self._write_rates)

    def _restorable(self, keys: Sequence[str], transfers: Sequence[PoolTransfer]) -> Restorable:
        """Return which prefixes the anchor pool and those of the transfers together can restore.

        Of an anchor pool without bytes alone nobody can say.
        """
        needs: dict[tuple[str, int, tuple[int, bool]], list[str]] = {}
        anchor = self._pools.get(ANCHOR_POOL)
        if anchor is not None:
            needs[ANCHOR_POOL, SPAN_ALL, anchor.bundled_by] = [ANCHOR_POOL]
        for transfer in transfers:
            pool = str(transfer.name)
            if transfer.hit_policy not in DECIDING:
                continue
            facts = self._pools.get(pool)
            if facts is None:
                return Restorable([], {})
            source = str(transfer.indices_from_pool or pool)
            # A pool that follows the anchor is not stored with it: the anchor's pages go by calls of their own.
            source = f"after {source}" if source == ANCHOR_POOL else source
            needs.setdefault((source, span_of(transfer), facts.bundled_by), []).append(pool)
        wanted = [PoolNeed(tuple(pools), span) for (_, span, _), pools in needs.items()]
        return self._engine_pools.restorable(_page_keys(keys), wanted)

    def _move(self, transfers: Sequence[PoolTransfer], move: _Move, rates: _Rates) -> dict[str, list[bool]]:
        """Move pages, or none if that raises; by pool, whether each was moved."""
        nothing = {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}
        return self._safely(lambda: nothing | self._moved(transfers, move, rates), nothing)

    def _moved(self, transfers: Sequence[PoolTransfer], move: _Move, rates: _Rates) -> dict[str, list[bool]]:
        """Move pools that share keys and places, as DeepSeek-V4's do, as one bundle."""
        started_s = time.perf_counter()
        bundles: list[list[PoolTransfer]] = []
        for transfer in transfers:
            if transfer.host_indices is not None and transfer.keys:
                bundle = next((bundle for bundle in bundles if self._go_together(bundle[0], transfer)), None)
                if bundle is None:
                    bundles.append([transfer])
                else:
                    bundle.append(transfer)
        asked = []
        for first, *others in bundles:
            names = tuple(str(each.name) for each in (first, *others))
            asked.append(BundlePages(names, _page_keys(first.keys), self._slots(first)))
        done = move(asked)
        pools = self._pools
        moved = [(str(each.name), pages) for bundle, pages in zip(bundles, done, strict=True) for each in bundle]
        bytes_moved = sum(pools[name].page_bytes * sum(pages) for name, pages in moved if name in pools)
        if bytes_moved:
            rates.append((sum(map(sum, done)), bytes_moved / 1e9 / max(time.perf_counter() - started_s, 1e-9)))
        return {name: list(pages) for name, pages in moved}

    def _go_together(self, first: PoolTransfer, other: PoolTransfer) -> bool:
        if first.host_indices is not other.host_indices or first.keys != other.keys:
            return False
        one, another = (self._pools.get(str(transfer.name)) for transfer in (first, other))
        return one is not None and another is not None and one.bundled_by == another.bundled_by

    def _slots(self, transfer: PoolTransfer) -> list[int]:
        """Return the slots of pages; none where the engine's indices are not those of so many whole pages."""
        facts, indices = self._pools.get(str(transfer.name)), transfer.host_indices
        if facts is None or indices.numel() != len(transfer.keys) * facts.page_size:
            return []
        firsts: list[int] = indices[:: facts.page_size].tolist()
        if any(first % facts.page_size for first in firsts):
            return []
        return [first // facts.page_size for first in firsts]

    # ---- first generation: pages of the anchor pool ----------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether the anchor pool has a page."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many pages from the start the anchor pool has."""
        return int(self.batch_exists_v2(keys).kv_hit_pages)

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fill pages of the anchor pool; whether each is what its key names."""
        return self.batch_get_v2([PoolTransfer(PoolName.KV, host_indices, keys=keys)])[PoolName.KV]

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the anchor pool; whether each is stored."""
        return self.batch_set_v2([PoolTransfer(PoolName.KV, host_indices, keys=keys)])[PoolName.KV]

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
        return self._safely(self._engine_pools.clear, False)

    def get_stats(self) -> StorageMetrics:
        """Return pages and GB/s of the calls since the last time that SGLang asked."""
        read, written = (
            [rates.popleft() for _ in range(len(rates))] for rates in (self._read_rates, self._write_rates)
        )
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in read],
            backup_pgs=[pages for pages, _ in written],
            prefetch_bandwidth=[rate for _, rate in read],
            backup_bandwidth=[rate for _, rate in written],
        )

    def close(self) -> None:
        """Release the store and the engine's memory."""
        self._safely(lambda: logger.info("unified-cache closes %s: %s", self._url, self._store.counts()), None)
        self._engine_pools.close()
        self._pools = {}
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


def _page_keys(hashes: Sequence[str]) -> list[PageKey]:
    """Return page hashes as the keys of a store.

    Raises:
        InputError: one is no digest of 32 bytes.
    """
    try:
        keys = list(map(bytes.fromhex, hashes))
    except ValueError as error:
        raise InputError(f"expected page hashes of 64 hex digits: {error}") from error
    if keys and set(map(len, keys)) != {PAGE_KEY_BYTES}:
        raise InputError(f"expected page hashes of 64 hex digits, found some of {sorted(set(map(len, hashes)))}")
    return keys

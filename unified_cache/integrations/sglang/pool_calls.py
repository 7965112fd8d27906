"""SGLang's storage calls as moves of pages, for both generations of its interface, and whatever pools it names.

    v1    batch_exists, batch_get_v1, batch_set_v1       the anchor pool, some pages
    v2    batch_exists_v2, batch_get_v2, batch_set_v2    any pools, each with keys and places of its own

Pools that share the places of another, as DeepSeek-V4's do, are stored together as bundles.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from unified_cache.core.errors import InputError
from unified_cache.core.page import PAGE_KEY_BYTES, PageKey
from unified_cache.core.window import SPAN_ALL
from unified_cache.integrations.engine_store import EngineStore
from unified_cache.integrations.engine_store.pools import BundlePages, EnginePools, PoolNeed, Restorable
from unified_cache.integrations.sglang.host_pools import rows_of_pool
from unified_cache.integrations.sglang.naming import EngineFacts, PoolFacts, name_bundle

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import (  # pyright: ignore[reportMissingImports]
        PoolTransfer,
    )
    from sglang.srt.mem_cache.pool_host.base import HostKVCache  # pyright: ignore[reportMissingImports]

ANCHOR_POOL = "kv"
"""Name of the pool that calls of the first generation are about; as PoolName.KV in SGLang 0.5.23."""

ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"
"""Hit policies that decide; as PoolHitPolicy in SGLang 0.5.23. Pools of another one, as block groups, do not."""

RATES_MAX = 1024
"""Calls whose rates are kept until somebody asks."""

CallRate = tuple[int, float]
"""Pages of one call, and its GB/s."""


class PoolCalls:
    """The calls of one engine over one store. Thread-safe: look-ups, reads and writes have a thread each."""

    def __init__(self, store: EngineStore, facts: EngineFacts, clock: Callable[[], float] = time.perf_counter) -> None:
        self._tier = EnginePools(store, lambda pools, _: name_bundle(facts, self._pools, ANCHOR_POOL, pools))
        self._clock = clock
        self._pools: dict[str, PoolFacts] = {}
        self.read_rates: deque[CallRate] = deque(maxlen=RATES_MAX)
        """Of the latest reads, until somebody takes them."""
        self.write_rates: deque[CallRate] = deque(maxlen=RATES_MAX)

    def add(self, name: str, pool: "HostKVCache", *, is_rank_own: bool) -> None:
        """Take a pool, or another one of the same name. A pool that cannot be stored is one that nothing is found of.

        The caller keeps the pool alive until ``close``.

        Raises:
            InputError: the pool does not hand out its pages.
        """
        rows = rows_of_pool(pool)
        facts = PoolFacts.of(pool, () if rows is None else rows.buffers_bytes, is_rank_own=is_rank_own)
        self._pools = {**self._pools, name: facts}
        self._tier.add(name, rows)

    @property
    def page_tokens(self) -> int | None:
        """Tokens of a page; None before the anchor pool is there."""
        anchor = self._pools.get(ANCHOR_POOL)
        return None if anchor is None else anchor.page_size

    def described(self) -> str:
        """Return the tokens of a page, and its bytes by pool, for people."""
        pools = ", ".join(f"{name} ({pool.page_bytes} bytes)" for name, pool in self._pools.items())
        return f"pages of {self.page_tokens} tokens, {pools}"

    def close(self) -> None:
        """Release the engine's pools; from now on every page is a miss."""
        self._tier.close()
        self._pools = {}

    def restorable(self, keys: Sequence[str], transfers: Iterable["PoolTransfer"] = ()) -> Restorable:
        """Return which prefixes of a chain the anchor pool and those of the transfers together can restore.

        Of an anchor pool without bytes alone nobody can say.
        """
        needs: dict[tuple[str, int, tuple[int, bool]], list[str]] = {}
        anchor = self._pools.get(ANCHOR_POOL)
        if anchor is not None:
            needs[ANCHOR_POOL, SPAN_ALL, anchor.bundled_by] = [ANCHOR_POOL]
        for transfer in transfers:
            pool = str(transfer.name)
            if transfer.hit_policy not in {ALL_PAGES, TRAILING_PAGES}:
                continue
            facts = self._pools.get(pool)
            if facts is None:
                return Restorable([], {})
            source = str(transfer.indices_from_pool or pool)
            # A pool that follows the anchor is not stored with it: the anchor's pages go by calls of their own.
            source = f"after {source}" if source == ANCHOR_POOL else source
            needs.setdefault((source, span_of(transfer), facts.bundled_by), []).append(pool)
        wanted = [PoolNeed(tuple(pools), span) for (_, span, _), pools in needs.items()]
        return self._tier.restorable(_page_keys(keys), wanted)

    def get(self, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        """Fill pages of the anchor pool."""
        (done,) = self._move([((ANCHOR_POOL,), keys, indices)], self._tier.get, self.read_rates)
        return done

    def put(self, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        """Store pages of the anchor pool."""
        (done,) = self._move([((ANCHOR_POOL,), keys, indices)], self._tier.put, self.write_rates)
        return done

    def get_pools(self, transfers: Sequence["PoolTransfer"]) -> dict[str, list[bool]]:
        """Fill pages of several pools; by pool, whether each page is there."""
        return self._move_pools(transfers, self._tier.get, self.read_rates)

    def put_pools(self, transfers: Sequence["PoolTransfer"]) -> dict[str, list[bool]]:
        """Store pages of several pools; by pool, whether each is stored."""
        return self._move_pools(transfers, self._tier.put, self.write_rates)

    def clear(self) -> bool:
        """Remove all pages of this engine's pools; return whether all are gone."""
        return self._tier.clear()

    def _move_pools(
        self,
        transfers: Sequence["PoolTransfer"],
        move: "_Move",
        rates: "deque[CallRate]",
    ) -> dict[str, list[bool]]:
        """Move pools that share keys and places as one bundle."""
        bundles: list[list[PoolTransfer]] = []
        for transfer in transfers:
            if transfer.host_indices is not None and transfer.keys:
                bundle = next((bundle for bundle in bundles if self._go_together(bundle[0], transfer)), None)
                if bundle is None:
                    bundles.append([transfer])
                else:
                    bundle.append(transfer)
        parts = [
            (tuple(str(each.name) for each in bundle), bundle[0].keys, bundle[0].host_indices) for bundle in bundles
        ]
        results = {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}
        for bundle, done in zip(bundles, self._move(parts, move, rates), strict=True):
            results.update((transfer.name, list(done)) for transfer in bundle)
        return results

    def _go_together(self, first: "PoolTransfer", other: "PoolTransfer") -> bool:
        if first.host_indices is not other.host_indices or first.keys != other.keys:
            return False
        one, another = (self._pools.get(str(transfer.name)) for transfer in (first, other))
        return one is not None and another is not None and one.bundled_by == another.bundled_by

    def _move(
        self,
        parts: "Sequence[tuple[tuple[str, ...], Sequence[str], torch.Tensor]]",
        move: "_Move",
        rates: "deque[CallRate]",
    ) -> list[list[bool]]:
        """Move pages by their pools, keys and indices."""
        started_s = self._clock()
        done = move(
            [
                BundlePages(pools, _page_keys(keys), self._slots(pools[0], len(keys), indices))
                for pools, keys, indices in parts
            ]
        )
        known = self._pools
        sizes = [sum(known[pool].page_bytes for pool in pools if pool in known) for pools, _, _ in parts]
        bytes_moved = sum(size * sum(pages) for size, pages in zip(sizes, done, strict=True))
        if bytes_moved:
            rates.append((sum(map(sum, done)), bytes_moved / 1e9 / max(self._clock() - started_s, 1e-9)))
        return done

    def _slots(self, pool: str, pages_count: int, indices: torch.Tensor) -> list[int]:
        """Return the slots of pages; none where the engine's indices are not those of so many whole pages."""
        facts = self._pools.get(pool)
        if facts is None or indices.numel() != pages_count * facts.page_size:
            return []
        firsts: list[int] = indices[:: facts.page_size].tolist()
        if any(first % facts.page_size for first in firsts):
            return []
        return [first // facts.page_size for first in firsts]


_Move = Callable[[Sequence[BundlePages]], list[list[bool]]]


def span_of(transfer: "PoolTransfer") -> int:
    """Return how many pages before an end a look-up asks a pool for."""
    return SPAN_ALL if transfer.hit_policy == ALL_PAGES else max(1, len(transfer.keys or ()))


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

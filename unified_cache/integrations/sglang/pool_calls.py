"""SGLang's storage calls as moves of pages, for both generations of its interface, and whatever pools it names.

    v1    batch_exists, batch_get_v1, batch_set_v1       the anchor pool, some pages
    v2    batch_exists_v2, batch_get_v2, batch_set_v2    any pools, each with keys and places of its own

Pools that share the places of another, as DeepSeek-V4's do, are stored together as bundles.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import torch

from unified_cache.errors import InputError
from unified_cache.integrations.engine_store.pools import BundlePages, EnginePools, PageStore, PoolNeed
from unified_cache.integrations.sglang.host_pools import rows_of_pool
from unified_cache.integrations.sglang.naming import BundleNames, EngineFacts, PoolFacts
from unified_cache.page import PAGE_KEY_BYTES, PageKey
from unified_cache.window import SPAN_ALL

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolTransfer  # pyright: ignore[reportMissingImports]
    from sglang.srt.mem_cache.pool_host.base import HostKVCache  # pyright: ignore[reportMissingImports]

__all__ = ["ANCHOR_POOL", "PoolCalls", "PoolVerdict", "TransferRates"]

ANCHOR_POOL = "kv"
"""Name of the pool that calls of the first generation are about; as PoolName.KV in SGLang 0.5.23."""

ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"
"""Hit policies that decide; as PoolHitPolicy in SGLang 0.5.23. Pools of another one, as block groups, do not."""

RATES_MAX = 1024
"""Calls whose rates are kept until somebody asks."""


class PoolVerdict(NamedTuple):
    """Answer to a look-up of several pools."""

    pages: int
    """Longest prefix that can be restored."""
    reach: dict[str, int]
    """The same by pool, for pools that can restore a page at all."""
    restorable: list[int]
    """Every prefix that can be restored."""


class TransferRates(NamedTuple):
    """Calls since the last time that somebody asked: pages of each, and GB/s."""

    pages: list[int]
    gigabytes_per_second: list[float]


class _PoolPlace(NamedTuple):
    pool: "HostKVCache"
    """Kept alive, since the tier has views of its memory."""
    page_size: int
    page_bytes: int
    is_rank_own: bool


class _Rates:
    """Rates of calls in one direction, the latest ones. Thread-safe."""

    def __init__(self) -> None:
        self._calls: deque[tuple[int, float]] = deque(maxlen=RATES_MAX)

    def add(self, pages: int, bytes_moved: int, seconds: float) -> None:
        self._calls.append((pages, bytes_moved / 1e9 / max(seconds, 1e-9)))

    def take(self) -> TransferRates:
        calls = [self._calls.popleft() for _ in range(len(self._calls))]
        return TransferRates([pages for pages, _ in calls], [rate for _, rate in calls])


class PoolCalls:
    """The calls of one engine over one tier. Thread-safe: look-ups, reads and writes have a thread each."""

    def __init__(self, store: PageStore, facts: EngineFacts, clock: Callable[[], float] = time.perf_counter) -> None:
        self._names = BundleNames(facts, ANCHOR_POOL)
        self._tier = EnginePools(store, self._names)
        self._clock = clock
        self._places: dict[str, _PoolPlace] = {}
        self._guard = Lock()
        self._read, self._written = _Rates(), _Rates()

    def add(self, name: str, pool: "HostKVCache", *, is_rank_own: bool) -> None:
        """Take a pool, or another one of the same name. A pool that cannot be stored is one that nothing is found of.

        Raises:
            InputError: the pool does not hand out its pages.
        """
        rows = rows_of_pool(pool)
        buffers_bytes = () if rows is None else rows.buffers_bytes
        place = _PoolPlace(pool, pool.page_size, sum(buffers_bytes), is_rank_own)
        self._names.add(name, PoolFacts.of(pool, buffers_bytes, is_rank_own=is_rank_own))
        self._tier.add(name, rows)
        with self._guard:
            self._places = {**self._places, name: place}

    @property
    def page_tokens(self) -> int | None:
        """Tokens of a page; None before the anchor pool is there."""
        anchor = self._places.get(ANCHOR_POOL)
        return None if anchor is None else anchor.page_size

    def described(self) -> str:
        """Return the tokens of a page, and its bytes by pool, for people."""
        pools = ", ".join(f"{name} ({place.page_bytes} bytes)" for name, place in self._places.items())
        return f"pages of {self.page_tokens} tokens, {pools}"

    def close(self) -> None:
        """Let the engine's pools go; from now on everything is a miss."""
        self._tier.close()
        with self._guard:
            self._places = {}

    def run(self, keys: Sequence[str]) -> int:
        """Return how many pages from the start the anchor pool has; of a pool without bytes nobody can say."""
        found = self._tier.restorable(_page_keys(keys), [PoolNeed((ANCHOR_POOL,), SPAN_ALL)])
        return found.ends[-1] if found.ends else 0

    def verdict(self, keys: Sequence[str], transfers: Iterable["PoolTransfer"]) -> PoolVerdict:
        """Tell which prefixes of a chain all pools together can restore."""
        needs: dict[tuple[str, int, int, bool], list[str]] = {}
        anchor = self._places.get(ANCHOR_POOL)
        if anchor is not None:
            needs[ANCHOR_POOL, SPAN_ALL, anchor.page_size, anchor.is_rank_own] = [ANCHOR_POOL]
        for transfer in transfers:
            pool, policy = str(transfer.name), transfer.hit_policy
            if policy not in {ALL_PAGES, TRAILING_PAGES}:
                continue
            place = self._places.get(pool)
            if place is None:
                return PoolVerdict(0, {}, [])
            span = SPAN_ALL if policy == ALL_PAGES else max(1, len(transfer.keys or ()))
            source = str(transfer.indices_from_pool or pool)
            # A pool that follows the anchor is not stored with it: the anchor's pages go by calls of their own.
            source = f"after {source}" if source == ANCHOR_POOL else source
            needs.setdefault((source, span, place.page_size, place.is_rank_own), []).append(pool)
        wanted = [PoolNeed(tuple(pools), span) for (_, span, _, _), pools in needs.items()]
        found = self._tier.restorable(_page_keys(keys), wanted)
        reach = {pool: pages for pool, pages in found.reach.items() if pages}
        return PoolVerdict(found.ends[-1] if found.ends else 0, reach, found.ends)

    def get(self, keys: Sequence[str], indices: torch.Tensor, extra: "HiCacheStorageExtraInfo | None") -> list[bool]:
        """Fill pages of the anchor pool."""
        (done,) = self._move([_Pages((ANCHOR_POOL,), keys, indices)], extra, self._tier.get, self._read)
        return done

    def put(self, keys: Sequence[str], indices: torch.Tensor, extra: "HiCacheStorageExtraInfo | None") -> list[bool]:
        """Store pages of the anchor pool."""
        (done,) = self._move([_Pages((ANCHOR_POOL,), keys, indices)], extra, self._tier.put, self._written)
        return done

    def get_pools(
        self, transfers: Sequence["PoolTransfer"], extra: "HiCacheStorageExtraInfo | None"
    ) -> dict[str, list[bool]]:
        """Fill pages of several pools; by pool, whether each page is there."""
        return self._move_pools(transfers, extra, self._tier.get, self._read)

    def put_pools(
        self, transfers: Sequence["PoolTransfer"], extra: "HiCacheStorageExtraInfo | None"
    ) -> dict[str, list[bool]]:
        """Store pages of several pools; by pool, whether each is stored."""
        return self._move_pools(transfers, extra, self._tier.put, self._written)

    def clear(self) -> bool:
        """Remove all pages of this engine's pools; tell whether all are gone."""
        return self._tier.clear()

    def take_rates(self) -> tuple[TransferRates, TransferRates]:
        """Return the rates of reads and of writes since the last time."""
        return self._read.take(), self._written.take()

    def _move_pools(
        self, transfers: Sequence["PoolTransfer"], extra: "HiCacheStorageExtraInfo | None", move: "_Move", rates: _Rates
    ) -> dict[str, list[bool]]:
        bundles: list[tuple[list[PoolTransfer], _Pages]] = []
        results = {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}
        for transfer in transfers:
            if transfer.host_indices is None or not transfer.keys:
                continue
            place = self._places.get(str(transfer.name))
            for members, pages in bundles:
                first = self._places.get(str(members[0].name))
                if (
                    pages.indices is transfer.host_indices
                    and (pages.keys is transfer.keys or pages.keys == transfer.keys)
                    and place is not None
                    and first is not None
                    and (place.page_size, place.is_rank_own) == (first.page_size, first.is_rank_own)
                ):
                    members.append(transfer)
                    break
            else:
                bundles.append(([transfer], _Pages((), transfer.keys, transfer.host_indices)))
        parts = [pages._replace(pools=tuple(str(t.name) for t in members)) for members, pages in bundles]
        for (members, _), done in zip(bundles, self._move(parts, extra, move, rates), strict=True):
            results.update((transfer.name, list(done)) for transfer in members)
        return results

    def _move(
        self, parts: "Sequence[_Pages]", extra: "HiCacheStorageExtraInfo | None", move: "_Move", rates: _Rates
    ) -> list[list[bool]]:
        started_s = self._clock()
        parent = _parent(extra)
        moved: list[BundlePages] = []
        results = [[False] * len(part.keys) for part in parts]
        numbers: list[int] = []
        for number, part in enumerate(parts):
            slots = self._slots(part)
            if slots is not None:
                numbers.append(number)
                moved.append(BundlePages(part.pools, _page_keys(part.keys), slots, parent))
        for number, done in zip(numbers, move(moved), strict=True):
            results[number] = done
        places = self._places
        sizes = [sum(places[pool].page_bytes for pool in part.pools if pool in places) for part in moved]
        counts = [sum(results[number]) for number in numbers]
        bytes_moved = sum(size * count for size, count in zip(sizes, counts, strict=True))
        if bytes_moved:
            rates.add(sum(counts), bytes_moved, self._clock() - started_s)
        return results

    def _slots(self, part: "_Pages") -> list[int] | None:
        """Return the slots of pages; None where the engine's indices are not those of so many whole pages."""
        place = self._places.get(part.pools[0])
        if place is None or part.indices.numel() != len(part.keys) * place.page_size:
            return None
        firsts = part.indices[:: place.page_size].tolist()
        if place.page_size == 1:
            return list(firsts)
        if any(first % place.page_size for first in firsts):
            return None
        return [first // place.page_size for first in firsts]


class _Pages(NamedTuple):
    pools: tuple[str, ...]
    keys: Sequence[str]
    indices: torch.Tensor


_Move = Callable[[Sequence[BundlePages]], list[list[bool]]]


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


def _parent(extra: "HiCacheStorageExtraInfo | None") -> PageKey | None:
    """Return the key of the page before a call's pages, where the engine tells it."""
    return bytes.fromhex(extra.prefix_keys[-1]) if extra is not None and extra.prefix_keys else None

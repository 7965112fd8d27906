"""Tables of a cache that must be empty when nothing is under way: whatever is left there is remembered for ever."""

from collections.abc import Sequence

from unified_cache.cache.cache import UnifiedCache
from unified_cache.tree import Lock


def check_tables(cache: UnifiedCache, locks: Sequence[Lock], failed_removals: int = 0) -> None:
    """See that a cache at rest remembers no transfer, and no lock but these; those from before a reset do not count.

    A put that could not be taken back, since a removal failed, is remembered until the store is cleared again.
    """
    controller, prefetches = cache._controller, cache._prefetches
    left = {
        "operations": controller._live,
        "ended jobs": controller._ended,
        "loads": cache._loads._under_way,
        "fetched pages": [pages for pages in prefetches._fetched if pages],
        "fetches": prefetches._under_way,
        "transfers": cache._ledger.transfers,
    }
    if cache._storage is not None:
        epoch = cache._storage.epoch
        assert len(epoch._superseded) <= failed_removals, "superseded puts are left where nothing is under way"
        left |= {"puts": epoch._puts, "clears": range(epoch._clears_count)}
    for name, table in left.items():
        assert not table, f"{name} are left where nothing is under way"
    budget_pages = int(cache.config.host_pages[0] * cache.config.prefetching.host_share)
    assert prefetches.host_pages_left == budget_pages, "the prefetch budget leaks"
    held = {lock for lock in locks if not lock.is_void}
    assert cache._locks >= held
    assert {lock for lock in cache._locks if not lock.released and not lock.is_void} == held, "a lock is left"

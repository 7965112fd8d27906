"""The slots of an engine in all tiers of a cache: ``EngineSlotTree`` over ``UnifiedCache``, with its controller.

A cache allocates device slots, and so does the engine. Here the engine has them: all that the cache could hand out are
handed out at the start, and what it frees it hands out again at once, to be returned to the engine's allocator:

    engine's allocator --insert--> tree --evict, or a duplicate of insert--> engine's allocator
                       --load----> tree, with what the host had

No torch and nothing of the engine in here.
"""

import numpy as np

from unified_cache.cache import UnifiedCache
from unified_cache.errors import InputError, StaleMatchError, StateError
from unified_cache.integrations.sglang.tree_slots import SlotsTaken, TreePrefix
from unified_cache.page import Prompt
from unified_cache.pool import Slots
from unified_cache.tree import Lock

__all__ = ["TieredSlotTree"]

_NO_SLOTS: Slots = np.empty(0, np.int32)


class TieredSlotTree:
    """Prefixes of all namespaces in full attention, on device and host. The thread that opened the cache calls it."""

    __slots__ = ("_cache", "_capacity", "page_size")

    def __init__(self, cache: UnifiedCache) -> None:
        """Take over an unused cache of one component; ``close`` closes it.

        Raises:
            StateError: some of its slots are in use.
        """
        self.page_size = cache.layout.page_size
        self._capacity = cache.config.device_pages[0]
        self._cache = cache
        if len(self._hand_out(self._capacity)) != self._capacity:
            raise StateError(f"expected a cache with {self._capacity} free device pages")

    # ---- asking ------------------------------------------------------------------------------------------------

    def match(self, prompt: Prompt) -> TreePrefix:
        """Find the longest prefix on the device, and on device and host; make it recent."""
        found = self._cache.match(prompt)
        return TreePrefix(prompt, found.device_end, found.host_end)

    def slots(self, prefix: TreePrefix) -> Slots:
        """Return the device slots of a prefix, one a page.

        Raises:
            StaleMatchError: some of it was evicted.
        """
        lock = self.lock(prefix)
        slots = self._cache.slots(lock)
        self._cache.release(lock)
        return slots

    # ---- changing ----------------------------------------------------------------------------------------------

    def insert(self, prompt: Prompt, start: int, slots: Slots) -> SlotsTaken:
        """Hand over pages [start, pages_count) of ``prompt``, which becomes recent; ``slots`` has one for each.

        They are backed up as the cache's write policy says.

        Raises:
            InputError: the device does not hold the pages before ``start``, or the lengths do not fit.
            SlotError: a slot that the tree has already, or that is none.
        """
        if not prompt.pages_count:
            return SlotsTaken(0, _NO_SLOTS)
        matched_end = self._cache.match(prompt).device_end
        if matched_end < start:
            raise InputError(f"pages before {start} are not held on the device; nothing was inserted")
        lock = self._cache.lock(self._cache.match(prompt.head(start)))
        try:
            lock = self._cache.insert(prompt, [slots], lock)
            held = self._cache.slots(lock)[start:]
        finally:
            self._cache.release(lock)
        duplicates = slots[held != slots]
        self._hand_out(len(duplicates))
        return SlotsTaken(matched_end, duplicates)

    def lock(self, prefix: TreePrefix) -> Lock:
        """Pin the device part of a prefix against eviction until ``unlock``.

        Raises:
            StaleMatchError: some of it was evicted.
        """
        lock = self._cache.lock(self._cache.match(prefix.prompt.head(prefix.end)))
        if lock.end < prefix.end:
            self._cache.release(lock)
            raise StaleMatchError(f"{prefix.end} pages were matched, and some have been evicted since")
        return lock

    def unlock(self, lock: Lock) -> None:
        """Take a lock back, once. One from before ``clear`` is void.

        Raises:
            LockError: released already.
        """
        self._cache.release(lock)

    def evict(self, pages: int) -> list[Slots]:
        """Give back ``pages`` slots, least recent first, from the end of their prompts; fewer if locks pin the rest."""
        count = min(pages, self.evictable_pages)
        return [self._hand_out(count)] if count > 0 else []

    def clear(self) -> None:
        """Forget everything in memory, pinned or not. The slots are the engine's, which clears its allocator itself.

        Raises:
            WaitTimeoutError: as ``UnifiedCache.reset``.
        """
        self._cache.reset()
        self._hand_out(self._capacity - self._out_pages())

    # ---- moving ------------------------------------------------------------------------------------------------

    def load(self, prefix: TreePrefix, slots: Slots, timeout_s: float) -> tuple[TreePrefix, Slots]:
        """Bring what the host holds of a prefix to the device, into ``slots`` of the engine's; wait until it is there.

        Returns what of it is on the device then, and the slots that were not needed.

        Raises:
            SlotError: a slot that the tree has already.
            WaitTimeoutError: it takes longer; it goes on, and its slots are the tree's or the engine's after ``poll``.
        """
        wanted = prefix.prompt.head(prefix.host_end)
        self._cache.free([slots])
        if self._cache.load(wanted) is not None:
            self._cache.wait_all(timeout_s)
        found = self._cache.match(wanted)
        return TreePrefix(prefix.prompt, found.device_end, found.host_end), self._hand_out(self._free_pages())

    def poll(self) -> None:
        """Let backups go on."""
        self._cache.poll()

    def close(self) -> list[str]:
        """Close the cache; return the names of workers that hang."""
        return self._cache.close()

    # ---- counting ----------------------------------------------------------------------------------------------

    @property
    def held_pages(self) -> int:
        """Pages on the device."""
        return self._capacity - self._out_pages()

    @property
    def protected_pages(self) -> int:
        """Pages on the device that locks and transfers keep from eviction."""
        return self._cache.stats().occupancy[0].protected

    @property
    def evictable_pages(self) -> int:
        """Pages on the device that ``evict`` could give back now."""
        return self._cache.available()

    def check(self) -> None:
        """Assert every invariant from scratch. For tests and for an engine at rest; slow."""
        self._cache.check()
        assert not self._free_pages(), "the cache kept slots that are the engine's"

    def _free_pages(self) -> int:
        return self._cache.stats().occupancy[0].free

    def _out_pages(self) -> int:
        return self._cache.stats().occupancy[0].out

    def _hand_out(self, count: int) -> Slots:
        """Return ``count`` slots that the cache holds, those that are free first."""
        slots = self._cache.allocate([np.ones(count, np.bool_)])
        return _NO_SLOTS if slots is None else slots[0]

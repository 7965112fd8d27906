"""Owner of each slot of the memory tiers: the free list, the tree, or the request or transfer it was handed to.

The tree decides what is evicted and the allocators count; the ledger keeps them in step. Nothing else frees or
allocates a slot.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import numpy.typing as npt

from unified_cache.controller.memory import PageMemory
from unified_cache.controller.page_changes import PageChanges
from unified_cache.core.config import EvictionConfig
from unified_cache.core.errors import ConfigError, InputError, SlotError
from unified_cache.core.page import Prompt
from unified_cache.core.pool import Hits, ModelLayout, PageCopies, Pages, Slots, Tier, no_slots, numbers_of
from unified_cache.core.slots import PairedAllocator, SlotAllocator, StoredSlots
from unified_cache.core.window import last_end, restorable_ends, window
from unified_cache.storage_backends.protocol import Store
from unified_cache.tree import UNNAMED, Freed, Inserted, Lock, Match, RadixTree
from unified_cache.tree.check import check, peers
from unified_cache.tree.transfer import Transfer, Victim

FROM_HOST, FROM_STORAGE = 1, 2
"""Marks of slots whose pages were brought from there for a request that has not used them yet."""


class Ledger:
    """Tree and allocators of one cache. Every slot is free, in the tree, or *out*: with a request or an operation."""

    __slots__ = (
        "_allocators",
        "_brought",
        "_evicted_pages",
        "_has_brought",
        "changes",
        "evict_to_host",
        "layout",
        "paired",
        "stored",
        "stored_device",
        "transfers",
        "tree",
    )

    def __init__(
        self,
        layout: ModelLayout,
        capacity: Sequence[Sequence[int]],
        eviction: EvictionConfig = EvictionConfig(),
    ) -> None:
        """Take ``capacity[tier][component]`` pages.

        Raises:
            ConfigError: not one capacity per component.
        """
        for pages in capacity:
            if len(pages) != len(layout.components):
                raise ConfigError(f"expected pages for {len(layout.components)} components, found {len(pages)}")
        self.layout = layout
        self.tree = RadixTree(layout.components, layout.page_size, eviction)
        self._allocators = [[SlotAllocator(pages) for pages in tier] for tier in capacity]
        self._brought = [[np.zeros(pages + 1, np.int8) for pages in tier] for tier in capacity]
        """By tier, component and slot: ``FROM_HOST``, ``FROM_STORAGE``, or 0."""
        self._has_brought = False
        """Whether any slot was ever marked."""
        self.stored = StoredSlots(capacity[Tier.HOST])
        self.stored_device = StoredSlots(capacity[Tier.DEVICE])
        """Device slots whose page went to storage without staying on the host, or came from there so."""
        self.changes = PageChanges(self.tree, self.stored)
        self.transfers: set[Transfer] = set()
        """Transfers under way, for ``check``."""
        self.evict_to_host: Callable[[Prompt], None] | None = None
        """Copies what the device evicts of a prompt and the host lacks to the host; None where that is dropped."""
        self._evicted_pages = [[0 for _ in tier] for tier in capacity]
        device = self._allocators[Tier.DEVICE]
        self.paired = None if layout.mapped is None else PairedAllocator(device[0], device[layout.mapped])
        """Full's device slots and those reached through them, with the map; None for a layout without."""

    def capacity(self, tier: Tier, component: int) -> int:
        """Return the pages a component can hold on a tier."""
        return self._allocators[tier][component].capacity

    def free_count(self, tier: Tier, component: int) -> int:
        """Return the pages neither in the tree nor out."""
        return self._allocators[tier][component].free_count

    def still_out(self, tier: Tier, slots: Sequence[Slots]) -> list[Slots]:
        """Return by component those of these slots that are neither in the tree nor free."""
        return list(map(SlotAllocator.out_among, self._allocators[tier], slots))

    def out_pages(self, tier: Tier, component: int) -> int:
        """Return the pages with requests and operations. At rest it is zero, or pages have leaked."""
        return self._allocators[tier][component].out_count

    def evictable_pages(self, tier: Tier, component: int) -> int:
        """Return the pages in the tree that eviction could give back now."""
        return self._allocators[tier][component].kept_count - self.tree.protected_pages(tier, component)

    def protected_pages(self, tier: Tier, component: int) -> int:
        """Return the pages in the tree that locks keep from eviction."""
        return self.tree.protected_pages(tier, component)

    def available_pages(self, tier: Tier, component: int) -> int:
        """Return the pages that can be allocated now: free and evictable ones."""
        allocator = self._allocators[tier][component]
        protected = self.tree.counts.protected(tier * len(self.layout.components) + component)
        return allocator.free_count + allocator.kept_count - protected

    def has_spare_windows(self) -> bool:
        """Return whether the host has a free window of every component, so that superseded ones displace nothing."""
        windowed = enumerate(self.layout.components[1:], 1)
        return all(self.free_count(Tier.HOST, number) >= component.span for number, component in windowed)

    def evicted_pages(self, tier: Tier, component: int) -> int:
        """Return the pages that were evicted to make room, so far."""
        return self._evicted_pages[tier][component]

    def allocate(self, tier: Tier, component: int, count: int) -> Slots | None:
        """Hand out slots, evicting what is short; None, with nothing handed out, if pins leave too little."""
        slots = self.allocate_all(tier, [(component, count)])
        return None if slots is None else slots[0]

    def allocate_all(self, tier: Tier, counts: Sequence[tuple[int, int]]) -> list[Slots] | None:
        """Hand out slots for all of these (component, count), or, if pins leave too little, for none and None.

        Where the device saves what it evicts, that waits for a copy. Nothing is evicted where one of them cannot have
        enough. All are made room for before any is handed out: what is evicted follows from the tree and the counts
        alone, so that equal trees stay equal even where an allocator declines on one rank of several.
        """
        for component, count in counts:
            if count > self.available_pages(tier, component):
                return None
        if tier is Tier.DEVICE and self.evict_to_host is not None:
            for component, count in counts:
                self._make_room_writing_back(self.evict_to_host, component, count)
        allocators = self._allocators[tier]
        for component, count in counts:
            short = count - allocators[component].free_count
            if short > 0:
                self._take_evicted(self.tree.evict(tier, component, short))
        allocated: list[Slots] = []
        for component, count in counts:
            slots = allocators[component].allocate(count)
            if slots is None:
                for (other, _), taken in zip(counts, allocated, strict=False):
                    self.free(tier, other, taken)
                return None
            allocated.append(slots)
            self._brought[tier][component][slots] = 0
            (self.stored if tier is Tier.HOST else self.stored_device).forget(component, slots)
        return allocated

    def allocate_pages(self, masks: Sequence[Pages]) -> list[Slots] | None:
        """Hand out device slots by component and page, see ``UnifiedCache.allocate``; mapped slots are mapped."""
        self.layout.check_masks(masks)
        counts = [int(np.count_nonzero(pages)) for pages in masks]
        allocated = self.allocate_all(Tier.DEVICE, list(enumerate(counts)))
        if allocated is None:
            return None
        pages: list[Slots] = []
        for slots, mask in zip(allocated, masks, strict=True):
            page_slots = no_slots(len(mask))
            page_slots[mask] = slots
            pages.append(page_slots)
        if self.paired is not None and self.layout.mapped is not None:
            with_peer = masks[self.layout.mapped]
            self.paired.map.bind(pages[0][with_peer], pages[self.layout.mapped][with_peer])
        return pages

    def _make_room_writing_back(self, evict_to_host: Callable[[Prompt], None], component: int, count: int) -> None:
        """Evict what is short of ``count`` free device slots, after the host has what it lacks of it."""
        allocator = self._allocators[Tier.DEVICE][component]
        saved: set[Victim] = set()
        while (short := count - allocator.free_count) > 0:
            victim = Victim.next(self.tree, Tier.DEVICE, component)
            if victim is None:
                return
            if victim in saved or not victim.would_lose(short, with_superseded=self.has_spare_windows()):
                self._take_evicted(victim.evict(short))
            else:
                evict_to_host(victim.prompt())
                saved.add(victim)

    def _take_evicted(self, freed: Freed) -> None:
        if self.changes.is_watched:
            self.changes.record_freed(freed)
        for tier_component, count in self._take_back(freed):
            tier, component = divmod(tier_component, len(self.layout.components))
            self._evicted_pages[tier][component] += count

    def fork(self, lock: Lock, memory: PageMemory) -> list[Slots] | None:
        """Copy what a device lock pins of components that are neither Full nor mapped; see ``UnifiedCache.fork``."""
        sources = [lock.slots(number) for number in range(len(self.layout.components))]
        for number, component in enumerate(self.layout.components):
            if number == 0 or component.mapped:
                sources[number] = sources[number][:0]
            elif not lock.pins(number):
                raise InputError(f"{component.name}: the lock has released its windows; fork before that")
            elif (sources[number] < 0).any():
                raise InputError(f"{component.name}: no state is held after {lock.end} pages")
        copies: list[Slots] = []
        with ExitStack() as undo:
            for number, component in enumerate(self.layout.components):
                slots = self.allocate(Tier.DEVICE, number, len(sources[number]))
                if slots is None:
                    return None
                undo.callback(self.free, Tier.DEVICE, number, slots)
                for pool in component.pools:
                    memory.duplicate(pool, sources[number], slots)
                copies.append(slots)
            undo.pop_all()
        return copies

    def free(self, tier: Tier, component: int, slots: Slots) -> None:
        """Take slots back that were handed out and not inserted; a SlotError frees nothing."""
        if self.paired is not None and tier is Tier.DEVICE and component == 0:
            self.paired.free_full(slots)
        else:
            self._allocators[tier][component].free(slots)

    def free_pages(self, pages: Sequence[Slots]) -> None:
        """Take device slots back by component, see ``UnifiedCache.free``; -1 entries are skipped."""
        self.layout.check_slots(pages)
        taken = self._check_out(pages, Tier.DEVICE)
        self._check_pairs(pages, Tier.DEVICE)
        if self.paired is not None:
            self.paired.map.unbind(taken[0])
        for component, slots in enumerate(taken):
            self.free(Tier.DEVICE, component, slots)

    def trim_pages(self, pages: Sequence[Slots], masks: Sequence[Pages]) -> None:
        """Free the device slots of pages whose mask is False, see ``UnifiedCache.trim``."""
        self.layout.check_masks(masks)
        self.layout.check_slots(pages)
        if [len(slots) for slots in pages] != [len(mask) for mask in masks]:
            raise InputError(f"expected slots for {len(masks[0])} pages of every component")
        gone = [(slots >= 0) & ~keep for slots, keep in zip(pages[1:], masks[1:], strict=True)]
        device = self._allocators[Tier.DEVICE]
        for component, mask in enumerate(gone, 1):
            device[component].check_out(pages[component][mask])
        for component, mask in enumerate(gone, 1):
            if self.paired is not None and component == self.layout.mapped:
                self.paired.map.unbind(pages[0][mask])
            device[component].free(pages[component][mask])
            pages[component][mask] = -1

    def insert(
        self,
        prompt: Prompt,
        start: int,
        slots: Sequence[Slots],
        tier: Tier,
        priority: int = UNNAMED,
    ) -> Inserted:
        """Hand pages [start, pages_count) to the tree; duplicates are freed. Errors as ``RadixTree.insert``."""
        self.layout.check_slots(slots)
        given = self._check_out(slots, tier)
        self._check_pairs(slots, tier)
        inserted = self.tree.insert(prompt, start, slots, tier, priority)
        self._take_in(inserted, given, prompt, start, slots, tier)
        return inserted

    def graft(self, prompt: Prompt, start: int, slots: Sequence[Slots], tier: Tier) -> None:
        """Hand pages to the tree whose slots were reserved: mapped ones are reached through the tree's Full slots."""
        given = self._check_out(slots, tier)
        self._has_brought = True
        for brought, come in zip(self._brought[tier], given, strict=True):
            brought[come] = FROM_STORAGE
        self._take_in(self.tree.insert(prompt, start, slots, tier, UNNAMED), given, prompt, start, slots, tier)

    def _take_in(
        self,
        inserted: Inserted,
        given: Sequence[Slots],
        prompt: Prompt,
        start: int,
        slots: Sequence[Slots],
        tier: Tier,
    ) -> None:
        """Follow an insert: the tree keeps the slots given, and duplicates are freed."""
        if self.paired is not None:
            self.paired.map.apply(inserted.map_changes)
        for allocator, kept, duplicates in zip(self._allocators[tier], given, inserted.duplicates, strict=True):
            allocator.keep(kept)
            if len(duplicates):
                allocator.drop(duplicates)
        if self.changes.is_watched:
            self.changes.record_inserted(tier, prompt, start, slots, inserted.duplicates)

    def fitting_end(self, found: Match, source: Tier, target: Tier) -> int:
        """Return the longest end that a match can be resumed at from ``source`` and ``target`` has room for; or 0."""
        available = [self.available_pages(target, component) for component in range(len(self.layout.components))]
        return found.fitting_end(source, target, available)

    @contextmanager
    def moving(
        self, found: Match, end: int, source: Tier, target: Tier, *, at_once: bool = False
    ) -> Iterator[Transfer | None]:
        """Pin and allocate, in a ``with`` block, what makes ``end`` restorable on ``target``; None without room.

        A copy that cannot wait for others is made ``at_once``: what another transfer is bringing there is copied too,
        since only what stands on a prefix can be published.
        """
        transfer = Transfer.begin(self.tree, found, end, source, target, at_once=at_once)
        self.transfers.add(transfer)
        try:
            targets = self.allocate_all(target, [(wanted.component, len(wanted.pages)) for wanted in transfer.wanted])
            if targets is not None:
                transfer.expect(targets)
            yield None if targets is None else transfer
        finally:
            self.transfers.discard(transfer)
            for component, slots in enumerate(transfer.release()):
                if len(slots):
                    self.free(target, component, slots)

    def publish(self, transfer: Transfer) -> tuple[PageCopies, ...]:
        """Publish what a transfer brought, and free the rest; return what the tree took, which stays pinned there."""
        published = transfer.publish()
        if self.paired is not None:
            self.paired.map.apply(published.map_changes)
        tier = transfer.target.tier
        for component, slots in enumerate(published.leftovers):
            if len(slots):
                self.free(tier, component, slots)
        for part in published.taken:
            self._allocators[tier][part.component].keep(part.target)
            if tier is Tier.DEVICE:
                self._has_brought = True
                on_host = self._brought[Tier.HOST][part.component]
                self._brought[tier][part.component][part.target] = np.maximum(on_host[part.source], FROM_HOST)
                on_host[part.source] = 0
        if self.changes.is_watched:
            self.changes.record_published(tier, transfer.prompt, published.taken)
        return published.taken

    @contextmanager
    def pinned(self, found: Match, end: int, tier: Tier) -> Iterator[Lock]:
        """Keep ``end`` pages of a match on ``tier`` for the length of a ``with`` block."""
        lock = self.tree.lock(found, end, tier)
        try:
            yield lock
        finally:
            self.tree.unlock(lock)

    @contextmanager
    def reserving(self, tier: Tier, counts: Sequence[int]) -> "Iterator[Reservation | None]":
        """Hand out ``counts[c]`` slots for pages not in the tree yet, all or None; take back what is left."""
        reserved = self.allocate_all(tier, list(enumerate(counts)))
        try:
            yield None if reserved is None else Reservation(self, tier, reserved)
        finally:
            for component, slots in enumerate(reserved or ()):
                if len(slots):
                    self.free(tier, component, slots)

    def locked(self, lock: Lock) -> list[PageCopies]:
        """Return by component the pages that a lock pins and its tier holds, with their slots there."""
        parts: list[PageCopies] = []
        for component, start in enumerate(self.windows(lock.end)):
            slots = lock.slots(component)
            pages = numbers_of(slots >= 0)
            parts.append(PageCopies(component, pages + start, slots[pages], slots[pages]))
        return parts

    def take_hits(self, found: Match) -> Hits:
        """Return the pages that a request takes of a match on the device, by the tier that they came from for it.

        They count for the slowest tier without which it could not resume there; for the next request, as the device's.
        """
        end, spans = found.device_end, found.spans
        if not self._has_brought:
            return Hits(device=end)
        slots: list[Slots] = []
        brought: list[npt.NDArray[np.int8]] = []
        for number, marks in enumerate(self._brought[Tier.DEVICE]):
            held = np.maximum(found.slots(Tier.DEVICE, number, 0, end), 0)
            slots.append(held)
            brought.append(marks[held])
        if not any(map(np.any, brought)):
            return Hits(device=end)
        ends = [0, 0]
        for number, nearest in enumerate((FROM_HOST, FROM_STORAGE)):
            lacking = [(held == 0) | (marks >= nearest) for held, marks in zip(slots, brought, strict=True)]
            ends[number] = last_end(restorable_ends(spans, lacking, end))
        for marks, held, start in zip(self._brought[Tier.DEVICE], slots, self.windows(end), strict=True):
            marks[held[start:]] = 0
        return Hits.of_ends(ends[0], ends[1], end)

    def windows(self, end: int) -> list[int]:
        """Return by component the first page needed to resume at ``end``."""
        return [window(end, component.span) for component in self.layout.components]

    def follow_storage(self, storage: Store | None) -> None:
        """Record that another store, or none, lies below the host; see ``PageChanges.follow_storage``."""
        self.changes.follow_storage(storage)
        self.forget_stored()

    def forget_stored(self) -> None:
        """Record that storage may have none of the pages that the host holds."""
        self.stored.forget_all()
        self.stored_device.forget_all()
        if self.changes.is_watched:
            self.changes.record_storage_cleared()

    def clear(self) -> None:
        """Forget every page of the tree; slots that are out stay with whom they are."""
        self._take_back(self.tree.clear())
        if self.changes.is_watched:
            self.changes.record_memory_cleared()

    def check(self, locks: Sequence[Lock] | None = None) -> None:
        """Assert that the tree is sound, that ``locks`` alone are out, and that every slot is in exactly one place."""
        held = check(self.tree, locks, self.transfers)
        components = len(self.layout.components)
        for tier in Tier:
            for component, allocator in enumerate(self._allocators[tier]):
                slots = held[int(tier) * components + component]
                assert allocator.is_kept(slots), "the tree holds a slot that is not its own"
                assert len(slots) == allocator.kept_count, "the tree lost a slot"

        if self.paired is not None and self.layout.mapped is not None:
            full, mapped_to = peers(self.tree, self.layout.mapped)
            assert (self.paired.map.peers(full) == mapped_to).all(), "the map differs from the tree"
            mapped = np.flatnonzero(self.paired.map.table[:-1]).astype(np.int32)
            mapped_to = self.paired.map.peers(mapped)
            assert len(np.unique(mapped_to)) == len(mapped), "two Full slots share a peer"
            ours = np.isin(mapped, full)
            assert self.paired.full.is_out(mapped[~ours]), "a free Full slot is mapped"
            assert self.paired.peer.is_out(mapped_to[~ours]), "a Full slot is mapped to a slot that is not out"

    def lock_slots(self, lock: Lock, component: int) -> Slots:
        """Return a component's slots of the pages that a lock pins, see ``UnifiedCache.slots``."""
        self.tree.check_lock(lock)
        self.layout.check_component(component)
        return lock.slots(component)

    def _check_out(self, slots: Sequence[Slots], tier: Tier) -> list[Slots]:
        """Refuse slots that are not out; return them without -1."""
        taken: list[Slots] = []
        for component, allocator, given in zip(self.layout.components, self._allocators[tier], slots, strict=True):
            held = given[given >= 0]
            taken.append(held)
            try:
                allocator.check_out(held)
            except SlotError as error:
                raise SlotError(f"{component.name}: {error}") from error
        return taken

    def _check_pairs(self, slots: Sequence[Slots], tier: Tier) -> None:
        """Refuse mapped slots that belong to the Full slots of other pages."""
        if self.paired is not None and self.layout.mapped is not None and tier is Tier.DEVICE:
            peers, mapped = self.paired.map.peers(slots[0]), slots[self.layout.mapped]
            if len(peers) == len(mapped) and not np.array_equal(peers, np.maximum(mapped, 0)):
                name = self.layout.components[self.layout.mapped].name
                raise SlotError(f"{name}: slots that are not reached through the Full slots of the same pages")

    def _take_back(self, freed: Freed) -> list[tuple[int, int]]:
        """Free the slots that the tree released; return (tier_component, pages) of each that has any."""
        counts: list[tuple[int, int]] = []
        if self.paired is not None and freed.unmapped:
            self.paired.map.unbind(np.concatenate(freed.unmapped))
        components = len(self.layout.components)
        for tier_component, arrays in enumerate(freed.slots):
            if arrays:
                # In order, so that later copies join: the next to be allocated are taken from these.
                slots = arrays[0]
                if len(arrays) > 1:
                    slots = np.concatenate(arrays)
                    slots.sort()
                self._allocators[tier_component // components][tier_component % components].drop(slots)
                counts.append((tier_component, len(slots)))
        return counts


class Reservation:
    """Slots of one tier waiting for pages that the tree does not know yet."""

    __slots__ = ("_ledger", "slots", "tier")

    def __init__(self, ledger: Ledger, tier: Tier, slots: list[Slots]) -> None:
        self._ledger = ledger
        self.tier = tier
        self.slots = slots
        """Slots handed out, by component; what is left in the list is given back."""

    def insert(self, prompt: Prompt, start: int, slots: Sequence[Slots]) -> None:
        """Hand some of the slots to the tree, as pages [start, pages_count); the others are freed in the end."""
        self._ledger.graft(prompt, start, slots, self.tier)
        self.slots[:] = self._ledger.still_out(self.tier, self.slots)

    def keep(self, slots: Sequence[Slots]) -> None:
        """Free all but these slots, given by component."""
        for component, kept in enumerate(slots):
            self._ledger.free(self.tier, component, np.setdiff1d(self.slots[component], kept))
        self.slots[:] = slots

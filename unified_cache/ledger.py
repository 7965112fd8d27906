"""Who owns each slot of the memory tiers: the free list, the tree, or somebody it was handed to.

The tree decides and the allocators count; this is where they meet. Nothing else frees or allocates a slot.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from unified_cache.errors import ConfigError, SlotError
from unified_cache.page import Prompt
from unified_cache.pool import ModelLayout, Part, Slots, Tier
from unified_cache.slots import SlotAllocator
from unified_cache.tree import Freed, Inserted, Lock, Match, RadixTree, Transfer
from unified_cache.window import window

__all__ = ["Ledger", "Moving", "Staging"]


class Ledger:
    """Tree and allocators of one cache. Every slot is free, in the tree, or *out*: with a request or an operation."""

    __slots__ = ("_allocators", "_out", "layout", "tree")

    def __init__(self, layout: ModelLayout, capacity: Sequence[Sequence[int]]) -> None:
        """Take ``capacity[tier][component]`` pages.

        Raises:
            ConfigError: not one capacity per component.
        """
        for pages in capacity:
            if len(pages) != len(layout.components):
                raise ConfigError(f"expected pages for {len(layout.components)} components, found {len(pages)}")
        self.layout = layout
        self.tree = RadixTree(layout.components, layout.page_size)
        self._allocators = [[SlotAllocator(pages) for pages in tier] for tier in capacity]
        self._out = [[0 for _ in tier] for tier in capacity]

    def capacity(self, tier: Tier, component: int) -> int:
        """Return the pages a component can hold on a tier."""
        return self._allocators[tier][component].capacity

    def free_pages(self, tier: Tier, component: int) -> int:
        """Return the pages neither in the tree nor out."""
        return self._allocators[tier][component].free_count

    def out_pages(self, tier: Tier, component: int) -> int:
        """Return the pages with requests and operations. At rest it is zero, or pages have leaked."""
        return self._out[tier][component]

    def allocate(self, tier: Tier, component: int, count: int) -> Slots | None:
        """Hand out slots, evicting what is short; None, with nothing handed out, if pins leave too little."""
        allocator = self._allocators[tier][component]
        short = count - allocator.free_count
        if short > 0:
            self._take_back(self.tree.evict(tier, component, short))
        slots = allocator.allocate(count)
        if slots is not None:
            self._out[tier][component] += count
        return slots

    def free(self, tier: Tier, component: int, slots: Slots) -> None:
        """Take slots back that were handed out and not inserted.

        Raises:
            SlotError: a slot is not handed out. Nothing was freed.
        """
        self._allocators[tier][component].free(slots)
        self._out[tier][component] -= len(slots)

    def insert(self, prompt: Prompt, start: int, slots: Sequence[Slots], tier: Tier) -> Inserted:
        """Hand pages [start, pages_count) to the tree; duplicates are freed.

        Raises:
            SlotError, InputError: as ``RadixTree.insert``; also slots that were never handed out.
        """
        for component, given in enumerate(slots):
            held = given[given >= 0]
            if not self._allocators[tier][component].owns(held):
                raise SlotError(f"{self.layout.components[component].name}: slots that were not handed out")
        inserted = self.tree.insert(prompt, start, slots, tier)
        for component, given in enumerate(slots):
            duplicates = inserted.duplicates[component]
            self._allocators[tier][component].free(duplicates)
            self._out[tier][component] -= int(np.count_nonzero(given >= 0))
        return inserted

    @contextmanager
    def moving(self, found: Match, end: int, source: Tier, target: Tier) -> "Iterator[Moving | None]":
        """Pin and allocate what it takes to make ``end`` restorable on ``target``; give it all back at the end.

        Yields None if ``target`` has no room.
        """
        transfer = self.tree.begin(found, end, source, target)
        targets: list[Slots] = []
        try:
            for wanted in transfer.wanted:
                slots = self.allocate(target, wanted.component, len(wanted.pages))
                if slots is None:
                    break
                targets.append(slots)
            if len(targets) < len(transfer.wanted):
                for wanted, slots in zip(transfer.wanted, targets, strict=False):
                    self.free(target, wanted.component, slots)
                yield None
            else:
                self.tree.expect(transfer, targets)
                yield Moving(self, transfer)
        finally:
            for component, slots in enumerate(self.tree.release(transfer)):
                self.free(target, component, slots)

    def publish(self, transfer: Transfer) -> tuple[Part, ...]:
        """Publish what a transfer brought; return what the tree took, and free the rest."""
        published = self.tree.publish(transfer)
        tier = transfer.target.tier
        for component, slots in enumerate(published.leftovers):
            self.free(tier, component, slots)
        for part in published.taken:
            self._out[tier][part.component] -= len(part)
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
    def staging(self, tier: Tier, counts: Sequence[int]) -> "Iterator[Staging | None]":
        """Hand out ``counts[c]`` slots of each component for pages not in the tree yet; take back what is left.

        Yields None, with nothing handed out, if pins leave too little room.
        """
        staged: list[Slots] = []
        try:
            for component, count in enumerate(counts):
                slots = self.allocate(tier, component, count)
                if slots is None:
                    break
                staged.append(slots)
            yield Staging(self, tier, staged) if len(staged) == len(counts) else None
        finally:
            for component, slots in enumerate(staged):
                self.free(tier, component, slots)

    def windows(self, end: int) -> list[int]:
        """Return by component the first page needed to resume at ``end``."""
        return [window(end, component.span) for component in self.layout.components]

    def clear(self) -> None:
        """Forget every page of the tree; slots that are out stay with whom they are."""
        self._take_back(self.tree.clear())

    def check(self, locks: Sequence[Lock] | None = None) -> None:
        """Assert that the tree is sound and that every slot is in exactly one place."""
        held = self.tree.check(locks)
        components = len(self.layout.components)
        for tier in Tier:
            for component, allocator in enumerate(self._allocators[tier]):
                slots = held[int(tier) * components + component]
                assert allocator.owns(slots), "the tree holds a free slot"
                out = self._out[tier][component]
                assert out >= 0, "more slots came back than were handed out"
                assert allocator.taken_count == len(slots) + out, "a slot is in no place, or in two"

    def _take_back(self, freed: Freed) -> None:
        components = len(self.layout.components)
        for lane, arrays in enumerate(freed):
            for slots in arrays:
                self._allocators[lane // components][lane % components].free(slots)


class Moving:
    """A transfer under way between device and host."""

    __slots__ = ("_ledger", "_transfer", "parts")

    def __init__(self, ledger: Ledger, transfer: Transfer) -> None:
        self._ledger = ledger
        self._transfer = transfer
        self.parts = transfer.parts
        """What has to be copied."""

    def publish(self) -> tuple[Part, ...]:
        """Publish the pages, which have arrived; return those the tree took. They stay pinned on the target."""
        return self._ledger.publish(self._transfer)

    def held(self) -> list[Part]:
        """Return by component the pages that are pinned and held on the target now, with their slots there."""
        lock = self._transfer.target
        parts: list[Part] = []
        for component, start in enumerate(self._ledger.windows(lock.end)):
            slots = self._ledger.tree.lock_slots(lock, component)
            pages = np.flatnonzero(slots >= 0)
            parts.append(Part(component, pages + start, slots[pages], slots[pages]))
        return parts


class Staging:
    """Slots waiting for pages that the tree does not know yet."""

    __slots__ = ("_ledger", "_staged", "_tier")

    def __init__(self, ledger: Ledger, tier: Tier, staged: list[Slots]) -> None:
        self._ledger = ledger
        self._tier = tier
        self._staged = staged

    @property
    def slots(self) -> Sequence[Slots]:
        """By component: the slots handed out."""
        return self._staged

    def insert(self, prompt: Prompt, start: int, slots: Sequence[Slots]) -> None:
        """Hand some of the slots to the tree, as pages [start, pages_count); the others go back in the end."""
        self._ledger.insert(prompt, start, slots, self._tier)
        for component, given in enumerate(slots):
            self._staged[component] = np.setdiff1d(self._staged[component], given[given >= 0])

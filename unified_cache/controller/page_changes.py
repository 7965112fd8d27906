"""Log of pages that enter and leave the tiers of a cache, which an observer polls, such as a publisher of KV events.

There are no callbacks. While an observer is registered, each change of a tier is recorded here, and it takes them
later, on the owner's thread, between two calls to the cache:

    insert, load, backup, prefetch     PagesHeld     prompt, which of its pages, their slots on the tier
    eviction                           SlotsLeft     slots of the tier; the observer knows their pages
    a put, a prefetch                  PagesStored   prompt, which of its pages storage has
    eviction by a store                ObjectsEvicted: asked for at each ``take``, of stores that report it
    reset; clear_storage, detach       MemoryCleared, StorageCleared

The log is bounded by pages. When it is full, all of it is dropped and the next ``take`` returns None: the observer
starts again from ``held_runs``, the pages that memory holds now.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.core.errors import ConfigError, OwnerThreadError, StateError
from unified_cache.core.page import PageKey, Prompt
from unified_cache.core.pool import PageCopies, PageNumbers, Slots, Tier
from unified_cache.core.seal import Label
from unified_cache.core.slots import StoredSlots
from unified_cache.storage_backends.protocol import Store
from unified_cache.storage_backends.removals import RemovalFeed
from unified_cache.tree import Freed, RadixTree
from unified_cache.tree.transfer import HeldRun, held_runs

EVICTED_MAX = 1 << 18
"""Objects remembered that the store has evicted; with more, nothing is said of storage in ``held_runs``."""


@dataclass(frozen=True, slots=True)
class PagesHeld:
    """Pages of a prompt that one component holds on a tier from now on."""

    tier: Tier
    component: int
    prompt: Prompt
    pages: PageNumbers
    """Numbers of the pages, ascending."""
    slots: Slots
    """Their slots on the tier."""


@dataclass(frozen=True, slots=True)
class SlotsLeft:
    """Slots of one component on a tier whose pages the tree holds no longer."""

    tier: Tier
    component: int
    slots: Slots


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Pages of a prompt that storage has of one component, every pool of it."""

    component: int
    prompt: Prompt
    pages: PageNumbers


@dataclass(frozen=True, slots=True)
class ObjectsEvicted:
    """Objects that the store reports as evicted."""

    labels: tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class MemoryCleared:
    """Device and host hold nothing any more."""


@dataclass(frozen=True, slots=True)
class StorageCleared:
    """Nothing is known to be in storage any more."""


PageChange = PagesHeld | SlotsLeft | PagesStored | ObjectsEvicted | MemoryCleared | StorageCleared


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run of the tree, with what storage is known to have of the pages that the host holds."""

    run: HeldRun
    stored: tuple[npt.NDArray[np.bool_], ...]
    """By component: True where the page is known to be in storage."""


class PageChanges:
    """Change log of one cache. Nothing is recorded, at no cost, until an observer is registered."""

    __slots__ = (
        "_evicted",
        "_evictions_known",
        "_feed",
        "_owner",
        "_pages_max",
        "_recorded",
        "_recorded_pages",
        "_storage",
        "_stored",
        "_tree",
        "evictions_count",
        "is_watched",
        "lost_count",
    )

    def __init__(self, tree: RadixTree, stored: StoredSlots) -> None:
        self._tree = tree
        self._stored = stored
        self._recorded: list[PageChange] | None = None
        """None where changes were lost, and at the beginning."""
        self._recorded_pages = 0
        self._pages_max = 0
        self._owner = 0
        self._storage: Store | None = None
        self._feed: RemovalFeed | None = None
        self._evicted: dict[tuple[str, PageKey], int] = {}
        """Objects that the store has evicted since it was last known to have them, and how many others before each."""
        self._evictions_known = True
        self.evictions_count = 0
        """Objects that the store has evicted so far."""
        self.is_watched = False
        self.lost_count = 0
        """Times that more changed than there was room for."""

    def watch(self, pages_max: int = 1 << 18) -> None:
        """Record changes from now on, of at most ``pages_max`` pages between two ``take``; the first one returns None.

        Raises:
            ConfigError: no room for a page.
            StateError: there is an observer already.
        """
        if pages_max < 1:
            raise ConfigError(f"pages_max must be positive, found {pages_max}")
        if self.is_watched:
            raise StateError("the changes of a cache have one watcher, and there is one")
        self.is_watched = True
        self._pages_max = pages_max
        self._owner = threading.get_ident()
        self._subscribe()
        self.forget()

    def unwatch(self) -> None:
        """Stop recording; a second call does nothing."""
        self.is_watched = False
        self._recorded = None
        self._unsubscribe()

    def follow_storage(self, storage: Store | None) -> None:
        """Ask this store from now on for its evictions."""
        self._unsubscribe()
        self._storage = storage
        if self.is_watched:
            self._subscribe()

    def take(self) -> list[PageChange] | None:
        """Return what has changed since the last call, in order; None if that is not known: ask ``held_runs``."""
        self._check_owner()
        self._take_removals()
        changes, self._recorded, self._recorded_pages = self._recorded, [], 0
        return changes

    def forget(self) -> None:
        """Drop what is recorded: the next ``take`` returns None."""
        self._recorded = None
        self._recorded_pages = 0

    def held_runs(self) -> list[StoredRun]:
        """Return all that memory holds, run by run, each after the one that it continues; copies. Walks the tree."""
        self._check_owner()
        runs: list[StoredRun] = []
        for run in held_runs(self._tree):
            host = run.slots[len(run.slots) // 2 :] if self._evictions_known else ()
            stored = [
                np.zeros(run.pages_count, np.bool_)
                if slots is None
                else self._stored.among(component, slots) & (slots >= 0)
                for component, slots in enumerate(host)
            ]
            runs.append(StoredRun(run, tuple(stored)))
        return runs

    def was_evicted(self, component: int, key: PageKey) -> bool:
        """Return whether the store has evicted any object of a page since it was last known to have it."""
        return any((pool.name, key) in self._evicted for pool in self._tree.components[component].pools)

    # ---- noting: what calls these asks ``is_watched`` first ---------------------------------------------------

    def record_inserted(
        self, tier: Tier, prompt: Prompt, start: int, slots: Sequence[Slots], duplicates: Sequence[Slots]
    ) -> None:
        """Record the pages [start, pages_count) that were given a slot, without those whose slots are duplicates."""
        for component, (given, left) in enumerate(zip(slots, duplicates, strict=True)):
            taken = given >= 0
            if left.size:
                taken &= ~np.isin(given, left)
            pages = np.flatnonzero(taken)
            if pages.size:
                self._record(PagesHeld(tier, component, prompt, pages + start, given[pages]), pages.size)

    def record_published(self, tier: Tier, prompt: Prompt, taken: Sequence[PageCopies]) -> None:
        """Record the pages that a transfer has brought to a tier."""
        for part in taken:
            if len(part):
                self._record(PagesHeld(tier, part.component, prompt, part.pages, part.target), len(part))

    def record_freed(self, freed: Freed) -> None:
        """Record freed slots."""
        components = len(freed.slots) // len(Tier)
        for tier_component, arrays in enumerate(freed.slots):
            if arrays:
                slots = np.concatenate(arrays)
                tier, component = divmod(tier_component, components)
                self._record(SlotsLeft(Tier(tier), component, slots), len(slots))

    def record_stored(self, component: int, prompt: Prompt, pages: PageNumbers, since: int) -> None:
        """Record pages that storage has, as seen after ``since`` evictions, but for those evicted after that."""
        if self._evicted:
            pages = pages[[self._is_there(component, prompt.keys[page], since) for page in pages.tolist()]]
        if len(pages):
            self._record(PagesStored(component, prompt, pages), len(pages))

    def record_evicted(self, labels: Sequence[Label]) -> None:
        """Record objects that the store has evicted."""
        if not labels:
            return
        for label in labels:
            self._evicted.pop((label.pool, label.key), None)
            self._evicted[label.pool, label.key] = self.evictions_count
            self.evictions_count += 1
        if len(self._evicted) > EVICTED_MAX:
            self._evicted.clear()
            self._evictions_known = False
        self._record(ObjectsEvicted(tuple(labels)), len(labels))

    def record_memory_cleared(self) -> None:
        """Record that the tree is empty."""
        self._record(MemoryCleared(), 1)

    def record_storage_cleared(self) -> None:
        """Record that storage may be empty."""
        if self._feed is not None:
            self._feed.take()  # of what was there before
        self._evicted.clear()
        self._evictions_known = True
        self._record(StorageCleared(), 1)

    def _record(self, change: PageChange, pages_count: int) -> None:
        if self._recorded is None:
            return
        self._recorded_pages += pages_count
        if self._recorded_pages > self._pages_max:
            self.lost_count += 1
            self.forget()
        else:
            self._recorded.append(change)

    def _is_there(self, component: int, key: PageKey, since: int) -> bool:
        """Return whether no object of a page has gone since then, and forget that any had gone before."""
        names = [(pool.name, key) for pool in self._tree.components[component].pools]
        if any(self._evicted.get(name, -1) >= since for name in names):
            return False
        for name in names:
            self._evicted.pop(name, None)
        return True

    def _subscribe(self) -> None:
        if self._storage is not None and self._feed is None:
            with suppress(StateError):  # it tells as many others as it can
                self._feed = self._storage.removals()

    def _unsubscribe(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def _take_removals(self) -> None:
        """Record the store's evictions since the last call; if it does not know them, any page may have gone."""
        if self._feed is None:
            return
        removals = self._feed.take()
        if removals.lost_count:
            self.evictions_count += removals.lost_count
            self._evictions_known = False
            self._record(StorageCleared(), 1)
        self.record_evicted(removals.labels)

    def _check_owner(self) -> None:
        if threading.get_ident() != self._owner:
            raise OwnerThreadError("the changes of a cache are taken by the thread that watches it, its owner's")

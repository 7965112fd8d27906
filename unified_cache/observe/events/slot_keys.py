"""Keys of the slots of one cache, and the events that its changes are."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from unified_cache.controller.page_changes import (
    MemoryCleared,
    ObjectsEvicted,
    PageChange,
    PageChanges,
    PagesHeld,
    PagesStored,
    SlotsLeft,
    StorageCleared,
    StoredRun,
)
from unified_cache.core.page import PAGE_KEY_BYTES, TOKEN_BYTES, Namespace, PageKey, Prompt
from unified_cache.core.pool import ModelLayout, Tier
from unified_cache.observe.events.values import ClearedEvent, KvEvent, Medium, RemovedEvent, StoredEvent

EVENT_PAGES_MAX = 512
"""Pages in one event: a batch is bounded, whatever is inserted or evicted at a time."""

Numbers = npt.NDArray[np.int64]


class SlotKeys:
    """Events of one cache, made of its changes in their order. One thread uses it."""

    __slots__ = ("_changes", "_components_by_pool", "_in_slots", "_layout", "_owners", "_spans", "needs_announcement")

    def __init__(self, changes: PageChanges, layout: ModelLayout, owners: Mapping[str, bytes]) -> None:
        """``owners`` names by pool whose objects are ours, see ``Identity.owners``."""
        self._changes = changes
        self._layout = layout
        self._owners = frozenset(owners.items())
        self._spans = tuple(component.span for component in layout.components)
        self._components_by_pool = {
            pool.name: number for number, component in enumerate(layout.components) for pool in component.pools
        }
        self._in_slots: list[list[dict[int, PageKey]]] = [[{} for _ in layout.components] for _ in Tier]
        """Key of the page in each slot, by tier and component."""
        self.needs_announcement = False
        """True after ``AllBlocksCleared`` was said although memory holds pages: they have to be announced again."""

    def events(self, changes: Sequence[PageChange]) -> Iterator[KvEvent]:
        """Yield what consumers are to be sent of some changes."""
        for change in changes:
            match change:
                case PagesHeld() if change.prompt.namespace is not None:
                    self._hold(change)
                    yield from self._runs(Medium(change.tier), change.component, change.prompt, change.pages)
                case SlotsLeft():
                    yield from self._removed(change)
                case PagesStored():
                    yield from self._runs(Medium.STORAGE, change.component, change.prompt, change.pages)
                case ObjectsEvicted():
                    yield from self._evicted(change)
                case MemoryCleared():
                    yield from self._cleared_memory()
                case StorageCleared():
                    yield ClearedEvent()
                    self.needs_announcement = any(map(any, self._in_slots))

    def announcement(self, runs: Sequence[StoredRun]) -> Iterator[KvEvent]:
        """Yield all that memory holds, and what of it storage is known to have, after ``AllBlocksCleared``."""
        self.needs_announcement = False
        for in_slots in chain.from_iterable(self._in_slots):
            in_slots.clear()
        yield ClearedEvent()
        components = len(self._layout.components)
        ends: list[tuple[bytes, bytes]] = []
        for number, held in enumerate(runs):
            run = held.run
            seed_bytes = len(run.root) - len(run.root) % PAGE_KEY_BYTES
            above = (run.root[:seed_bytes], run.root[seed_bytes:]) if run.parent is None else ends[run.parent]
            # A run in the middle is a prompt whose seed is the key before it, and whose first token is the one before.
            prompt = Prompt(run.tokens, self._layout.page_size, *above, run.media, run.namespace)
            ends.append((prompt.keys[-1], run.tokens[-TOKEN_BYTES:] if above[1] else b""))
            assert number == len(ends) - 1
            if run.namespace is None:
                continue
            is_at_root = run.parent is None
            for tier_component, slots in enumerate(run.slots):
                if slots is None:
                    continue
                pages = np.flatnonzero(slots >= 0)
                tier, component = Tier(tier_component // components), tier_component % components
                self._hold(PagesHeld(tier, component, prompt, pages, slots[pages]))
                yield from self._runs(Medium(tier), component, prompt, pages, is_at_root=is_at_root)
            for component, mask in enumerate(held.stored):
                marked = np.flatnonzero(mask)
                there = [not self._changes.was_evicted(component, prompt.keys[page]) for page in marked.tolist()]
                pages = marked[np.array(there, np.bool_)]
                yield from self._runs(Medium.STORAGE, component, prompt, pages, is_at_root=is_at_root)

    def _hold(self, held: PagesHeld) -> None:
        keys = held.prompt.keys
        in_slots = self._in_slots[held.tier][held.component]
        for page, slot in zip(held.pages.tolist(), held.slots.tolist(), strict=True):
            in_slots[slot] = keys[page]

    def _runs(
        self, medium: Medium, component: int, prompt: Prompt, pages: Numbers, *, is_at_root: bool = True
    ) -> Iterator[KvEvent]:
        """Yield an event for each run of neighbouring pages; ``is_at_root`` where page 0 is a prompt's first.

        None where the namespace is unknown: without adapter and salt it would be of pages of the bare model.
        """
        namespace = prompt.namespace
        if namespace is None or not len(pages):
            return
        breaks = np.flatnonzero(np.diff(pages) != 1) + 1
        cuts = {*range(0, len(pages), EVENT_PAGES_MAX), *breaks.tolist(), len(pages)}
        for first, last in pairwise(sorted(cuts)):
            start, end = int(pages[first]), int(pages[last - 1]) + 1
            begins = is_at_root and not start
            parent = None if begins else prompt.keys[start - 1] if start else prompt.seed
            yield StoredEvent(
                medium,
                component,
                prompt.keys[start:end],
                parent,
                _tokens(prompt, start, end),
                self._layout.page_size,
                namespace.lora_id,
                _extra_keys(prompt, namespace, start, end, begins=begins),
                self._spans[component],
                self._spans,
            )

    def _removed(self, left: SlotsLeft) -> Iterator[KvEvent]:
        in_slots = self._in_slots[left.tier][left.component]
        keys = [key for slot in left.slots.tolist() if (key := in_slots.pop(slot, None)) is not None]
        yield from _removals(Medium(left.tier), left.component, keys)

    def _evicted(self, evicted: ObjectsEvicted) -> Iterator[KvEvent]:
        """Yield the pages that storage lacks from now on: those of which any object is gone."""
        keys: list[dict[PageKey, None]] = [{} for _ in self._spans]
        for label in evicted.labels:
            if (label.pool, label.identity) in self._owners:
                keys[self._components_by_pool[label.pool]][label.key] = None
        for component, gone in enumerate(keys):
            yield from _removals(Medium.STORAGE, component, list(gone))

    def _cleared_memory(self) -> Iterator[KvEvent]:
        """Yield the removal of every page in memory: ``AllBlocksCleared`` would be of storage too."""
        for tier, components in enumerate(self._in_slots):
            for component, in_slots in enumerate(components):
                yield from _removals(Medium(tier), component, list(in_slots.values()))
                in_slots.clear()


def _removals(medium: Medium, component: int, keys: list[PageKey]) -> Iterator[KvEvent]:
    for start in range(0, len(keys), EVENT_PAGES_MAX):
        yield RemovedEvent(medium, component, tuple(keys[start : start + EVENT_PAGES_MAX]))


def _tokens(prompt: Prompt, start: int, end: int) -> tuple[int, ...]:
    """Return the ids of pages [start, end); of pages of bigrams both of each pair."""
    size = prompt.page_size * TOKEN_BYTES
    ids = np.frombuffer(prompt.tokens[start * size : end * size], "<i4")
    if prompt.first:
        before = prompt.tokens[start * size - TOKEN_BYTES : start * size] if start else prompt.first
        firsts = np.concatenate([np.frombuffer(before, "<i4"), ids[:-1]])
        ids = np.stack((firsts, ids), axis=1).reshape(-1)
    return tuple(ids.tolist())


def _extra_keys(
    prompt: Prompt, namespace: Namespace, start: int, end: int, *, begins: bool
) -> tuple[tuple[str | tuple[str, int], ...] | None, ...]:
    """Return by page what its hash depends on: the adapter everywhere, media where they reach, the rest at first."""
    adapter = [] if namespace.lora_id is None else [namespace.lora_id]
    keys: list[list[str | tuple[str, int]]] = [[*adapter] for _ in range(start, end)]
    for first, items in prompt.media.items():
        for item in items:
            last = (item.start + item.length - 1) // prompt.page_size
            for page in range(max(first, start), min(last + 1, end)):
                keys[page - start].append((item.digest, int(item.start) - page * prompt.page_size))
    if begins:
        others = (namespace.extra_key, namespace.tenant, namespace.cache_salt)
        keys[0] += [text for text in others if text is not None]
    return tuple(tuple(each) or None for each in keys) if any(keys) else ()

"""Explains a prompt to the engine of a cache: looks at its tree, its memory of what has gone, and its store."""

from collections.abc import Sequence

import numpy as np

from unified_cache.cache.explain.explanation import (
    Explainer,
    Explanation,
    PageHistory,
    StoredPages,
    StoreSilence,
    present_pages,
)
from unified_cache.cache.explain.near import NearMatch, namespace_differences, near_in_store
from unified_cache.controller import StorageTier
from unified_cache.controller.ledger import Ledger
from unified_cache.core.config import CacheConfig
from unified_cache.core.errors import StorageError
from unified_cache.core.miss_reason import EvictionRecords, MissReason
from unified_cache.core.page import Prompt, key_digests, prompt_digests
from unified_cache.core.pool import Identity, Pages, Tier
from unified_cache.storage_backends.manifest import Description

__all__ = ["explain", "history_of"]


def history_of(ledger: Ledger, prompt: Prompt, stored: StoredPages | StoreSilence | None) -> list[list[PageHistory]]:
    """Return the histories of a prompt's pages by tier and component; ``stored`` is None without a store."""
    components = len(ledger.layout.components)
    held = _held(ledger, prompt)
    memory = [Tier.DEVICE, *([Tier.HOST] if ledger.capacity(Tier.HOST, 0) else [])]
    if isinstance(stored, StoredPages):
        held += stored.present
    elif stored is not None:
        held += [np.zeros(prompt.pages_count, np.bool_) for _ in range(components)]
    records = _records(ledger, prompt, len(held))
    places = [*map(int, memory), *([len(Tier)] if stored is not None else [])]
    known = [_known(held[number::components], records[number::components]) for number in range(components)]
    arriving = ledger.tree.arriving(prompt)
    is_complete = ledger.changes.eviction_history is not None and ledger.changes.eviction_history.is_complete
    unknown = MissReason.NEVER_COMPUTED if is_complete else MissReason.NOT_REMEMBERED
    tiers: list[list[PageHistory]] = []
    for place in places:
        histories: list[PageHistory] = []
        for number in range(components):
            tier_component = place * components + number
            record = records[tier_component]
            reasons = record.reasons.copy()
            is_repeated = record.reasons == MissReason.DUPLICATE
            silent = record.reasons == MissReason.NOT_REMEMBERED
            reasons[silent & ~known[number]] = MissReason.NOT_KEPT
            reasons[silent & known[number]] = _absent(place)
            reasons[silent & ~known[0]] = unknown
            if place < len(Tier):
                reasons[arriving[tier_component]] = MissReason.ARRIVING
                lower = [held[later * components + number] for later in places if later > place]
                reasons[silent & np.logical_or.reduce([*lower, np.zeros_like(silent)])] = MissReason.NOT_FETCHED
            if place == len(Tier) and isinstance(stored, StoreSilence):
                reasons[:] = MissReason.STORE_UNAVAILABLE
            is_held = held[tier_component]
            histories.append(PageHistory(is_held, reasons, record.components, record.recorded_s, is_repeated & is_held))
        tiers.append(histories)
    return tiers


def _absent(place: int) -> MissReason:
    """Return why a tier lacks pages that were somewhere, where nothing is remembered of it."""
    return (MissReason.NOT_FETCHED, MissReason.NOT_BACKED_UP, MissReason.NOT_STORED)[place]


def _held(ledger: Ledger, prompt: Prompt) -> list[Pages]:
    """Return by tier and component of memory which pages of a prompt are held."""
    tree = ledger.tree
    found = tree.peek(prompt)
    held: list[Pages] = []
    for tier in Tier:
        for component in range(len(ledger.layout.components)):
            mask = np.zeros(prompt.pages_count, np.bool_)
            mask[: found.tree_end] = tree.slots(found, tier, component, 0, found.tree_end) >= 0
            held.append(mask)
    return held


def _records(ledger: Ledger, prompt: Prompt, tier_components: int) -> list[EvictionRecords]:
    """Return the eviction history of a prompt's pages by tier, storage too if there is one, and component."""
    eviction_history, count = ledger.changes.eviction_history, prompt.pages_count
    if eviction_history is None or not count:
        nothing = EvictionRecords(np.zeros(count, np.uint8), np.zeros(count, np.uint8), np.zeros(count, np.float64))
        return [nothing] * tier_components
    memory_count = len(Tier) * len(ledger.layout.components)
    digests = prompt_digests(prompt)
    found = [eviction_history.find(tier_component, digests) for tier_component in range(memory_count)]
    if tier_components > memory_count:
        keys = key_digests(prompt.keys)
        found += [
            eviction_history.find(tier_component, keys) for tier_component in range(memory_count, tier_components)
        ]
    return found


def _known(held: Sequence[Pages], records: Sequence[EvictionRecords]) -> Pages:
    """Return a mask of the pages that a component is known to have had on any tier."""
    known: Pages = np.logical_or.reduce(list(held))
    for record in records:
        known = known | (record.reasons != MissReason.NOT_REMEMBERED)
    return known


TIER_NAMES = (*(tier.name.lower() for tier in Tier), "storage")


def explain(
    ledger: Ledger,
    config: CacheConfig,
    storage: StorageTier | None,
    identity: Identity,
    prompt: Prompt,
    *,
    seeks_near: bool = True,
) -> Explanation:
    """Return the explanation of a prompt; see ``UnifiedCache.explain``."""
    ledger.changes.take_removals()
    pages = prompt.pages_count
    stored = None if storage is None or not pages else _asked(storage, prompt)
    histories = history_of(ledger, prompt, stored)
    has_host = len(histories) > 1 + (stored is not None)
    names = [TIER_NAMES[0], *([TIER_NAMES[1]] if has_host else []), *([TIER_NAMES[2]] if stored is not None else [])]
    clock_s = 0.0 if ledger.changes.eviction_history is None else ledger.changes.eviction_history.clock()
    explainer = Explainer(ledger.layout.components, ledger.layout.page_size, config, clock_s)
    near = _near(ledger, storage, identity, prompt, stored) if seeks_near else []
    return explainer.explain(list(zip(names, histories, strict=True)), pages, near, _remembers(ledger))


def _near(
    ledger: Ledger,
    storage: StorageTier | None,
    identity: Identity,
    prompt: Prompt,
    stored: StoredPages | StoreSilence | None,
) -> list[NearMatch]:
    """Return the same tokens in other namespaces of memory, and in a store that has nothing under this name."""
    alike = ledger.tree.prompts_alike(prompt)
    near = [
        NearMatch("memory", count, namespace_differences(prompt.namespace, other.namespace))
        for other, count in alike
        if count
    ]
    if storage is not None and isinstance(stored, StoredPages) and not stored.present[0].any():
        others = {other.root: other for other, _ in alike}
        if prompt.root and not prompt.first:
            others[b""] = Prompt(prompt.tokens, prompt.page_size, b"", media=prompt.media)
        under = [(other, namespace_differences(prompt.namespace, other.namespace)) for other in others.values()]
        near += near_in_store(storage.backend, prompt, Description(identity, ledger.layout), storage.owners, under)
    return near


def _remembers(ledger: Ledger) -> str:
    eviction_history = ledger.changes.eviction_history
    if eviction_history is None:
        return "nothing that has gone is remembered; CacheConfig.forgotten_pages_max says how many pages are to be"
    if eviction_history.is_complete:
        return "everything since the cache was opened"
    return f"the last {eviction_history.pages_max:,} pages that something happened to (CacheConfig.forgotten_pages_max)"


def _asked(storage: StorageTier, prompt: Prompt) -> StoredPages | StoreSilence:
    """Ask a store for every object of a prompt, in one call; it is bounded by the guard around the store."""
    pools = [storage.pools(component) for component in range(len(storage.layout.components))]
    labels = [label for specs in pools for pool in specs for label in storage.labels(prompt.keys, pool)]
    try:
        answers = storage.backend.exists(labels)
    except StorageError:
        return StoreSilence()
    return present_pages(answers, [len(specs) for specs in pools], prompt.pages_count)

"""Fates of a prompt's pages as a cache knows them: its tree, and its memory of what has gone."""

from collections.abc import Sequence

import numpy as np

from unified_cache.explain.fates import NUMBER_OF, LaneFates, StoredPages, StoreSilence
from unified_cache.explain.reasons import Why
from unified_cache.forgotten import Cause, FoundNotes
from unified_cache.ledger import Ledger
from unified_cache.page import Prompt
from unified_cache.page_digests import key_digests, prompt_digests
from unified_cache.pool import Pages, Tier

__all__ = ["fates_of"]

_CAUSES = {
    Cause.NONE: Why.NEVER_COMPUTED,
    Cause.EVICTED: Why.EVICTED,
    Cause.DUPLICATE: Why.DUPLICATE,
    Cause.RESET: Why.RESET,
    Cause.BACKUP_DECLINED: Why.BACKUP_DECLINED,
    Cause.BACKUP_FAILED: Why.BACKUP_FAILED,
    Cause.HOST_FULL: Why.HOST_FULL,
    Cause.STORED: Why.STORE_LOST,
    Cause.STORE_DECLINED: Why.STORE_DECLINED,
    Cause.STORE_FAILED: Why.STORE_FAILED,
    Cause.STORE_EVICTED: Why.STORE_EVICTED,
    Cause.STORE_CLEARED: Why.STORE_CLEARED,
    Cause.FLAWED: Why.FLAWED,
}
_WHY_OF_CAUSE = np.array([NUMBER_OF[_CAUSES[cause]] for cause in Cause], np.uint8)


def fates_of(ledger: Ledger, prompt: Prompt, stored: StoredPages | StoreSilence | None) -> list[list[LaneFates]]:
    """Return the fates of a prompt's pages by tier, as there are tiers, and component; changes nothing.

    ``stored`` is what the store says, None where there is no store.
    """
    components = len(ledger.layout.components)
    held = _held(ledger, prompt)
    memory = [Tier.DEVICE, *([Tier.HOST] if ledger.capacity(Tier.HOST, 0) else [])]
    if isinstance(stored, StoredPages):
        held += stored.present
    elif stored is not None:
        held += [np.zeros(prompt.pages_count, np.bool_) for _ in range(components)]
    notes = _notes(ledger, prompt, len(held))
    places = [*map(int, memory), *([len(Tier)] if stored is not None else [])]
    known = [_known(held[number::components], notes[number::components]) for number in range(components)]
    arriving = ledger.tree.arriving(prompt)
    is_complete = ledger.fates.ring is not None and ledger.fates.ring.is_complete
    unknown = Why.NEVER_COMPUTED if is_complete else Why.NOT_REMEMBERED
    fates: list[list[LaneFates]] = []
    for place in places:
        lanes: list[LaneFates] = []
        for number in range(components):
            lane = place * components + number
            note = notes[lane]
            whys = _WHY_OF_CAUSE[note.causes]  # a copy
            is_repeated = note.causes == Cause.DUPLICATE
            silent = note.causes == Cause.NONE
            whys[silent & ~known[number]] = NUMBER_OF[Why.NOT_KEPT]
            whys[silent & known[number]] = NUMBER_OF[_absent(place)]
            whys[silent & ~known[0]] = NUMBER_OF[unknown]
            if place < len(Tier):
                whys[arriving[lane]] = NUMBER_OF[Why.ARRIVING]
                lower = [held[later * components + number] for later in places if later > place]
                whys[silent & np.logical_or.reduce([*lower, np.zeros_like(silent)])] = NUMBER_OF[Why.NOT_FETCHED]
            if place == len(Tier) and isinstance(stored, StoreSilence):
                whys[:] = NUMBER_OF[Why.STORE_UNAVAILABLE]
            lanes.append(LaneFates(held[lane], whys, note.components, note.noted_s, is_repeated & held[lane]))
        fates.append(lanes)
    return fates


def _absent(place: int) -> Why:
    """Return why a tier lacks pages that were somewhere, where nothing is remembered of it."""
    return (Why.NOT_FETCHED, Why.NOT_BACKED_UP, Why.NOT_STORED)[place]


def _held(ledger: Ledger, prompt: Prompt) -> list[Pages]:
    """Return by lane of memory which pages of a prompt are held."""
    tree = ledger.tree
    found = tree.peek(prompt)
    held: list[Pages] = []
    for tier in Tier:
        for component in range(len(ledger.layout.components)):
            mask = np.zeros(prompt.pages_count, np.bool_)
            mask[: found.tree_end] = tree.slots(found, tier, component, 0, found.tree_end) >= 0
            held.append(mask)
    return held


def _notes(ledger: Ledger, prompt: Prompt, lanes: int) -> list[FoundNotes]:
    """Return by lane what is remembered of a prompt's pages: of memory, and of storage where there is some."""
    forgotten, count = ledger.fates.ring, prompt.pages_count
    if forgotten is None or not count:
        nothing = FoundNotes(np.zeros(count, np.uint8), np.zeros(count, np.uint8), np.zeros(count, np.float64))
        return [nothing] * lanes
    memory_lanes = len(Tier) * len(ledger.layout.components)
    digests = prompt_digests(prompt)
    found = [forgotten.find(lane, digests) for lane in range(memory_lanes)]
    if lanes > memory_lanes:
        keys = key_digests(prompt.keys)
        found += [forgotten.find(lane, keys) for lane in range(memory_lanes, lanes)]
    return found


def _known(held: Sequence[Pages], notes: Sequence[FoundNotes]) -> Pages:
    """Tell of each page whether a component has ever had it, on any tier, as far as is remembered."""
    known: Pages = np.logical_or.reduce(list(held))
    for note in notes:
        known = known | (note.causes != Cause.NONE)
    return known

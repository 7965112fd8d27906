"""Fates of a prompt's pages as a cache knows them: its tree, and its memory of what has gone."""

from collections.abc import Sequence

import numpy as np

from unified_cache.explain.fates import LaneFates, StoredPages, StoreSilence
from unified_cache.forgotten import FoundNotes
from unified_cache.ledger import Ledger
from unified_cache.miss_reason import MissReason
from unified_cache.page import Prompt
from unified_cache.page_digests import key_digests, prompt_digests
from unified_cache.pool import Pages, Tier

__all__ = ["fates_of"]


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
    unknown = MissReason.NEVER_COMPUTED if is_complete else MissReason.NOT_REMEMBERED
    fates: list[list[LaneFates]] = []
    for place in places:
        lanes: list[LaneFates] = []
        for number in range(components):
            lane = place * components + number
            note = notes[lane]
            reasons = note.reasons.copy()
            is_repeated = note.reasons == MissReason.DUPLICATE
            silent = note.reasons == MissReason.NOT_REMEMBERED
            reasons[silent & ~known[number]] = MissReason.NOT_KEPT
            reasons[silent & known[number]] = _absent(place)
            reasons[silent & ~known[0]] = unknown
            if place < len(Tier):
                reasons[arriving[lane]] = MissReason.ARRIVING
                lower = [held[later * components + number] for later in places if later > place]
                reasons[silent & np.logical_or.reduce([*lower, np.zeros_like(silent)])] = MissReason.NOT_FETCHED
            if place == len(Tier) and isinstance(stored, StoreSilence):
                reasons[:] = MissReason.STORE_UNAVAILABLE
            lanes.append(LaneFates(held[lane], reasons, note.components, note.noted_s, is_repeated & held[lane]))
        fates.append(lanes)
    return fates


def _absent(place: int) -> MissReason:
    """Return why a tier lacks pages that were somewhere, where nothing is remembered of it."""
    return (MissReason.NOT_FETCHED, MissReason.NOT_BACKED_UP, MissReason.NOT_STORED)[place]


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
        known = known | (note.reasons != MissReason.NOT_REMEMBERED)
    return known

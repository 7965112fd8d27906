"""Fates of a prompt's pages: of each page, whether a component holds it on a tier, and if not, what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.miss_reason import MissReason
from unified_cache.pool import Pages
from unified_cache.storage_backends.protocol import Answer

__all__ = ["LaneFates", "StoreSilence", "StoredPages", "present_pages", "stored_fates"]


@dataclass(frozen=True, slots=True)
class StoredPages:
    """Pages of a prompt that a store says it has, by component."""

    present: Sequence[Pages]


@dataclass(frozen=True, slots=True)
class StoreSilence:
    """A store that does not say what it has."""

    reason: str


@dataclass(frozen=True, slots=True)
class LaneFates:
    """Fates of a prompt's pages in one lane; arrays of one entry a page."""

    held: Pages
    reasons: npt.NDArray[np.uint8]
    """``MissReason``; of no meaning where the page is held."""
    components: npt.NDArray[np.uint8]
    """Component that room was made for, where the page was evicted."""
    noted_s: npt.NDArray[np.float64]
    """Time of what has happened, where something has."""
    is_repeated: Pages
    """Computed again while it was held, and the second copy dropped."""

    @classmethod
    def without_notes(cls, held: Pages, reason: MissReason) -> "LaneFates":
        """Return the fates of pages that all lack for one reason."""
        count = len(held)
        reasons = np.full(count, reason, np.uint8)
        nothing = np.zeros(count, np.bool_)
        return cls(held, reasons, np.zeros(count, np.uint8), np.zeros(count, np.float64), nothing)


def present_pages(answers: Sequence[Answer], pools: Sequence[int], pages: int) -> StoredPages | StoreSilence:
    """Return by component which pages a store has in every pool, of its answers pool by pool.

    ``pools[c]`` are the pools of a component that have objects; one without has all that Full has.
    """
    if Answer.UNAVAILABLE in answers and Answer.HIT not in answers:
        return StoreSilence("the store is not asked now, or does not know")
    hits = np.array([answer is Answer.HIT for answer in answers], np.bool_)
    present: list[Pages] = []
    start = 0
    for count in pools:
        end = start + count * pages
        whole: Pages = np.logical_and.reduce(hits[start:end].reshape(count, pages)) if count else present[0].copy()
        present.append(whole)
        start = end
    return StoredPages(present)


def stored_fates(stored: StoredPages | StoreSilence, components: int, pages: int) -> list[LaneFates]:
    """Return the fates in a store of which nothing else is known, by component."""
    if isinstance(stored, StoreSilence):
        nothing = np.zeros(pages, np.bool_)
        return [LaneFates.without_notes(nothing, MissReason.STORE_UNAVAILABLE) for _ in range(components)]
    return [LaneFates.without_notes(present, MissReason.NOT_IN_STORE) for present in stored.present]

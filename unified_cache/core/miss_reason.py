"""Reasons why a page is missing on a tier, and a bounded memory of them: for explanations, replays and metrics.

    record  adds pages of a component on a tier that were evicted, declined, removed; or stored, for storage
    ring    digest, reason and time of each, the oldest overwritten first; 18 bytes a page
    find    latest entry of each page; sorts the ring now and then: 12 bytes a page more

``tier_component`` counts as in the tree, with storage as one more tier. A page of memory is known by a chained digest
of the tokens from the root on, of 64 bits, a page of storage by the head of its key.
"""

import time
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unified_cache.core.page import DIGEST_BYTES, PageDigests

__all__ = ["HISTORY_PAGE_BYTES", "EvictionHistory", "EvictionRecords", "MissReason"]


class MissReason(IntEnum):
    """Reason why a page is missing on a tier. Arrays hold its number, JSON its ``key``, tables its ``text``."""

    text: str
    """Words for people: without time, policy and component."""

    def __new__(cls, number: int, text: str = "") -> "MissReason":
        """Make the member of a number, and its words."""
        reason = int.__new__(cls, number)
        reason._value_ = number
        reason.text = text
        return reason

    NOT_REMEMBERED = 0, "never computed here, or longer ago than is remembered"
    NEVER_COMPUTED = 1, "never computed here"
    NOT_KEPT = 2, "not kept: windows and states are kept where prompts end and branch"
    NOT_FETCHED = 3, "held by another tier, and not brought here"
    ARRIVING = 4, "on its way"
    EVICTED = 5, "evicted"
    """Evicted from a memory tier, to make room for a component."""
    DUPLICATE = 6, "computed twice, the second copy dropped"
    RESET = 7, "forgotten by reset"
    NOT_BACKED_UP = 8, "not backed up"
    BACKUP_DECLINED = 9, "not backed up: too many transfers were under way"
    BACKUP_FAILED = 10, "not backed up: the copy failed"
    """Or was late, or cancelled."""
    HOST_FULL = 11, "not backed up: host memory had no room for it"
    NOT_STORED = 12, "not stored"
    STORE_DECLINED = 13, "not stored: the store had no room"
    STORE_FAILED = 14, "not stored: the store failed or was away"
    STORE_EVICTED = 15, "evicted by the store"
    STORE_LOST = 16, "stored, and gone since without a word of the store"
    """The store reports no evictions, or another process removed it."""
    STORE_CLEARED = 17, "removed by clear_storage"
    FLAWED = 18, "found damaged in the store, and thrown away"
    """Or found to be another page."""
    STORE_UNAVAILABLE = 19, "the store is not available now"
    NOT_IN_STORE = 20, "not in the store"
    """Asked of a store alone, which does not say what it had."""
    TOO_LONG = 21, "longer than the device can hold"
    PART_OF_PAGE = 22, "part of a page, behind the last whole one"

    @property
    def key(self) -> str:
        """Name in JSON."""
        return self.name.lower()


Digests = npt.NDArray[np.uint64]
"""Digests as numbers, shape (pages,)."""

HISTORY_PAGE_BYTES = 30
"""Memory for each page that can be remembered: digest, time, component and reason, and the sorted index."""

WAITING_PAGES_MAX = 4_096
"""Pages recorded before they are put into the ring, all in one step."""

UNSORTED_PAGES_MAX = 8_192
"""Pages put into the ring since it was last sorted, beyond which it is sorted again before pages are looked for."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class EvictionRecords(NamedTuple):
    """Latest record of each page that was looked for; arrays of one length."""

    reasons: npt.NDArray[np.uint8]
    """``MissReason``, NOT_REMEMBERED where nothing is."""
    components: npt.NDArray[np.uint8]
    """Component that room was made for, where the reason is an eviction from memory."""
    recorded_s: npt.NDArray[np.float64]
    """Time of the clock; 0 where nothing is remembered."""


_Record = tuple[PageDigests, int, int, float]
"""Digests, component on a tier, code and time of some pages; a plain tuple, since one is made at every eviction."""


class EvictionHistory:
    """Ring of the last ``pages_max`` records. One thread, the cache's owner."""

    __slots__ = (
        "_codes",
        "_count",
        "_digests",
        "_order",
        "_recorded_s",
        "_sorted",
        "_sorted_count",
        "_waiting",
        "_waiting_pages",
        "clock",
        "pages_max",
    )

    def __init__(self, pages_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.pages_max = pages_max
        self.clock = clock
        """Seconds."""
        self._digests = np.zeros(pages_max, np.uint64)
        self._recorded_s = np.zeros(pages_max, np.float64)
        self._codes = np.zeros(pages_max, np.uint16)
        """Reason in the lower byte, component in the upper one."""
        self._count = 0
        """Pages put into the ring so far; the next one goes to this, modulo the size."""
        self._waiting: list[_Record] = []
        self._waiting_pages = 0
        self._sorted = np.zeros(0, np.uint64)
        self._order = np.zeros(0, np.int32)
        """Positions in the ring of what ``_sorted`` holds."""
        self._sorted_count = 0
        """``_count`` when it was sorted."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing has been overwritten yet: what is not remembered was never recorded."""
        return self._count + self._waiting_pages <= self.pages_max

    def record(self, tier_component: int, digests: PageDigests, reason: MissReason, component: int = 0) -> None:
        """Remember why pages of a component on a tier are missing from now on."""
        self._waiting.append((digests, tier_component, component << 8 | reason, self.clock()))
        self._waiting_pages += len(digests) // DIGEST_BYTES
        if self._waiting_pages > WAITING_PAGES_MAX:
            self._put_all()

    def rename(self, reason: MissReason, later: MissReason) -> None:
        """Remember another reason from now on for all pages that are remembered for one."""
        self._put_all()
        renamed = self._codes == reason
        self._codes[renamed] = later
        self._recorded_s[renamed] = self.clock()

    def find(self, tier_component: int, digests: PageDigests) -> EvictionRecords:
        """Return the latest record of each page; no two of ``digests`` are alike."""
        self._put_all()
        if self._count - self._sorted_count > min(UNSORTED_PAGES_MAX, self.pages_max):
            self._sort()
        wanted = np.frombuffer(digests, np.uint64) ^ _salt(tier_component)
        at = self._find_sorted(wanted)
        self._find_unsorted(wanted, at)
        is_recorded = at >= 0
        codes = np.where(is_recorded, self._codes[at], np.uint16(0))
        recorded_s = np.where(is_recorded, self._recorded_s[at], 0.0)
        return EvictionRecords((codes & 0xFF).astype(np.uint8), (codes >> 8).astype(np.uint8), recorded_s)

    def _find_sorted(self, wanted: Digests) -> npt.NDArray[np.int64]:
        """Return the place in the ring of each, as last sorted; -1 for none, or where it was overwritten since."""
        if not len(self._sorted):
            return np.full(len(wanted), -1, np.int64)
        last = np.maximum(np.searchsorted(self._sorted, wanted, side="right") - 1, 0)
        at = self._order[last].astype(np.int64)
        return np.where(self._digests[at] == wanted, at, -1)

    def _find_unsorted(self, wanted: Digests, at: npt.NDArray[np.int64]) -> None:
        """Put into ``at`` the latest place of each that was recorded since the ring was sorted."""
        if self._sorted_count == self._count or not len(wanted):
            return
        places = np.arange(self._sorted_count, self._count) % self.pages_max
        order = np.argsort(wanted)
        ascending = wanted[order]
        digests = self._digests[places]
        number = np.minimum(np.searchsorted(ascending, digests), len(wanted) - 1)
        is_wanted = ascending[number] == digests
        at[order[number[is_wanted]]] = places[is_wanted]  # of several the last is assigned last

    def _put_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._waiting_pages = 0
        if not waiting:
            return
        parts, tier_components, codes_of_parts, times_of_parts = zip(*waiting, strict=True)
        lengths = [len(part) // DIGEST_BYTES for part in parts]
        salts = (np.array(tier_components, np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        digests = np.frombuffer(b"".join(parts), np.uint64) ^ np.repeat(salts, lengths)
        codes = np.repeat(np.array(codes_of_parts, np.uint16), lengths)
        times = np.repeat(np.array(times_of_parts, np.float64), lengths)
        kept = min(len(digests), self.pages_max)
        self._count += len(digests)
        start = (self._count - kept) % self.pages_max
        whole = min(kept, self.pages_max - start)
        for ring, recorded in ((self._digests, digests), (self._codes, codes), (self._recorded_s, times)):
            ring[start : start + whole] = recorded[len(recorded) - kept : len(recorded) - kept + whole]
            ring[: kept - whole] = recorded[len(recorded) - kept + whole :]

    def _sort(self) -> None:
        """Sort the ring by digest, and by time within a digest."""
        kept = min(self._count, self.pages_max)
        places = np.arange(self._count - kept, self._count) % self.pages_max
        order = np.argsort(self._digests[places], kind="stable")
        self._order = places[order].astype(np.int32)
        self._sorted = self._digests[self._order]
        self._sorted_count = self._count


def _salt(tier_component: int) -> np.uint64:
    """Return a number that makes equal digests of different components and tiers differ."""
    return np.uint64((tier_component + 1) * _GOLDEN & _MASK)

"""Memory of what happened to pages that are not where a request looks for them: a bounded ring, for ``explain``.

    note(lane, digests, reason)  pages of one lane were evicted, declined, removed; or stored, for storage
    ring                         digest, reason and time of each, the oldest overwritten first; 18 bytes a page
    find(lane, digests)          latest note of each page; sorts the ring now and then: 12 bytes a page more

A lane is one component on one tier, as in the tree, and, behind those, one component in storage. What memory forgets is
known by a chained digest of the tokens from the root on, of 64 bits, what storage forgets by the head of its page key:
neither says anything about the tokens. Where two pages share a digest, one is explained by the other's fate.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unified_cache.miss_reason import MissReason
from unified_cache.page_digests import DIGEST_BYTES, PageDigests

__all__ = ["FORGOTTEN_PAGE_BYTES", "ForgottenPages", "FoundNotes"]

Digests = npt.NDArray[np.uint64]
"""Digests as numbers, shape (pages,)."""

FORGOTTEN_PAGE_BYTES = 30
"""Memory for each page that can be remembered: digest, time, component and reason, and the sorted index."""

WAITING_PAGES_MAX = 4_096
"""Pages noted before they are put into the ring, all in one step."""

UNSORTED_PAGES_MAX = 8_192
"""Pages put into the ring since it was last sorted, beyond which it is sorted again before pages are looked for."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class FoundNotes(NamedTuple):
    """Latest note of each page that was looked for; arrays of one length."""

    reasons: npt.NDArray[np.uint8]
    """``MissReason``, NOT_REMEMBERED where nothing is."""
    components: npt.NDArray[np.uint8]
    """Component that room was made for, where the reason is an eviction from memory."""
    noted_s: npt.NDArray[np.float64]
    """Time of the clock; 0 where nothing is remembered."""


_Note = tuple[PageDigests, int, int, float]
"""Digests, lane, code and time of some pages; a plain tuple, since one is made at every eviction."""


class ForgottenPages:
    """Ring of the last ``pages_max`` notes. One thread, the cache's owner."""

    __slots__ = (
        "_codes",
        "_count",
        "_digests",
        "_noted_s",
        "_order",
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
        self._noted_s = np.zeros(pages_max, np.float64)
        self._codes = np.zeros(pages_max, np.uint16)
        """Reason in the lower byte, component in the upper one."""
        self._count = 0
        """Pages put into the ring so far; the next one goes to this, modulo the size."""
        self._waiting: list[_Note] = []
        self._waiting_pages = 0
        self._sorted = np.zeros(0, np.uint64)
        self._order = np.zeros(0, np.int32)
        """Positions in the ring of what ``_sorted`` holds."""
        self._sorted_count = 0
        """``_count`` when it was sorted."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing has been overwritten yet: what is not remembered was never noted."""
        return self._count + self._waiting_pages <= self.pages_max

    def note(self, lane: int, digests: PageDigests, reason: MissReason, component: int = 0) -> None:
        """Remember why pages of a lane are missing from now on."""
        self._waiting.append((digests, lane, component << 8 | reason, self.clock()))
        self._waiting_pages += len(digests) // DIGEST_BYTES
        if self._waiting_pages > WAITING_PAGES_MAX:
            self._put_all()

    def rename(self, reason: MissReason, later: MissReason) -> None:
        """Remember another reason from now on for all pages that are remembered for one."""
        self._put_all()
        renamed = self._codes == reason
        self._codes[renamed] = later
        self._noted_s[renamed] = self.clock()

    def find(self, lane: int, digests: PageDigests) -> FoundNotes:
        """Return the latest note of each page; no two of ``digests`` are alike."""
        self._put_all()
        if self._count - self._sorted_count > min(UNSORTED_PAGES_MAX, self.pages_max):
            self._sort()
        wanted = np.frombuffer(digests, np.uint64) ^ _salt(lane)
        at = self._find_sorted(wanted)
        self._find_unsorted(wanted, at)
        is_noted = at >= 0
        codes = np.where(is_noted, self._codes[at], np.uint16(0))
        noted_s = np.where(is_noted, self._noted_s[at], 0.0)
        return FoundNotes((codes & 0xFF).astype(np.uint8), (codes >> 8).astype(np.uint8), noted_s)

    def _find_sorted(self, wanted: Digests) -> npt.NDArray[np.int64]:
        """Return the place in the ring of each, as last sorted; -1 for none, or where it was overwritten since."""
        if not len(self._sorted):
            return np.full(len(wanted), -1, np.int64)
        last = np.maximum(np.searchsorted(self._sorted, wanted, side="right") - 1, 0)
        at = self._order[last].astype(np.int64)
        return np.where(self._digests[at] == wanted, at, -1)

    def _find_unsorted(self, wanted: Digests, at: npt.NDArray[np.int64]) -> None:
        """Put into ``at`` the place of each that was noted since the ring was sorted, the latest."""
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
        """Put what waits into the ring."""
        waiting, self._waiting = self._waiting, []
        self._waiting_pages = 0
        if not waiting:
            return
        parts, lanes, codes_of_parts, times_of_parts = zip(*waiting, strict=True)
        lengths = [len(part) // DIGEST_BYTES for part in parts]
        salts = (np.array(lanes, np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        digests = np.frombuffer(b"".join(parts), np.uint64) ^ np.repeat(salts, lengths)
        codes = np.repeat(np.array(codes_of_parts, np.uint16), lengths)
        times = np.repeat(np.array(times_of_parts, np.float64), lengths)
        kept = min(len(digests), self.pages_max)
        self._count += len(digests)
        start = (self._count - kept) % self.pages_max
        whole = min(kept, self.pages_max - start)
        for ring, noted in ((self._digests, digests), (self._codes, codes), (self._noted_s, times)):
            ring[start : start + whole] = noted[len(noted) - kept : len(noted) - kept + whole]
            ring[: kept - whole] = noted[len(noted) - kept + whole :]

    def _sort(self) -> None:
        """Sort the ring by digest, what was noted later behind what was noted before."""
        kept = min(self._count, self.pages_max)
        places = np.arange(self._count - kept, self._count) % self.pages_max
        order = np.argsort(self._digests[places], kind="stable")
        self._order = places[order].astype(np.int32)
        self._sorted = self._digests[self._order]
        self._sorted_count = self._count


def _salt(lane: int) -> np.uint64:
    """Return what tells the digests of one lane from those of another."""
    return np.uint64((lane + 1) * _GOLDEN & _MASK)

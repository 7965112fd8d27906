"""Shadow of an LRU cache of the same size: what it would have hit, of the requests that another policy serves.

LRU holds the pages that were used last, as many as fit, and of one request's pages the first ones longest. So a count
of pages by the request that used them last says which are held, and no page need be named:

    request      4    7    8    9   11        used last by 4: 12 pages, of which the first 5 are held
    pages       12    3   40    8   16        capacity 72: 16 + 8 + 40 + 3 + 5
                 5 |<------ held ------>|

A node of the tree remembers the request that used it last; what has left the tree is remembered by the forecast as
a run of so many pages, of which a prompt that comes back is taken to have all. That is a guess, and the only one.
A request costs a step for each node of its path, as its match does.

What it tells is the regret against LRU, and a guard: where LRU is ahead of late, by more than luck explains, a lane
that goes by the forecast goes by LRU until that has faded.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from unified_cache.tree.node import Node

__all__ = ["LruComparison", "ShadowLru"]

RECENT_REQUESTS = 1_024
"""Requests after which what was seen of LRU's lead counts half: habits change."""
LEAD_DEVIATIONS = 1.5
"""Standard deviations by which LRU must lead before that is taken for more than luck."""
BUCKETS_MAX = 4_096
"""Counts kept; when there are more, two neighbouring ones become one."""


@dataclass(frozen=True, slots=True)
class LruComparison:
    """Pages of Full that requests found in device or host memory, and those that LRU would have had for them there."""

    asked_pages: int
    hit_pages: int
    """Found; what was brought from storage for the request is not counted."""
    lru_hit_pages: int
    """LRU's hits, as its shadow tells."""

    @property
    def regret_pages(self) -> int:
        """Regret against LRU: hits that it would have had more; negative where it would have had fewer."""
        return self.lru_hit_pages - self.hit_pages


class ShadowLru:
    """Pages of Full that an LRU cache would hold, counted by the request that used them last."""

    __slots__ = (
        "_asked",
        "_buckets",
        "_capacity",
        "_held",
        "_hits",
        "_lead",
        "_lru_hits",
        "_recent_until",
        "_shift",
        "_spread",
    )

    def __init__(self, capacity: int) -> None:
        """Shadow a cache that holds ``capacity`` pages of Full on its larger tier, which has what the other has."""
        self._capacity = capacity
        self._buckets: OrderedDict[int, int] = OrderedDict()
        """Pages held that were used last by requests whose number is this one, shifted; oldest first."""
        self._shift = 0
        self._held = 0
        self._asked = 0
        self._hits = 0
        self._lru_hits = 0
        self._lead = 0
        """Pages that LRU would have hit more, of late."""
        self._spread = 0
        """Sum of the squares of that lead, request by request."""
        self._recent_until = RECENT_REQUESTS

    @property
    def is_ahead(self) -> bool:
        """Whether LRU would have hit more of late than was hit, by more than luck explains."""
        return self._lead > 0 and self._lead * self._lead > LEAD_DEVIATIONS * LEAD_DEVIATIONS * self._spread

    def compared(self) -> LruComparison:
        """Return what was counted so far."""
        return LruComparison(self._asked, self._hits, self._lru_hits)

    def arrive(self, number: int, path: Sequence[Node], end: int, gone: Sequence[tuple[int, int]], total: int) -> None:
        """Note that a request asks for ``total`` pages, of which the tree has ``end`` on ``path``.

        ``gone`` are runs after those that have left the tree: (request that used them last, pages).
        """
        runs: list[tuple[int, int]] = []
        start = used = 0
        for node in path:
            if node.used != used:
                if node.start > start:
                    runs.append((used, node.start - start))
                    start = node.start
                used = node.used
            node.used = number
        if path:
            runs.append((used, end - start))
            if path[-1].end > end:  # its part will be marked when the node is cut there
                path[-1].used = used
        found = end
        for used, count in runs:
            if used <= 0:  # brought from storage, for a request to come
                found -= count
        runs += gone
        hits = moved = 0
        is_held = True
        for used, count in runs:
            took = self._take(abs(used), count)
            moved += took
            if is_held:
                hits += took
                is_held = took == count
        self._put(number, total, total - moved)
        self._asked += total
        self._hits += found
        self._lru_hits += hits
        lead = hits - found
        self._lead += lead
        self._spread += lead * lead
        self._recent_until -= 1
        if not self._recent_until:
            self._recent_until = RECENT_REQUESTS
            self._lead >>= 1
            self._spread >>= 1

    def extend(self, number: int, pages: int) -> None:
        """Note that a request has come to use so many pages more than it asked for: its answer."""
        self._put(number, pages, pages)

    def clear(self) -> None:
        """Forget what is held; what was counted stays."""
        self._buckets.clear()
        self._held = 0

    def _take(self, used: int, count: int) -> int:
        """Take up to ``count`` of the pages that request ``used`` used last; return how many are held."""
        buckets, key = self._buckets, used >> self._shift
        there = buckets.get(key, 0)
        if there > count:
            buckets[key] = there - count
            return count
        if there:
            del buckets[key]
        return there

    def _put(self, number: int, pages: int, more: int) -> None:
        """Count pages as used last by the latest request; ``more`` of them were not held before."""
        buckets, key = self._buckets, number >> self._shift
        buckets[key] = buckets.get(key, 0) + pages
        excess = self._held + more - self._capacity
        while excess > 0:
            oldest = next(iter(buckets))
            there = buckets[oldest]
            if there > excess:
                buckets[oldest] = there - excess
                excess = 0
            else:
                del buckets[oldest]
                excess -= there
        self._held = self._capacity + excess
        if len(buckets) > BUCKETS_MAX:
            self._shift += 1
            halved: OrderedDict[int, int] = OrderedDict()
            for key, there in buckets.items():
                halved[key >> 1] = halved.get(key >> 1, 0) + there
            self._buckets = halved

"""The clairvoyant bound: what a cache would hit that knows every later request, and keeps nothing that it need not.

A page kept from one request for it to the next takes one place meanwhile and brings one hit. With ``n`` places most
hits come from dropping, whenever there are too many, the page that is asked for last (L. A. Belady, IBM Systems Journal
5, 1966, with bypass). A request for a page asks for all before it, so no page is asked for later than those that
stand on it: of pages asked for by one request the deepest goes first, and what is left is a prefix of each prompt.

No policy can hit more with as much memory, over however many tiers it lies.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from unified_cache.sizing.plan.trace_pages import Counts, TracePages


@dataclass(frozen=True, slots=True)
class FutureUses:
    """Runs of pages of each request that the same later request asks for next, those never asked for again left out."""

    requests_count: int
    runs: tuple[tuple[tuple[int, int, int], ...], ...]
    """For each request its runs as (request that asks next, first page, pages), the earliest next request first."""

    @classmethod
    def of(cls, trace: TracePages) -> "FutureUses":
        """Look ahead from every page asked for."""
        found = trace.runs_asked_next()
        runs = list(zip(found.other.tolist(), found.start.tolist(), found.length.tolist(), strict=True))
        bounds = np.searchsorted(found.request, np.arange(trace.requests_count + 1)).tolist()
        by_request = (tuple(runs[start:end]) for start, end in pairwise(bounds))
        return cls(trace.requests_count, tuple(by_request))

    def ends(self, memory_pages: int) -> Counts:
        """Return for each request how many pages of its prompt are hit with so much memory, shape (requests,).

        O(runs log runs).
        """
        ends = np.zeros(self.requests_count, np.int64)
        kept: dict[tuple[int, int], int] = {}
        """Pages kept of each run, by (request that asks next, first page)."""
        latest: list[tuple[int, int]] = []
        """The same runs, those asked for last first; one that was asked for meanwhile is passed over."""
        due: dict[int, list[int]] = {}
        """First pages of the runs kept, by the request that asks for them."""
        used = 0
        for request, runs in enumerate(self.runs):
            for start in due.pop(request, ()):
                count = kept.pop((request, start))
                ends[request] += count
                used -= count
            for asks, start, count in runs:
                kept[asks, start] = count
                due.setdefault(asks, []).append(start)
                heappush(latest, (-asks, -start))
                used += count
            while used > memory_pages:
                asks, start = -latest[0][0], -latest[0][1]
                count = kept.get((asks, start), 0)
                dropped = min(count, used - memory_pages)
                used -= dropped
                if count > dropped:
                    kept[asks, start] = count - dropped
                else:
                    heappop(latest)
                    if count:
                        kept[asks, start] = 0
        return ends

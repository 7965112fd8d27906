"""References for a replay: what lru would have handed back with as much memory, and whoever knows every later request.

They are counted from the prompts after the replay, for full attention: lru by its stack, as many pages as the largest
tier holds, since that has what the others have; the clairvoyant bound for all tiers together, which nobody can pass.
What a reference would have had of a request and the run had not is *regret*, and counts for the reason that the run
missed it for.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unified_cache.replay.clairvoyant import FutureUses
from unified_cache.replay.lru_stack import LruStack
from unified_cache.replay.missed import ComponentMiss, MissCounter
from unified_cache.replay.plan import ReplayPlan
from unified_cache.replay.trace import TraceRequest
from unified_cache.replay.trace_pages import Counts, TracePages

__all__ = ["ReferenceHits", "References", "references_of"]

PAGES_MAX = 1 << 24
"""Pages asked for of the longest replay that is held against references, which takes some 50 bytes for each."""


@dataclass(frozen=True, slots=True)
class ReferenceHits:
    """Hits of one reference, and what it would have had that the run had not."""

    capacity_pages: int
    """Pages of full attention that it can hold, of one engine."""
    hit_pages: int
    hit_tokens: int
    series: Sequence[int]
    """Hit pages, for each point of the time series."""
    regret: Mapping[ComponentMiss, int]
    """Missed tokens that it would have had, by the reason that they were missed for, most first."""
    gained_tokens: int
    """Tokens that were handed back and that it would not have had."""

    @property
    def regret_tokens(self) -> int:
        """Regret for all reasons."""
        return sum(self.regret.values())

    def as_json(self, blocks_of: Callable[[int], float]) -> dict[str, object]:
        """Return it under stable names; ``blocks_of`` says how many blocks so many pages are."""
        return {
            "capacity_pages": self.capacity_pages,
            "hit_blocks": blocks_of(self.hit_pages),
            "hit_tokens": self.hit_tokens,
            "regret": [{**reason.as_json(), "tokens": tokens} for reason, tokens in self.regret.items()],
            "regret_tokens": self.regret_tokens,
            "gained_tokens": self.gained_tokens,
            "series": [blocks_of(pages) for pages in self.series],
        }


@dataclass(frozen=True, slots=True)
class References:
    """Both references of a replay."""

    lru: ReferenceHits
    clairvoyant: ReferenceHits


def references_of(
    requests: Sequence[TraceRequest],
    plan: ReplayPlan,
    store_bytes: int | None,
    hit_tokens: Sequence[int],
    misses: MissCounter,
    step: int,
) -> References | None:
    """Return the references of a replay that handed back so many tokens of each request; ``step`` make a point.

    ``store_bytes`` caps the store; None for no cap. None where there are more pages than ``PAGES_MAX``, and where
    engines share a store.
    """
    if not requests or (plan.engines > 1 and plan.storage is not None):
        return None
    if sum(map(plan.pages_of, requests)) > PAGES_MAX:
        return None
    lru_ends, best_ends = (np.zeros(len(requests), np.int64) for _ in range(2))
    input_tokens = np.array([request.input_length for request in requests], np.int64)
    lru_pages = best_pages = 0
    for engine in range(plan.engines):
        dealt = requests[engine :: plan.engines]
        if not dealt:
            continue
        # Numbered in the order in which they were served, whatever their timestamps.
        ordered = [replace(request, timestamp=place) for place, request in enumerate(dealt)]
        pages = TracePages.of(ordered, plan.layout.page_size, padded=plan.padded).cut(plan.device_pages[0])
        lru_pages, best_pages = _capacities(plan, store_bytes, max(pages.distinct_count, 1))
        lru_ends[engine :: plan.engines] = LruStack.of(pages).ends(lru_pages)
        best_ends[engine :: plan.engines] = FutureUses.of(pages).ends(best_pages)
    had = np.array(hit_tokens, np.int64)
    made = (
        _reference(capacity, ends, np.minimum(ends * plan.layout.page_size, input_tokens), had, misses, step)
        for capacity, ends in ((lru_pages, lru_ends), (best_pages, best_ends))
    )
    return References(*made)


def _capacities(plan: ReplayPlan, store_bytes: int | None, distinct_pages: int) -> tuple[int, int]:
    """Return the pages that lru and the clairvoyant policy hold: those of the largest tier, and of all."""
    tiers = [plan.device_pages[0], plan.host_pages[0]]
    if plan.storage is not None:
        page_bytes = plan.stored_bytes()[0]
        tiers.append(distinct_pages if store_bytes is None or not page_bytes else store_bytes // page_bytes)
    return min(max(tiers), distinct_pages), min(sum(tiers), distinct_pages)


def _reference(
    capacity: int, ends: Counts, tokens: Counts, had: Counts, misses: MissCounter, step: int
) -> ReferenceHits:
    regret: Counter[ComponentMiss] = Counter()
    for request in np.flatnonzero(tokens > had).tolist():
        regret.update(misses.between(request, int(had[request]), int(tokens[request])))
    return ReferenceHits(
        capacity_pages=capacity,
        hit_pages=int(ends.sum()),
        hit_tokens=int(tokens.sum()),
        series=[int(ends[start : start + step].sum()) for start in range(0, len(ends), step)],
        regret=dict(regret.most_common()),
        gained_tokens=int(np.maximum(had - tokens, 0).sum()),
    )

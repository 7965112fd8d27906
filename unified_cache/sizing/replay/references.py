"""References for a replay: hits of lru, and of a policy that knows every later request, with as much memory.

They are counted from the prompts after the replay, for full attention: lru by its stack, as many pages as the largest
tier holds, since that has what the others have; the clairvoyant bound for all tiers together, which no policy can pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from unified_cache.sizing.replay.clairvoyant import FutureUses
from unified_cache.sizing.replay.lru_stack import LruStack
from unified_cache.sizing.replay.plan import ReplayPlan
from unified_cache.sizing.replay.trace import TraceRequest
from unified_cache.sizing.replay.trace_pages import TracePages

PAGES_MAX = 1 << 24
"""Pages asked for of the longest replay that is held against references, which takes some 50 bytes for each."""


@dataclass(frozen=True, slots=True)
class ReferenceHits:
    """Hits of one reference."""

    capacity_pages: int
    """Pages of full attention that it can hold, of one engine."""
    hit_pages: int
    hit_tokens: int


def references_of(
    requests: Sequence[TraceRequest], plan: ReplayPlan, store_bytes: int | None
) -> dict[str, ReferenceHits] | None:
    """Return the hits of ``lru`` and ``clairvoyant``; ``store_bytes`` caps the store, None for no cap.

    None where there are more pages than ``PAGES_MAX``, and where engines share a store.
    """
    if not requests or (plan.engines > 1 and plan.storage is not None):
        return None
    if sum(map(plan.pages_of, requests)) > PAGES_MAX:
        return None
    found = {"lru": ReferenceHits(0, 0, 0), "clairvoyant": ReferenceHits(0, 0, 0)}
    for engine in range(min(plan.engines, len(requests))):
        # Numbered in the order in which they were served, whatever their timestamps.
        dealt = requests[engine :: plan.engines]
        ordered = [replace(request, timestamp=place) for place, request in enumerate(dealt)]
        trace = TracePages.of(ordered, plan.layout.page_size, padded=plan.padded).cut(plan.device_pages[0])
        lru_pages, best_pages = _capacities(plan, store_bytes, max(trace.distinct_count, 1))
        ends = {"lru": LruStack.of(trace).ends(lru_pages), "clairvoyant": FutureUses.of(trace).ends(best_pages)}
        for name, capacity in (("lru", lru_pages), ("clairvoyant", best_pages)):
            tokens = np.minimum(ends[name] * plan.layout.page_size, trace.input_tokens)
            before = found[name]
            found[name] = ReferenceHits(
                capacity, before.hit_pages + int(ends[name].sum()), before.hit_tokens + int(tokens.sum())
            )
    return found


def _capacities(plan: ReplayPlan, store_bytes: int | None, distinct_pages: int) -> tuple[int, int]:
    """Return the pages that lru and the clairvoyant policy hold: those of the largest tier, and of all."""
    tiers = [plan.device_pages[0], plan.host_pages[0]]
    if plan.storage is not None:
        page_bytes = plan.stored_bytes()[0]
        tiers.append(distinct_pages if store_bytes is None or not page_bytes else store_bytes // page_bytes)
    return min(max(tiers), distinct_pages), min(sum(tiers), distinct_pages)

"""Hits under policies that have no stack: some sizes of device and host memory are replayed, others are in between.

More memory hits no less, on each tier and in all. So whatever lies between two sizes that were replayed hits no less
than the smaller and no more than the larger, and where both say about the same nothing between them is replayed:

    host    .   x---x   .   .       x was replayed
            .   |   |   x---x       the boxes leave no more than half a point open
            x---x---x   |   |       . is replayed while there is a wider one
               device

What storage adds follows from the prompts, since a store evicts the least recently used under every plan; that part
has a stack (see ``tier_hits``). Only which windows there are depends on memory: they are made at places that it knows.
At least those are there that there would be under lru, at most those of a memory that knows all.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from unified_cache.errors import ConfigError
from unified_cache.plan.tier_hits import LruHits, TierEnds
from unified_cache.replay.plan import ReplayPlan
from unified_cache.replay.policies import ReplayPolicies
from unified_cache.replay.result import Hits
from unified_cache.replay.trace_pages import Counts, Floats, TracePages

__all__ = ["GAP_MAX", "REPLAYS_MAX", "PolicyHits", "ServePlan"]

GAP_MAX = 0.005
"""Share of the tokens that two neighbours may differ by before a size between them is replayed."""

REPLAYS_MAX = 40
"""Replays of one sweep: some ten minutes for twelve thousand requests. What they leave open then is said."""

Place = tuple[int, ...]
"""Numbers of which none falls where there is more memory."""

ServePlan = Callable[[ReplayPlan], Sequence[Hits]]
"""Serves the trace by a cache of a plan; returns the pages handed back of each request."""


@dataclass(frozen=True, slots=True)
class ReplayedMemory:
    """One size of device and host memory, replayed."""

    device: Counts
    """Pages of each prompt resumed from the device, shape (requests,)."""
    host: Counts
    """The same with host memory."""
    ratios: tuple[float, float]
    """Shares of the tokens that both are."""

    @classmethod
    def of(cls, hits: Sequence[Hits], trace: TracePages) -> "ReplayedMemory":
        """Take the hits of a replay without storage."""
        device = np.array([hit.device for hit in hits], np.int64)
        host = np.array([hit.total for hit in hits], np.int64)
        return cls(device, host, (trace.token_ratio(device), trace.token_ratio(host)))


class PolicyHits:
    """Hits of a trace in tiers of any sizes under any policies of eviction."""

    def __init__(self, lru: LruHits, serve: ServePlan, gap_max: float = GAP_MAX) -> None:
        """``lru`` knows what storage holds; ``serve`` replays its trace; ``gap_max`` is what may be left open."""
        self._lru = lru
        self._serve = serve
        self._gap_max = gap_max
        self._replayed: dict[Place, ReplayedMemory] = {}
        self._known: set[Place] = set()
        """Sizes that are not replayed any more when somebody asks for them."""

    @property
    def trace(self) -> TracePages:
        """The trace."""
        return self._lru.trace

    @property
    def replays_count(self) -> int:
        """Replays so far."""
        return len(self._replayed)

    @property
    def disorder(self) -> float:
        """Largest share of the tokens by which a replay with more memory handed back less than one with less."""
        return max(
            (
                small.ratios[1] - large.ratios[1]
                for place, small in self._replayed.items()
                for other, large in self._replayed.items()
                if _fits(place, other)
            ),
            default=0.0,
        )

    def prepare(self, plans: Iterable[ReplayPlan], tell: Callable[[str], None]) -> None:
        """Replay as many sizes of memory as leave little open for all of these, or ``REPLAYS_MAX`` of them.

        Raises:
            ConfigError: a plan has other pages than the trace, or several engines.
        """
        by_memory = {self._place(plan): plan for plan in plans}
        for plan in by_memory.values():
            self._check(plan)
        memories = sorted(by_memory)
        brackets = Brackets(np.array(memories), self._gap_max)
        while (chosen := brackets.next_place()) is not None and brackets.known_count < REPLAYS_MAX:
            memory = memories[chosen]
            brackets.know(chosen, self._replay(memory, by_memory[memory]).ratios)
            tell(f"{brackets.known_count} combinations replayed, {brackets.widest * 100:.1f} points left open")
        self._known.update(memories)

    def ends(self, plan: ReplayPlan) -> TierEnds:
        """Return the hits under a plan, at least; those ``at_most`` are told too.

        A size that nobody has prepared is replayed where its neighbours do not tell it.

        Raises:
            ConfigError: the plan has other pages than the trace, or several engines.
        """
        self._check(plan)
        device_ends, memory_ends, at_most = self._told(self._place(plan), plan)
        under_lru = replace(plan, policies=ReplayPolicies())
        told = self._lru.with_storage(under_lru, device_ends, memory_ends)
        if plan.storage is not None:
            at_most = np.maximum(at_most, self._lru.stored_at_most(under_lru))
        return replace(told, at_most=np.maximum(told.storage, at_most))

    def _check(self, plan: ReplayPlan) -> None:
        self._lru.check_trace(plan)
        if plan.engines > 1:
            raise ConfigError(f"a plan for policies without a stack is that of one engine, found {plan.engines}")

    def _told(self, memory: Place, plan: ReplayPlan) -> tuple[Counts, Counts, Counts]:
        """Return the ends on the device, those with host memory, and those that there may be at most."""
        below = [each for size, each in self._replayed.items() if _fits(size, memory)]
        above = [each for size, each in self._replayed.items() if _fits(memory, size)]
        is_told = below and above and (memory in self._known or _gap(below, above) <= self._gap_max)
        if not is_told:
            below = above = [self._replay(memory, plan)]
        device = max(below, key=lambda each: each.ratios[0]).device
        host = max(below, key=lambda each: each.ratios[1]).host
        return device, np.maximum(device, host), min(above, key=lambda each: each.ratios[1]).host

    def _place(self, plan: ReplayPlan) -> Place:
        """Return the place of a plan's memory; two that no comparison holds for have none at or above the other.

        What is loaded from host memory has another history than what is computed, and some policies hit less with it;
        and a tier that does not hold the longest prompt is given the beginning of it alone.
        """
        kinds = [min(tier[0], self.trace.longest_pages) for tier in (plan.device_pages, plan.host_pages)]
        return (*kinds, *(-kind for kind in kinds), *plan.device_pages, *plan.host_pages)

    def _replay(self, memory: Place, plan: ReplayPlan) -> ReplayedMemory:
        if memory not in self._replayed:
            without_storage = replace(plan, storage=None, storage_bytes=None)
            self._replayed[memory] = ReplayedMemory.of(self._serve(without_storage), self.trace)
        return self._replayed[memory]


class Brackets:
    """Bounds on the hits of sizes of which some are known; chooses the one to look at next."""

    def __init__(self, places: npt.NDArray[np.int64], gap_max: float) -> None:
        """``places`` has a row for each size, in which no number falls where there is more memory."""
        self._places = places
        self._gap_max = gap_max
        self._low = np.full((len(places), 2), -np.inf)
        self._high = np.full((len(places), 2), np.inf)
        self.known_count = 0

    @property
    def widest(self) -> float:
        """Largest share of the tokens that is open about any size."""
        return float(self._open().max(initial=0.0))

    def know(self, number: int, ratios: tuple[float, float]) -> None:
        """Write down what a size hits: no less do larger ones, no more do smaller ones."""
        place, found = self._places[number], np.array(ratios)
        larger, smaller = (self._places >= place).all(axis=1), (self._places <= place).all(axis=1)
        self._low[larger] = np.maximum(self._low[larger], found)
        self._high[smaller] = np.minimum(self._high[smaller], found)
        self._low[number] = self._high[number] = found
        self.known_count += 1

    def between(self, number: int) -> tuple[float, float]:
        """Return the least and the most that a size hits in all."""
        return float(self._low[number, 1]), float(self._high[number, 1])

    def next_place(self) -> int | None:
        """Return the size to look at next: of those about which most is open, one in their middle; None for none."""
        open_ratios = self._open()
        widest = float(open_ratios.max(initial=0.0))
        if widest <= self._gap_max:
            return None
        nothing_below = np.isinf(self._low).any(axis=1)
        if nothing_below.any():
            return int(np.flatnonzero(nothing_below)[0])
        candidates = np.flatnonzero(open_ratios >= widest)
        if np.isinf(widest):
            return int(candidates[-1])
        ranks = _ranks(self._places[candidates])
        middle = (ranks.min(axis=0) + ranks.max(axis=0)) / 2
        return int(candidates[np.abs(ranks - middle).sum(axis=1).argmin()])

    def _open(self) -> Floats:
        width: Floats = (self._high - self._low).max(axis=1)
        return width


def _ranks(places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return each number's place among the different ones of its column."""
    return np.stack([np.unique(column, return_inverse=True)[1] for column in places.T], axis=1)


def _fits(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    return all(less <= more for less, more in zip(small, large, strict=True))


def _gap(below: Sequence[ReplayedMemory], above: Sequence[ReplayedMemory]) -> float:
    """Return how much is open between sizes of less memory and sizes of more."""
    return max(
        min(each.ratios[number] for each in above) - max(each.ratios[number] for each in below) for number in (0, 1)
    )

"""Eviction policies: the order in which the pages of a lane are evicted, and the history that it depends on.

A policy turns the history of a node in one lane into a *rank*; among what may go, the lowest rank goes first. It sees
neither the tree nor the queues, and cannot make anything go that is locked or that something stands on.

=========  =========================================================================================================
lru        least recently used; the stamp is the rank, and nothing else is kept
lfu        least often used; a use counts half after each half-life, so that what was popular once goes in the end.
           As LRFU with F(x) = 2 ** (-x / half-life), D. Lee et al., IEEE Transactions on Computers 50 (2001)
slru       lru in two segments: what was used again is protected, and goes after the rest. The protected segment has
           a bounded share; what falls out of it is the youngest of the rest. R. Karedla et al., Computer 27 (1994)
fifo       first come, first gone
priority   lowest priority first, lru within
adaptive   what a forecast says is worth least; see ``unified_cache.tree.forecast``. Here it is as lru: a queue for each
           kind of request, in which the stamp is the rank
=========  =========================================================================================================
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from unified_cache.config import EvictionConfig, EvictionPolicy

__all__ = [
    "UNNAMED",
    "Ages",
    "Fifo",
    "History",
    "Lfu",
    "Policy",
    "Prioritised",
    "Rank",
    "Segmented",
    "Segments",
    "policy_of",
]

PRIORITY_BIT = 64
"""Ranks hold the priority above this bit and the stamp below; a stamp counts touches and stays far smaller."""
Rank: TypeAlias = int | float
"""Place in a queue. Stamps and priorities stay whole numbers: as floats, those above 2**53 could not be told apart."""
UNNAMED = -(1 << 31)
"""Priority of pages that no request named one for: they go first."""
AGES_MAX = 32
"""Steps in which a time to live is measured: a page is seen to be expired at most a 32nd of it late."""


@dataclass(slots=True)
class History:
    """History of a node in one lane beside its stamp; a split gives both halves a copy."""

    arrived: int
    """Clock when the lane last went from holding nothing of the node to holding something."""
    weight: float | None = None
    """Logarithm of the decayed count of uses (lfu); None before the first use after the arrival."""
    priority: int = UNNAMED
    """The highest that requests that needed the pages have named."""
    protected: bool = False
    """Used again, and not demoted since (slru)."""
    demoted: int = 0
    """Clock when last demoted."""
    preferences: int = 0
    """Preferences that cover the node in this lane."""


class Policy(Protocol):
    """Orders one lane.

    # Behavior

    * ``rank`` depends on history and stamp alone, and asks no clock
    * it never falls: no touch, use, arrival or higher priority makes a node go earlier. Only so may a queue find out
      a new rank when the node comes up; what makes a node go earlier, as demotion does, is a change of queue
    """

    def use(self, history: History, now: int) -> None:
        """Write down that a request took the pages once more, at clock ``now``."""
        ...

    def rank(self, history: History, stamp: int) -> Rank:
        """Return the rank of a node that was last touched at ``stamp``; the lowest goes first."""
        ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """First in, first out."""

    def use(self, history: History, now: int) -> None:
        """Leave it: uses do not count."""

    def rank(self, history: History, stamp: int) -> Rank:
        """Return the arrival."""
        return history.arrived


@dataclass(frozen=True, slots=True)
class Lfu:
    """Least often used, with uses that lose half their weight every ``half_life`` touches.

    The weight of uses at clocks t is kept as log2 of the sum of 2 ** (t / half_life). Time passing divides all
    sums by the same factor, so their order stands until something is used: no weight has to be aged.
    """

    half_life: int

    def use(self, history: History, now: int) -> None:
        """Add one use; the arrival was the first."""
        old = self.rank(history, now)
        new = now / self.half_life
        history.weight = max(old, new) + math.log2(1 + math.exp2(-abs(old - new)))

    def rank(self, history: History, stamp: int) -> Rank:
        """Return the weight."""
        return history.arrived / self.half_life if history.weight is None else history.weight


@dataclass(frozen=True, slots=True)
class Segmented:
    """Least recently used within a segment; the queues keep the segments, and their share, apart."""

    def use(self, history: History, now: int) -> None:
        """Protect it."""
        history.protected = True

    def rank(self, history: History, stamp: int) -> Rank:
        """Return the stamp, or when it was demoted if that was later."""
        return max(stamp, history.demoted)


@dataclass(frozen=True, slots=True)
class Prioritised:
    """Lowest priority first, least recently used within."""

    def use(self, history: History, now: int) -> None:
        """Leave it: uses do not count."""

    def rank(self, history: History, stamp: int) -> Rank:
        """Return priority and stamp as one number."""
        return (history.priority << PRIORITY_BIT) + stamp


def policy_of(kind: EvictionPolicy, config: EvictionConfig) -> Policy | None:
    """Make the policy of one lane; None for those whose rank is the stamp and which need no history."""
    policies: dict[EvictionPolicy, Policy | None] = {
        EvictionPolicy.LRU: None,
        EvictionPolicy.LFU: Lfu(config.lfu_half_life_touches),
        EvictionPolicy.SLRU: Segmented(),
        EvictionPolicy.FIFO: Fifo(),
        EvictionPolicy.PRIORITY: Prioritised(),
        EvictionPolicy.ADAPTIVE: None,
    }
    return policies[kind]


@dataclass(slots=True)
class Segments:
    """Pages of one lane, and how many of them are protected."""

    share: float
    """Largest share of the pages held that may stay protected."""
    held_pages: int = 0
    protected_pages: int = 0

    def overfull(self) -> bool:
        """Tell whether something has to be demoted."""
        return self.protected_pages > self.share * self.held_pages


class Ages:
    """Clock that finds the stamps older than a time to live, without a time per node."""

    __slots__ = ("_clock", "_log", "_step_began_s", "_ttl_s")

    def __init__(self, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._step_began_s = -math.inf
        self._log: deque[tuple[float, int]] = deque(maxlen=AGES_MAX + 2)
        """(time, stamp) of the last touch of each step, oldest first: that stamp and all before are that old."""

    def note(self, stamp: int) -> None:
        """Write down that ``stamp`` is of now."""
        now_s = self._clock()
        if now_s - self._step_began_s >= self._ttl_s / AGES_MAX:
            self._step_began_s = now_s
        else:
            self._log.pop()
        self._log.append((now_s, stamp))

    def expired(self) -> int:
        """Return the newest stamp that is known to be older than the time to live; 0 if none is."""
        limit_s = self._clock() - self._ttl_s
        while len(self._log) > 1 and self._log[1][0] < limit_s:
            self._log.popleft()
        return self._log[0][1] if self._log and self._log[0][0] < limit_s else 0

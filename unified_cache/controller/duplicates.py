"""Compare duplicates with what the cache holds: a wrong page that no checksum sees shows where it is computed again.

Two requests that compute the same page hand over two copies of it, and so does a request that computes again what
follows a prefix from the cache: ``insert`` keeps one. Some others are compared with it before their slots are reused.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from unified_cache.controller.copies.gpu import PageDistance
from unified_cache.controller.memory import PageMemory
from unified_cache.core.page import Prompt
from unified_cache.core.pool import ModelLayout, PoolSpec, Slots, Tier
from unified_cache.tree import Inserted

PENDING_MAX = 16
"""Comparisons of pages that a GPU has not made yet; while there are as many, none is begun."""

PAGE_STEP = 7919
"""A prime: the pages compared of one insert and the next lie far apart, so that all of a prompt have their turn."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DuplicateCounts:
    """Pages in one pool that were computed again and compared with the held ones, by outcome."""

    equal: int = 0
    within_noise: int = 0
    """Other bytes, and as near in every layer as half the digits of its dtype."""
    diverged: int = 0
    """Further apart: the held page or what one of the two was computed from was wrong."""

    @property
    def compared(self) -> int:
        """All of them."""
        return self.equal + self.within_noise + self.diverged

    def __str__(self) -> str:
        return (
            f"compared {self.compared} duplicate pages with the held ones: {self.equal} equal, "
            f"{self.within_noise} within the noise, {self.diverged} diverged"
        )


@dataclass(frozen=True, slots=True)
class _Pending:
    distance: PageDistance
    pool: PoolSpec
    page: int


class DuplicateCheck:
    """Samples the duplicates of inserts, and counts what became of the comparisons. The owner's thread calls it.

    Of every ``every`` inserts with duplicates one is sampled, 0 for none: a page of each component. In host memory it
    is compared at once; a GPU compares it after what the engine's streams have been given, and nobody waits for that.
    """

    def __init__(self, layout: ModelLayout, memory: PageMemory, every: int) -> None:
        self._layout = layout
        self._memory = memory
        self._every = every
        self._inserts_count = 0
        self._pending: deque[_Pending] = deque()
        self._counts = DuplicateCounts()

    def sample(self, prompt: Prompt, start: int, slots: Sequence[Slots], inserted: Inserted) -> None:
        """Compare some of an insert's duplicates, of which there are any; before any slot is allocated.

        ``slots`` are those given for the pages [start, pages_count), by component; the duplicates are among them.
        """
        if not self._every:
            return
        self._inserts_count += 1
        if (self._inserts_count - 1) % self._every:
            return
        self.collect()
        for component, (given, duplicates) in enumerate(zip(slots, inserted.duplicates, strict=True)):
            if not len(duplicates) or len(self._pending) >= PENDING_MAX:
                continue
            duplicate = int(duplicates[self._inserts_count * PAGE_STEP % len(duplicates)])
            page = start + int(np.flatnonzero(given == duplicate)[0])
            held = inserted.slot(Tier.DEVICE, component, page)
            for pool in self._layout.components[component].pools:
                if self._memory.layers_count(pool):
                    self._pending.append(_Pending(self._memory.compare(pool, duplicate, held), pool, page))
        self.collect()

    def collect(self) -> None:
        """Count the comparisons that have been made."""
        while self._pending and self._pending[0].distance.is_ready:
            pending = self._pending.popleft()
            excess = pending.distance.excess
            if not any(excess):
                self._counts.equal += 1
            elif all(each <= 1 for each in excess):
                self._counts.within_noise += 1
            else:
                self._counts.diverged += 1
                if self._counts.diverged == 1:
                    self._warn(pending, excess)

    def counts(self) -> DuplicateCounts:
        """Return what was counted until now; a copy."""
        self.collect()
        return replace(self._counts)

    def report(self) -> None:
        """Log what was counted, if anything was: one line, a warning where pages diverged."""
        counts = self.counts()
        if counts.compared:
            logger.log(logging.WARNING if counts.diverged else logging.INFO, "%s", counts)

    def _warn(self, pending: _Pending, excess: Sequence[float]) -> None:
        wrong = [layer for layer, each in enumerate(excess) if not each <= 1]
        logger.warning(
            "page %d of pool %s was computed again and diverged from the held one in %d of %d layers, first in "
            "layer %d: a hit may be wrong; further ones are only counted",
            pending.page,
            pending.pool.name,
            len(wrong),
            len(excess),
            wrong[0],
        )

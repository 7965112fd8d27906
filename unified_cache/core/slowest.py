"""The slowest of what has ended in the last minutes, bounded in number whatever comes."""

import heapq
import itertools
from typing import Generic, TypeVar

__all__ = ["Slowest"]

SLOWEST_MAX = 8
"""How many are told of: as many as a page or a terminal has room for."""

PERIOD_S = 300.0
"""What ended in this period and in the one before it is told of."""

Ended = TypeVar("Ended")


class Slowest(Generic[Ended]):
    """The slowest of this period and of the one before it. For one thread.

    Each period keeps the slowest ``SLOWEST_MAX`` in a heap, so that one more costs a comparison and hardly ever more:
    ask ``is_slow`` before making what is to be noted.
    """

    __slots__ = ("_before", "_began_s", "_latest", "_now", "_order")

    def __init__(self, now_s: float) -> None:
        """Begin at ``now_s``, by a clock that never goes back."""
        self._began_s = now_s
        self._now: list[tuple[float, int, Ended]] = []
        self._before: list[tuple[float, int, Ended]] = []
        self._order = itertools.count()
        """Tells apart what took equally long."""
        self._latest: tuple[Ended, ...] | None = ()
        """What is told of; None where that has changed since it was told."""

    def is_slow(self, seconds: float, now_s: float) -> bool:
        """Tell whether what took ``seconds`` and ends now is to be noted; begin a new period if it is time."""
        if now_s - self._began_s >= PERIOD_S:
            self._before = self._now if now_s - self._began_s < 2 * PERIOD_S else []
            self._now = []
            self._began_s = now_s
            self._latest = None
        return len(self._now) < SLOWEST_MAX or seconds > self._now[0][0]

    def note(self, seconds: float, ended: Ended) -> None:
        """Take what is slow enough."""
        self._latest = None
        entry = (seconds, next(self._order), ended)
        if len(self._now) < SLOWEST_MAX:
            heapq.heappush(self._now, entry)
        else:
            heapq.heapreplace(self._now, entry)

    def latest(self) -> tuple[Ended, ...]:
        """Return them, the slowest first, as many as are told of; the same tuple until there are others."""
        if self._latest is None:
            slowest = heapq.nlargest(SLOWEST_MAX, [*self._now, *self._before])
            self._latest = tuple(ended for _, _, ended in slowest)
        return self._latest

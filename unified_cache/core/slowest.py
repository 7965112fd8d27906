"""The slowest calls or operations of the last minutes, bounded in number."""

import heapq
import itertools
from typing import Generic, TypeVar

__all__ = ["Slowest"]

SLOWEST_MAX = 8
"""How many are reported: as many as a page or a terminal has room for."""

PERIOD_S = 300.0
"""Length of a period; the slowest of this one and of the one before it are reported."""

Ended = TypeVar("Ended")


class Slowest(Generic[Ended]):
    """The slowest of this period and of the one before it, a heap of each. For one thread.

    Ask ``is_slow``, which mostly costs a comparison, before making the entry to record.
    """

    __slots__ = ("_before", "_began_s", "_latest", "_now", "_order")

    def __init__(self, now_s: float) -> None:
        """Begin at ``now_s``, by a clock that never goes back."""
        self._began_s = now_s
        self._now: list[tuple[float, int, Ended]] = []
        self._before: list[tuple[float, int, Ended]] = []
        self._order = itertools.count()
        """Order of entries that took equally long."""
        self._latest: tuple[Ended, ...] | None = ()
        """The reported entries; None if they have changed since."""

    def is_slow(self, seconds: float, now_s: float) -> bool:
        """Return whether an entry of ``seconds`` that ends now is to be recorded; begin a new period if it is time."""
        if now_s - self._began_s >= PERIOD_S:
            self._before = self._now if now_s - self._began_s < 2 * PERIOD_S else []
            self._now = []
            self._began_s = now_s
            self._latest = None
        return len(self._now) < SLOWEST_MAX or seconds > self._now[0][0]

    def record(self, seconds: float, ended: Ended) -> None:
        """Record an entry that ``is_slow``."""
        self._latest = None
        entry = (seconds, next(self._order), ended)
        if len(self._now) < SLOWEST_MAX:
            heapq.heappush(self._now, entry)
        else:
            heapq.heapreplace(self._now, entry)

    def latest(self) -> tuple[Ended, ...]:
        """Return the slowest first, at most ``SLOWEST_MAX``; the same tuple until there are others."""
        if self._latest is None:
            slowest = heapq.nlargest(SLOWEST_MAX, [*self._now, *self._before])
            self._latest = tuple(ended for _, _, ended in slowest)
        return self._latest

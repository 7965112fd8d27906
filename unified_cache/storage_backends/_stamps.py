"""When pages were last used: times that only grow, and those of reads kept back until many can be written together."""

from collections.abc import Callable, Sequence
from threading import Lock

from unified_cache.seal import Label
from unified_cache.storage_backends.protocol import PageIO

__all__ = ["PAGES_WAITING_MAX", "STAMP_GRAIN_NS", "Clock", "Stamps"]

Clock = Callable[[], int]
"""Gives nanoseconds since the epoch."""

STAMP_GRAIN_NS = 60_000_000_000
"""A page is stamped for its reads once in so long, as relatime does: hot pages cost no metadata writes."""

PAGES_WAITING_MAX = 512
"""Pages read and not yet stamped, whose use a crash forgets; writing them takes 3 ms."""


class Stamps:
    """Times of use. A read costs no call on the disk for its time, only every so many do. Thread-safe."""

    def __init__(self, clock: Clock, later_than_ns: int = 0) -> None:
        """``later_than_ns`` is a time that each one is to be later than."""
        self._clock = clock
        self._last_ns = max(clock(), later_than_ns)
        self._written_ns = self._last_ns
        self._waiting: dict[Label, int] = {}
        self._guard = Lock()

    def new(self, count: int) -> int:
        """Take ``count`` times that are later than all before, and return the last of them."""
        with self._guard:
            return self._new(count)

    def note(self, pages: Sequence[PageIO], hits: Sequence[bool]) -> dict[Label, int]:
        """Note that hits were read now, the first page at the latest time, each other one a nanosecond earlier.

        Return what is to be written now, of this read and of earlier ones, the least recent first.
        """
        with self._guard:
            stamp = self._new(len(pages))
            waiting = self._waiting
            for number in range(len(pages) - 1, -1, -1):
                if hits[number]:
                    label = pages[number].label
                    waiting.pop(label, None)
                    waiting[label] = stamp - number
            is_due = stamp - self._written_ns > STAMP_GRAIN_NS or len(waiting) > PAGES_WAITING_MAX
            return self._take(stamp) if is_due else {}

    def take(self) -> dict[Label, int]:
        """Return all that waits to be written, the least recent first."""
        with self._guard:
            return self._take(self._written_ns)

    def _new(self, count: int) -> int:
        self._last_ns = max(self._clock(), self._last_ns + 1) + count
        return self._last_ns

    def _take(self, now_ns: int) -> dict[Label, int]:
        taken, self._waiting, self._written_ns = self._waiting, {}, now_ns
        return taken

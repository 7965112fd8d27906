"""Times of last use: they only grow, and those of reads are kept back until many can be written together."""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol

from unified_cache.seal import Label
from unified_cache.storage_backends.protocol import Answer

__all__ = ["PAGES_WAITING_MAX", "STAMP_GRAIN_NS", "Clock", "Stamps"]

Clock = Callable[[], int]
"""Gives nanoseconds since the epoch."""

STAMP_GRAIN_NS = 60_000_000_000
"""A page is stamped for its reads once in so long, as relatime does: hot pages cost no metadata writes."""

STAMP_MAX_NS = 1 << 62
"""In the year 2116; what says a later time is damaged."""

PAGES_WAITING_MAX = 512
"""Pages read and not yet stamped, whose use a crash forgets; writing them takes 3 ms."""


class UsedPage(Protocol):
    """A page that was asked for."""

    @property
    def label(self) -> Label:
        """Name of the page."""
        ...


class Stamps:
    """Times of use. A read costs no call on the disk for its time, only every so many do. Thread-safe."""

    def __init__(self, clock: Clock, *, notes_reads: bool = True) -> None:
        """A tool that only looks notes no reads."""
        self._clock = clock
        self._notes_reads = notes_reads
        self._last_ns = clock()
        self._written_ns = self._last_ns
        self._waiting: dict[Label, int] = {}
        self._guard = Lock()

    def outrun(self, newest_ns: int) -> None:
        """Let each time from now on be later than ``newest_ns``, whatever the clock says."""
        with self._guard:
            self._last_ns = self._written_ns = max(self._last_ns, min(newest_ns, STAMP_MAX_NS))

    def new(self, count: int) -> int:
        """Take ``count`` times that are later than all before, and return the last of them."""
        with self._guard:
            return self._new(count)

    def note(
        self, pages: Sequence[UsedPage], hits: Sequence[Answer | bool], stamp: int | None = None
    ) -> dict[Label, int]:
        """Note that hits were used, the first page at ``stamp``, or now, each other one a nanosecond earlier.

        Return what is to be written now, of this use and of earlier ones, the least recent first.
        """
        if not self._notes_reads:
            return {}
        with self._guard:
            latest = self._new(len(pages)) if stamp is None else stamp
            self._add(pages, hits, latest)
            return self._due(latest)

    def are_due(self) -> bool:
        """Tell whether the next use would have times written."""
        return len(self._waiting) > PAGES_WAITING_MAX or self._clock() - self._written_ns > STAMP_GRAIN_NS

    def keep(self, pages: Sequence[UsedPage], hits: Sequence[bool]) -> None:
        """Note that hits were used, as ``note`` does, and leave it to a later use to have it written."""
        if self._notes_reads:
            with self._guard:
                self._add(pages, hits, self._new(len(pages)))

    def touch(self, labels: Sequence[Label]) -> dict[Label, int]:
        """Note that objects are used now, the first one last; return what is to be written now, as ``note`` does."""
        if not self._notes_reads:
            return {}
        with self._guard:
            latest = self._new(len(labels))
            for number in range(len(labels) - 1, -1, -1):
                self._waiting.pop(labels[number], None)
                self._waiting[labels[number]] = latest - number
            return self._due(latest)

    def unwritten(self) -> dict[Label, int]:
        """Return the times that wait to be written; a copy."""
        with self._guard:
            return dict(self._waiting)

    def take(self) -> dict[Label, int]:
        """Return all that waits to be written, the least recent first."""
        with self._guard:
            return self._take(self._written_ns)

    def _add(self, pages: Sequence[UsedPage], hits: Sequence[Answer | bool], latest: int) -> None:
        waiting = self._waiting
        for number in range(len(pages) - 1, -1, -1):
            if hits[number]:
                label = pages[number].label
                waiting.pop(label, None)
                waiting[label] = latest - number

    def _new(self, count: int) -> int:
        self._last_ns = max(self._clock(), self._last_ns + 1) + count
        return self._last_ns

    def _due(self, now_ns: int) -> dict[Label, int]:
        if now_ns - self._written_ns > STAMP_GRAIN_NS or len(self._waiting) > PAGES_WAITING_MAX:
            return self._take(now_ns)
        return {}

    def _take(self, now_ns: int) -> dict[Label, int]:
        taken, self._waiting, self._written_ns = self._waiting, {}, now_ns
        return taken

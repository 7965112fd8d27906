"""Head start of a request: the head of its prompt is computed while storage reads the tail, until both meet.

    [0, lock.end)      pages of the tree, pinned
    [lock.end, done)   computed here; handed over to the tree when the tail is joined to them
    [landed.start, ..) have come from storage

How far to compute at a time follows from how fast both are. Of ``gap`` pages between them, of which one takes
``read_s`` to read and ``compute_s`` to compute, ``gap * read_s / (read_s + compute_s)`` are computed until they meet:
so many in one chunk, and none where that is less than half a page. Until the first page has come nobody knows how long
one takes; then a chunk takes no longer than has been waited already, so that a fast store soon finds the engine free.
"""

from collections.abc import Callable, Iterator

import numpy as np
from transformers import DynamicCache

from unified_cache.cache import UnifiedCache
from unified_cache.controller import Operation, OperationState
from unified_cache.integrations.transformers.pages import DevicePages
from unified_cache.integrations.transformers.stage import Stage
from unified_cache.page import Prompt
from unified_cache.pool import Slots
from unified_cache.tails import LandedTail
from unified_cache.tree import Lock

__all__ = ["HeadStart", "MeetingPlace"]


class MeetingPlace:
    """Estimate of where computing, from the start, and reading, from the end, meet; by what both took until now."""

    __slots__ = ("_began_s", "_compute_s", "_landed_pages", "_now_s")

    def __init__(self) -> None:
        self._compute_s = 0.0
        """For a page; not positive while that is unknown."""
        self._began_s: float | None = None
        self._now_s = 0.0
        self._landed_pages = 0

    def note_computed(self, pages: int, seconds: float) -> None:
        """Note what computing some pages took."""
        self._compute_s = seconds / pages

    def note_landed(self, landed: LandedTail | None, now_s: float) -> None:
        """Note how much has come by now; None before anything is read."""
        self._now_s = now_s
        self._began_s = now_s if self._began_s is None else self._began_s
        if landed is not None:
            self._landed_pages = landed.end - landed.start

    def pages_ahead(self, gap: int) -> int:
        """Return how many pages to compute next, of ``gap`` that are neither computed nor read; 0 to wait for them."""
        waited_s = 0.0 if self._began_s is None else self._now_s - self._began_s
        if not (waited_s > 0 and self._compute_s > 0):
            return 1
        read_s = waited_s / max(self._landed_pages, 1)
        ahead = gap * read_s / (read_s + self._compute_s)
        if not self._landed_pages:
            ahead = max(1.0, min(ahead, waited_s / self._compute_s))
        return max(1, round(ahead)) if ahead >= 0.5 else 0


class HeadStart:
    """Computes the head of a prompt that storage has the tail of; in the end the tree has both, as far as they came."""

    __slots__ = (
        "_cache",
        "_chunk_pages",
        "_clock",
        "_fresh",
        "_operation",
        "_pages",
        "_tokens",
        "computed_pages",
        "lock",
    )

    def __init__(
        self,
        cache: UnifiedCache,
        pages: DevicePages,
        tokens: list[int],
        chunk_pages: int,
        clock: Callable[[], float],
    ) -> None:
        """Take the tokens of a prompt, to be computed in chunks; nothing is asked or allocated yet."""
        self._cache = cache
        self._pages = pages
        self._tokens = tokens
        self._chunk_pages = chunk_pages
        self._clock = clock
        self._operation: Operation | None = None
        self._fresh: list[Slots] = []
        self.lock: Lock | None = None
        """Pins the head, until ``abort``."""
        self.computed_pages = 0

    def steps(self, asked: Prompt) -> Iterator[Stage]:
        """Read and compute until both meet; yield after each chunk, and while there is nothing to do but wait.

        ``asked`` has the pages to be resumed of the prompt.
        """
        cache = self._cache
        tail = self._operation = cache.prefetch_tail(asked)
        if tail is None:
            return
        found = cache.match(asked)
        if found.host_end > found.device_end:
            loading = cache.load(asked)
            while loading is not None and loading.state is OperationState.RUNNING:
                yield Stage.LOAD
            found = cache.match(asked)
        ends = cache.checkpoint_ends(found)
        self.lock = lock = cache.lock(found)
        components = range(len(self._pages.layout.components))
        self._fresh = [np.empty(0, np.int32) for _ in components]
        past = self._pages.restore([cache.slots(lock, number) for number in components], lock.end)
        yield from self._compute(tail, asked.pages_count, past, ends)
        self._hand_over(asked)
        joining = cache.join_tail(tail)
        if joining is not None:
            self._operation = None  # it ends by itself, once its store is in no call
        while joining is not None and joining.state is OperationState.RUNNING:
            yield Stage.LOAD

    def _compute(self, tail: Operation, pages_count: int, past: DynamicCache, ends: tuple[int, ...]) -> Iterator[Stage]:
        """Compute the head until it meets the tail, or there is no room for more of it."""
        meeting = MeetingPlace()
        while True:
            landed = self._cache.landed_tail(tail)
            if landed is None and tail.state is not OperationState.RUNNING:
                return
            gap = (pages_count if landed is None else landed.start) - self._end
            if gap <= 0:
                return
            meeting.note_landed(landed, self._clock())
            count = min(meeting.pages_ahead(gap), self._chunk_pages - self._end % self._chunk_pages)
            if not count:
                yield Stage.FETCH
                continue
            began_s = self._clock()
            if not self._compute_pages(past, count, ends):
                return
            meeting.note_computed(count, self._clock() - began_s)
            yield Stage.COMPUTE

    def _compute_pages(self, past: DynamicCache, count: int, ends: tuple[int, ...]) -> bool:
        """Compute the next pages, and keep of windows what a resume at their end needs; False if there is no room."""
        cache, lock, start = self._cache, self.lock, self._end
        assert lock is not None
        end = start + count
        taken = cache.allocate(cache.pages_to_allocate(start, end, (*ends, end)))
        if taken is None:
            return False
        self._fresh = [np.concatenate(pair) for pair in zip(self._fresh, taken, strict=True)]
        size = self._pages.layout.page_size
        while start < end:
            chunk_end = self._pages.chunk_end(start, end, [slots[start - end :] for slots in taken])
            self._pages.kept.run(past, self._tokens[start * size : chunk_end * size])
            self._pages.capture(past, [slots[start - lock.end : chunk_end - lock.end] for slots in self._fresh])
            start = chunk_end
        self.computed_pages += count
        cache.trim(self._fresh, cache.pages_to_allocate(lock.end, end, (*ends, end)))
        return True

    def _hand_over(self, asked: Prompt) -> None:
        """Give the pages that were computed to the tree."""
        assert self.lock is not None
        if len(self._fresh[0]):
            self.lock = self._cache.insert(asked.head(self._end), self._fresh, self.lock)
        self._fresh = []

    @property
    def _end(self) -> int:
        """Pages that are there: those of the tree, then those computed here."""
        assert self.lock is not None
        return self.lock.end + len(self._fresh[0])

    def abort(self) -> None:
        """Give back all that it holds; what has been handed over stays cached. Twice is once."""
        if self._operation is not None:
            self._cache.cancel(self._operation)
            self._operation = None
        if self._fresh:
            self._cache.free(self._fresh)
            self._fresh = []
        if self.lock is not None:
            self._cache.release(self.lock)
            self.lock = None

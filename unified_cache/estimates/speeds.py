"""Choice between reading what storage has of a prompt and computing it, by how long both took lately.

    reading    calls * call_s + bytes * byte_s   (``ReadTimes``)
    computing  tokens * token_s                  (``PrefillTime``)

What takes less is done. Ranks of a group have measured each their own; a read is over when the slowest rank has its
pages, and so they agree on the largest of each time before they compare (``ranks.largest_of_all``).
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from unified_cache.config import CacheConfig
from unified_cache.controller import LeftAlone, Operation, StorageTier
from unified_cache.controller.jobs import calls_of
from unified_cache.estimates.prefill import PrefillTime
from unified_cache.estimates.reads import ReadTimes, pages_to_read
from unified_cache.pool import ModelLayout, PageNumbers, Pages, all_pages
from unified_cache.ranks import LocalRanks, RankGroup, largest_of_all
from unified_cache.transfer_policy import TransferPolicy

__all__ = ["TransferSpeeds"]

TRIAL_EVERY = 8
"""Times in a row that storage is left alone, until a little is read to see whether it has become faster."""

TRIAL_S = 0.1
"""Time that this little may take, as expected."""


class TransferSpeeds:
    """Measured speeds of one cache's reads and of its engine. Belongs to the owner's thread."""

    __slots__ = (
        "_left_alone_run",
        "_page_bytes",
        "_page_size",
        "_ranks",
        "clock",
        "is_choosing",
        "left_alone_tokens",
        "prefill",
        "reads",
    )

    def __init__(
        self,
        layout: ModelLayout,
        config: CacheConfig,
        ranks: RankGroup = LocalRanks(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the ``clock`` of reads, which is read on workers' threads, too."""
        self._page_size = layout.page_size
        self._page_bytes = [sum(pool.page_bytes for pool in component.pools) for component in layout.components]
        self._ranks = ranks
        self._left_alone_run = 0
        """Times in a row that storage was left alone."""
        self.clock = clock
        self.is_choosing = config.transfer is TransferPolicy.FASTEST
        """Whether anything may be left alone."""
        self.left_alone_tokens = 0
        """Tokens that storage had and that were computed, because that is faster."""
        self.prefill = PrefillTime(clock)
        """Measured while ``is_choosing``."""
        self.reads = ReadTimes()
        """Of prefetches under every policy, for those with a deadline, too."""

    def payload_bytes(self, pages: Sequence[int]) -> int:
        """Return the bytes of so many pages of each component."""
        return sum(count * size for count, size in zip(pages, self._page_bytes, strict=True))

    def choose(self, storage: StorageTier, start: int, end: int, pages: Sequence[int]) -> LeftAlone | None:
        """Return pages [start, end) of a prompt if computing them takes less time than reading; None to read them.

        ``pages`` are to be read of each component. On every rank the same; None where one of them knows too little.
        """
        left_alone = self._compare(storage, start, end, pages, self._ranks)
        if left_alone is None:
            self._left_alone_run = 0
        return left_alone

    def look(self, storage: StorageTier, start: int, end: int, pages: Sequence[int]) -> LeftAlone | None:
        """Return what ``choose`` would by this rank's times alone; counts nothing."""
        return self._compare(storage, start, end, pages, LocalRanks())

    def is_trial_due(self) -> bool:
        """Count that storage is left alone once more; return whether to read a little of it, for its speed."""
        self._left_alone_run += 1
        return self._left_alone_run % TRIAL_EVERY == 0

    def trial_pages(self, left_alone: LeftAlone) -> int:
        """Return how many pages to read for that, one at least."""
        pages = left_alone.end - left_alone.start
        return max(1, min(pages, int(pages * TRIAL_S / left_alone.load_s)))

    def slices(self, storage: StorageTier, reads: Sequence[PageNumbers], operation: Operation) -> Iterator[list[Pages]]:
        """Yield by component the pages of ``reads`` to read next: all, or before a deadline some after the other.

        In the order of the prompt; on every rank the same, by the figures of the slowest.
        """
        counts = [len(pages) for pages in reads]
        if operation.answer_s == math.inf:
            yield [all_pages(count) for count in counts]
            return
        left = np.unique(np.concatenate(reads))
        payload_bytes = self.payload_bytes(counts)
        calls_count = max(calls_of(storage.objects_count(counts), payload_bytes), 1.0)
        call_pages, page_bytes = max(1, int(len(left) / calls_count)), payload_bytes / max(len(left), 1)
        while len(left):
            left_s, wait_s = max(operation.answer_s - self.clock(), 0.0), operation.answer_s - operation.started_s
            own = [self.reads.call_s, self.reads.byte_s * page_bytes, -call_pages, -left_s, wait_s]
            call_s, page_s, call_pages_min, left_s_min, wait_s = largest_of_all(self._ranks, own)
            count = pages_to_read(len(left), int(-call_pages_min), call_s, page_s, -left_s_min, wait_s)
            of_slice, left = left[:count], left[count:]
            yield [(of_slice[0] <= pages) & (pages <= of_slice[-1]) for pages in reads]

    def _compare(
        self, storage: StorageTier, start: int, end: int, pages: Sequence[int], ranks: RankGroup
    ) -> LeftAlone | None:
        if not self.is_choosing or end <= start:
            return None
        payload_bytes = self.payload_bytes(pages)
        calls_count = math.ceil(calls_of(storage.objects_count(pages), payload_bytes))
        read_s = calls_count * self.reads.call_s + payload_bytes * self.reads.byte_s
        own = [read_s, (end - start) * self._page_size * self.prefill.token_s]
        load_s, compute_s = largest_of_all(ranks, own)
        if not compute_s < load_s:  # one that is not a number, too
            return None
        return LeftAlone(start, end, self._page_size, load_s, compute_s)

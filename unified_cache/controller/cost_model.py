"""Pages that a read with a deadline takes next, by how long reads took lately: calls * call_s + bytes * byte_s.

Ranks of a group have measured each their own; a read is over when the slowest rank has its pages, and so they agree on
the largest of each time (``ranks.largest_of_all``).
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from unified_cache.controller import Operation, StorageTier
from unified_cache.controller.jobs import calls_of
from unified_cache.controller.ranks import LocalRanks, RankGroup, largest_of_all
from unified_cache.core.pool import ModelLayout, PageNumbers, Pages, all_pages

__all__ = ["ReadTimes", "TransferSpeeds", "pages_to_read"]

DRIFT = 0.3
"""Share by which ``call_s`` and ``byte_s`` may have changed since the last read."""

NOISE = 0.1
"""Share by which one read may differ from what both say: reads of stores and networks do by as much."""

IN_TIME_SHARE = 0.95
"""Part of the time until a deadline that reads are planned for."""

SPLIT_MIN = 8
"""A read is split in two for safety while there is time for so many calls, as each part pays for a call of its own, and
while that is more than one part in so many of the whole wait: of very small reads no speed can be known."""


class ReadTimes:
    """Moving averages of what a call of a store takes, and each byte: a Kalman filter. On the owner's thread.

    Until reads differ in size all time is taken for that of bytes, so that a small read is tried where a large one is
    too slow.
    """

    __slots__ = ("_variance", "byte_s", "call_s")

    def __init__(self) -> None:
        self.call_s = math.nan
        """Seconds of a call that brings nothing; NaN before the first read."""
        self.byte_s = math.nan
        self._variance = (0.0, 0.0, 0.0)
        """Of ``call_s``, of both together, and of ``byte_s``."""

    def record(self, calls_count: int, bytes_count: int, seconds: float) -> None:
        """Count a read; one that brought nothing, or took no time by the clock, says nothing."""
        if not calls_count or not bytes_count or not 0 < seconds < math.inf:
            return
        expected_s = calls_count * self.call_s + bytes_count * self.byte_s
        call, both, byte = self._variance
        call += (DRIFT * self.call_s) ** 2
        byte += (DRIFT * self.byte_s) ** 2
        call_part = calls_count * call + bytes_count * both
        byte_part = calls_count * both + bytes_count * byte
        variance = calls_count * call_part + bytes_count * byte_part
        if not (expected_s > 0 and variance >= 0):  # the first read; or rounding has left nothing to go by
            call_s, byte_s = seconds / calls_count, seconds / bytes_count
            self.call_s, self.byte_s = 0.0, byte_s
            self._variance = (call_s**2, -call_s * byte_s, byte_s**2)
            return
        variance += (NOISE * expected_s) ** 2
        self.call_s = max(self.call_s + call_part / variance * (seconds - expected_s), 0.0)
        self.byte_s = max(self.byte_s + byte_part / variance * (seconds - expected_s), 0.0)
        self._variance = (
            call - call_part**2 / variance,
            both - call_part * byte_part / variance,
            byte - byte_part**2 / variance,
        )


def pages_to_read(pages_count: int, call_pages: int, call_s: float, page_s: float, left_s: float, wait_s: float) -> int:
    """Return how many of ``pages_count`` pages to read next, one at least, to have most of them by a deadline.

    ``left_s`` of ``wait_s`` are left. All that are expected in time; if that is not all there is, what takes half of
    ``left_s``, so that there is time for more if reads are slower than expected; or, where calls are slow or the
    deadline is near, as much as one read brings in time. Of more than a call whole calls; where nothing is expected in
    time, or nothing is known (NaN), one. ``call_pages`` go into a call.
    """
    one_call = min(pages_count, call_pages)
    if math.isnan(call_s + page_s):
        return one_call

    def in_time(within_s: float) -> int:
        return bisect_right(
            range(1, pages_count + 1), within_s, key=lambda pages: -(-pages // call_pages) * call_s + pages * page_s
        )

    most = in_time(IN_TIME_SHARE * left_s)
    if most == pages_count:
        return most
    is_split = left_s >= max(SPLIT_MIN * call_s, wait_s / SPLIT_MIN)
    part = (in_time(left_s / 2) if is_split else 0) or most
    return max(part - part % call_pages, min(part, call_pages)) or one_call


class TransferSpeeds:
    """Measured speeds of one cache's reads. Belongs to the owner's thread."""

    __slots__ = ("_page_bytes", "_ranks", "clock", "reads")

    def __init__(
        self,
        layout: ModelLayout,
        ranks: RankGroup = LocalRanks(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the ``clock`` of reads, which is read on workers' threads, too."""
        self._page_bytes = [sum(pool.page_bytes for pool in component.pools) for component in layout.components]
        self._ranks = ranks
        self.clock = clock
        self.reads = ReadTimes()

    def payload_bytes(self, pages: Sequence[int]) -> int:
        """Return the bytes of so many pages of each component."""
        return sum(count * size for count, size in zip(pages, self._page_bytes, strict=True))

    def slices(self, storage: StorageTier, reads: Sequence[PageNumbers], operation: Operation) -> Iterator[list[Pages]]:
        """Yield by component the pages of ``reads`` to read next: all, or before a deadline some after the other.

        In the order of the prompt; on every rank the same, by the figures of the slowest.
        """
        counts = [len(pages) for pages in reads]
        if operation.respond_by_s == math.inf:
            yield [all_pages(count) for count in counts]
            return
        left = np.unique(np.concatenate(reads))
        payload_bytes = self.payload_bytes(counts)
        calls_count = max(calls_of(storage.objects_count(counts), payload_bytes), 1.0)
        call_pages, page_bytes = max(1, int(len(left) / calls_count)), payload_bytes / max(len(left), 1)
        while len(left):
            left_s, wait_s = (
                max(operation.respond_by_s - self.clock(), 0.0),
                operation.respond_by_s - operation.started_s,
            )
            own = [self.reads.call_s, self.reads.byte_s * page_bytes, -call_pages, -left_s, wait_s]
            call_s, page_s, call_pages_min, left_s_min, wait_s = largest_of_all(self._ranks, own)
            count = pages_to_read(len(left), int(-call_pages_min), call_s, page_s, -left_s_min, wait_s)
            of_slice, left = left[:count], left[count:]
            yield [(of_slice[0] <= pages) & (pages <= of_slice[-1]) for pages in reads]

"""Time of reads from storage: how long a call takes, how long each byte, and how much of a prompt to read next by that.

    time of a read = calls * call_s + bytes * byte_s

Both are moving averages. How far a read moves each of them follows from how sure they are (a Kalman filter): after
reads of one size any split of their time between the two is as good as another, and the first one of another size tells
them apart. Until then all time is taken for that of bytes, so that a small read is tried where a large one is too slow.
"""

import math
from bisect import bisect_right

__all__ = ["ReadTimes", "pages_to_read"]

DRIFT = 0.3
"""Share by which ``call_s`` and ``byte_s`` may have changed since the last read."""

NOISE = 0.1
"""Share by which one read may differ from what both say: reads of stores and networks do by as much."""

IN_TIME_SHARE = 0.95
"""Part of the time until a deadline that reads are planned for."""

SPLIT_MIN = 8
"""A read is split in two for safety while there is time for so many calls, as each part pays for a call of its own, and
while that is more than one part in so many of the whole wait: of very small reads no speed can be told."""


class ReadTimes:
    """Moving averages of what a call of a store takes, and each byte. Belongs to the owner's thread."""

    __slots__ = ("_variance", "byte_s", "call_s")

    def __init__(self) -> None:
        self.call_s = math.nan
        """Seconds of a call that brings nothing; NaN before the first read."""
        self.byte_s = math.nan
        self._variance = (0.0, 0.0, 0.0)
        """Of ``call_s``, of both together, and of ``byte_s``."""

    def note(self, calls_count: int, bytes_count: int, seconds: float) -> None:
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

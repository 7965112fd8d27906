"""Length of a prefix that makes the first token come soonest.

    expected time to the first token, if the prefix up to an end is brought up:

        read from storage      | latency, what is queued, bytes  |
        copied to the device                                     | the same, of that leg |
        computed                                                                         | from the end on |

Of all ends at which the prompt can be resumed the one of the least sum is chosen. What a cache does by itself is to
take the longest: another is chosen only where it gains more than the standard error of the difference.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unified_cache.controller import LeftAloneReason

__all__ = ["ExpectedTimes", "soonest"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExpectedTimes:
    """Times expected for each end that could be brought up, ascending; the first is what is there without it."""

    steps_s: Sequence[Floats]
    """By step, reading and copying: seconds for each end."""
    compute_s: Floats
    errors: Sequence[float]
    """Relative standard error of each step, then of ``compute_s``; they are independent of each other."""
    left_s: float
    """Time until the deadline; the first of the steps must be over by then."""

    @property
    def load_s(self) -> Floats:
        """Seconds of all steps together."""
        seconds: Floats = np.sum(self.steps_s, axis=0)
        return seconds


def soonest(expected: ExpectedTimes) -> tuple[int, LeftAloneReason | None]:
    """Return which end makes the first token come soonest, and why none after it, if there is one after it.

    Of equal ones the longest. Where anything expected is not a number, it is the last.
    """
    last = len(expected.compute_s) - 1
    total = expected.load_s + expected.compute_s
    if not np.isfinite(total).all():
        return last, None
    in_time = expected.steps_s[0] <= expected.left_s
    in_time[0] = True
    usual = int(np.flatnonzero(in_time)[-1])
    best = _least(np.where(in_time, total, np.inf))
    doubt_s = math.hypot(
        *(
            error * float(times[usual] - times[best])
            for error, times in zip(expected.errors, (*expected.steps_s, expected.compute_s), strict=True)
        )
    )
    chosen = best if total[best] + doubt_s < total[usual] else usual
    if chosen == last:
        return last, None
    is_late = usual < last and _least(total) > chosen
    return chosen, LeftAloneReason.PAST_DEADLINE if is_late else LeftAloneReason.COMPUTING_IS_FASTER


def _least(times: Floats) -> int:
    """Return the last place of the least."""
    return len(times) - 1 - int(times[::-1].argmin())

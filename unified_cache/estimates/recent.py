"""Seconds as a sum of parts, such as a latency and bytes over a bandwidth, fitted over the last things that were timed.

The parts of each thing (1, bytes) and its seconds go into a ring. The fit has no negative part, and makes the sum of
relative errors small, not of their squares (iteratively reweighted least squares): a few strange times in the ring move
it little. Times that have changed for good are told from strange ones by their run: after ``STRANGE_RUN_MAX`` in a row
that took more than ``STRANGE_RATIO`` times as long as expected, or less than a ``STRANGE_RATIO``th, all before them is
forgotten.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["FittedSeconds", "RecentTimes"]

RECENT_MAX = 32
"""Things remembered: enough that some strange ones among them do no harm."""

KNOWN_MIN = 4
"""Things timed before anything is said of the next one."""

STRANGE_RATIO = 2.0
STRANGE_RUN_MAX = 3
"""One thing in a row is a hiccup, two may be; see above."""

REWEIGHTED_TIMES = 6
"""Rounds of reweighting; later ones change the fit by less than a hundredth."""

RIDGE = np.array([1e-3, 1e-5, 1e-4])
"""Weight of the wish for small parts, by part: where all things timed were equally large, nothing tells a latency from
a bandwidth, and then all of it is taken for bandwidth, or for tokens."""

ERROR_MIN = 5e-3
"""Relative error below which one thing says as much as another."""

SPREAD_MIN = 0.02
"""Relative error that one thing is said to have at least, by the median."""

ERROR_BY_MEDIAN = 1.4826 * math.sqrt(math.pi / 2)
"""Standard error of a fit to one thing by the median of absolute errors: a normal error's deviation by its median, and
that of a middle of many by that of their mean."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FittedSeconds:
    """Seconds of each part by its size, and how far off they are."""

    weights: tuple[float, ...]
    """Seconds for one of each part."""
    error: float
    """Relative standard error of what is expected: that of one thing by the root of how many were timed lately."""
    longest_s: float
    """Of the things timed lately."""

    def error_at(self, seconds: float) -> float:
        """Return the relative error of an estimate of ``seconds``: more, the further it is beyond what was timed."""
        return self.error * max(1.0, seconds / self.longest_s)


class RecentTimes:
    """The last things of one kind that were timed: sizes of their parts, and seconds. O(1) each, and in memory."""

    __slots__ = ("_count", "_fit", "_new_count", "_parts", "_seconds", "_strange_run")

    def __init__(self, parts_count: int) -> None:
        """Take things of ``parts_count`` parts, three at most."""
        self._parts = np.zeros((RECENT_MAX, parts_count))
        self._seconds = np.zeros(RECENT_MAX)
        self._count = 0
        """Things noted since all was forgotten last; the ring has the last of them."""
        self._strange_run = 0
        """Last things that took longer than expected, or, negative, less long, by ``STRANGE_RATIO``."""
        self._fit: FittedSeconds | None = None
        self._new_count = 0
        """Things noted since that fit."""

    def note(self, parts: Sequence[float], seconds: float) -> None:
        """Remember a thing that took ``seconds``; what took none or less is a clock that stands still or jumps."""
        if not 0 < seconds < math.inf:
            return
        place = self._count % RECENT_MAX
        self._parts[place], self._seconds[place] = parts, seconds
        self._count += 1
        self._new_count += 1
        self._forget_if_changed(parts, seconds)

    @property
    def fitted(self) -> FittedSeconds | None:
        """The fit over what is remembered; None while that is too little.

        It is made anew once an eighth of what it was made of is new.
        """
        known = min(self._count, RECENT_MAX)
        if known >= KNOWN_MIN and (self._fit is None or self._new_count * 8 > known):
            self._fit = fit_of(self._parts[:known], self._seconds[:known])
            self._new_count = 0
        return self._fit

    def _forget_if_changed(self, parts: Sequence[float], seconds: float) -> None:
        if self._fit is None:
            return
        expected_s = sum(weight * part for weight, part in zip(self._fit.weights, parts, strict=True))
        direction = (seconds > expected_s * STRANGE_RATIO) - (seconds * STRANGE_RATIO < expected_s)
        goes_on = direction * self._strange_run > 0
        self._strange_run = self._strange_run + direction if goes_on else direction
        if abs(self._strange_run) < STRANGE_RUN_MAX:
            return
        last = np.arange(self._count - STRANGE_RUN_MAX, self._count) % RECENT_MAX
        self._parts[:STRANGE_RUN_MAX], self._seconds[:STRANGE_RUN_MAX] = self._parts[last], self._seconds[last]
        self._count = STRANGE_RUN_MAX
        self._strange_run = 0
        self._fit = None


def fit_of(parts: Floats, seconds: Floats) -> FittedSeconds:
    """Fit seconds, positive, to parts, shape (things, parts) and not negative."""
    relative = parts / seconds[:, None]
    scale = np.sqrt((relative**2).mean(axis=0))
    scale[scale == 0] = 1
    relative /= scale
    ridge = np.diag(RIDGE[: len(scale)])
    importance = np.ones(len(seconds))
    weights = np.zeros(len(scale))
    for _ in range(REWEIGHTED_TIMES):
        weighted = relative * (importance / importance.sum())[:, None]
        weights = _not_negative(relative.T @ weighted + ridge, weighted.sum(axis=0))
        importance = 1 / np.maximum(np.abs(relative @ weights - 1), ERROR_MIN)
    errors = np.abs(relative @ weights - 1)
    error = ERROR_BY_MEDIAN * max(float(np.median(errors)), SPREAD_MIN) / math.sqrt(len(seconds))
    return FittedSeconds(tuple((weights / scale).tolist()), error, float(seconds.max()))


def _not_negative(matrix: Floats, right: Floats) -> Floats:
    """Solve normal equations, leaving out one after the other the parts that would come out negative."""
    solution = np.zeros(len(right))
    kept = np.arange(len(right))
    while kept.size:
        found = np.linalg.solve(matrix[np.ix_(kept, kept)], right[kept])
        if (found >= 0).all():
            solution[kept] = found
            break
        kept = np.delete(kept, int(found.argmin()))
    return solution

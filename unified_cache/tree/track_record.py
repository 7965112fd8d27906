"""Track record of a forecast: whether requests have come back of late as it said, or rather as if they did not differ.

A forecast is slow to unlearn: where users change their habits, it goes on being wrong for about as long as it has been
right. But of every request that was waiting at some age two have foretold the chance that it is continued then: the
forecast by its cell, and lru, which has one chance for all that never rises with age.

    score = sum of  (chance - common) x (continued / mean - went on waiting / (1 - mean)),  mean of both chances

is more than zero on average where requests come back as the forecast says, and as much less where they come back as
lru says: a logarithm of the ratio of likelihoods, with ``2 (x - 1) / (x + 1)`` in the place of ``log x``, which
machines may round differently. A change of habits is seen long before hits tell it: no page has to be evicted for it.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Floats", "TrackRecord", "summed"]

FADING = 0.5
"""What the score of a check counts at the next one."""
DEVIATIONS = 1.0
"""Standard deviations by which a score must be below zero before that is taken for more than luck."""

Floats: TypeAlias = npt.NDArray[np.float64]


class TrackRecord:
    """Score of what a forecast has foretold, by what came."""

    __slots__ = ("_chances", "_common", "_ended", "_score", "_spent", "_spread")

    def __init__(self) -> None:
        self._ended = self._spent = np.zeros((1, 1))
        """Continuations, and time that requests spent, by cell and age, until the last check."""
        self._chances = self._common = np.full((1, 1), 0.5)
        """What is foretold: no difference, at first."""
        self._score = 0.0
        self._spread = 0.0
        """Variance of the score that luck would bring, were the truth half-way between both."""

    @property
    def is_bad(self) -> bool:
        """Whether what was foretold has not come true of late, by more than luck explains."""
        return self._score < 0 and self._score * self._score > DEVIATIONS * DEVIATIONS * self._spread

    def check(self, ended: Floats, spent: Floats) -> None:
        """Score what has come since the last check; counts are those of all that was seen."""
        continued, waited = ended - self._ended, spent - self._spent
        self._ended, self._spent = ended, spent
        if _total(continued) < 0:
            return  # the log has forgotten every other request meanwhile
        difference, mean = self._chances - self._common, (self._chances + self._common) / 2
        score = difference * (continued / mean - waited / (1 - mean))
        spread = difference * difference * (continued + waited) / (mean * (1 - mean))
        self._score = FADING * self._score + _total(score)
        self._spread = FADING * self._spread + _total(spread)

    def foretell(self, hazards: Floats, common: Floats) -> None:
        """Hold these hazards against what comes, by cell and age, beside the one that all cells have in common.

        A hazard is a number of requests that are continued for each that goes on waiting.
        """
        self._chances, self._common = hazards / (1 + hazards), common / (1 + common)


def summed(counts: Floats, axis: int) -> Floats:
    """Add up an axis in its order, whatever the machine, and keep it."""
    return np.add.accumulate(counts, axis=axis).take([-1], axis=axis)


def _total(counts: Floats) -> float:
    return float(summed(summed(counts, 1), 0)[0, 0])
